"""BERT-base with a classifier: tokens a second, forward and fine-tuning, of keras_tx, transformers and KerasHub.

python -m benchmarks pretrained
python -m benchmarks pretrained --batch-size 16 --length 128 --rounds 7
python -m benchmarks pretrained --padding 0.5

All sides have random weights, a dropout of 0.1 and Adam; TensorFlow runs without XLA and PyTorch eagerly, with its
fused attention. With `--padding` the texts have evenly spread lengths and are padded to the longest, and on TensorFlow
keras_tx runs once more with `skip_padding=False`. The rates count real tokens only.
"""

import functools
import os
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks import alternating
from keras_tx import pretrained

VOCABULARY, HIDDEN, HEADS, INTERMEDIATE, POSITIONS, RATE = 30522, 768, 12, 3072, 512, 2e-5
STEPS = 3  # batches in one run
COMPUTING = f"{alternating.OURS}, skip_padding=False"
PARTS = ("forward", "fine-tuning")
Sides = tuple[Callable[[], object], Callable[[], object]]  # forward and training, `STEPS` batches each


def config(num_layers: int) -> dict:
    return {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
    }


def of_keras(model: keras.Model, inputs: dict[str, np.ndarray], labels: np.ndarray) -> Sides:
    """As `predict` and `fit` compute: in compiled graphs."""
    on_tensorflow = keras.backend.backend() == "tensorflow"
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(RATE), loss, jit_compile=False if on_tensorflow else "auto")
    tensors = {name: keras.ops.convert_to_tensor(x) for name, x in inputs.items()}
    targets, answer = keras.ops.convert_to_tensor(labels), model.predict_on_batch
    if on_tensorflow:
        import tensorflow as tf

        answer = tf.function(lambda x: model(x, training=False))

    def forward():
        for _ in range(STEPS):
            answer(tensors)

    def train():
        for _ in range(STEPS):
            value = model.train_on_batch(tensors, targets)
        assert np.all(np.isfinite(value))

    return forward, train


def ours(
    num_layers: int, inputs: dict[str, np.ndarray], labels: np.ndarray, skip_padding: bool | None = None
) -> tuple[int, Sides]:
    model = pretrained.PretrainedModel(config(num_layers), skip_padding=skip_padding)
    symbolic = {name: keras.Input((None,), dtype="int32", name=name) for name in inputs}
    classifier = keras.Model(symbolic, model(symbolic)["logits"])
    return classifier.count_params(), of_keras(classifier, inputs, labels)


def keras_hub(num_layers: int, inputs: dict[str, np.ndarray], labels: np.ndarray) -> tuple[int, Sides]:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        VOCABULARY, num_layers, HEADS, HIDDEN, INTERMEDIATE, dropout=0.1, max_sequence_length=POSITIONS
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=None)
    names = {"input_ids": "token_ids", "attention_mask": "padding_mask", "token_type_ids": "segment_ids"}
    return model.count_params(), of_keras(model, {names[key]: x for key, x in inputs.items()}, labels)


def transformers(num_layers: int, inputs: dict[str, np.ndarray], labels: np.ndarray) -> tuple[int, Sides]:
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.set_num_threads(os.cpu_count() or 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = keras.config.dtype_policy().compute_dtype == "bfloat16"
    model = BertForSequenceClassification(BertConfig(**config(num_layers))).to(device)
    model.set_attn_implementation("sdpa")  # PyTorch's fused attention
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    tensors = {name: torch.tensor(x, dtype=torch.long, device=device) for name, x in inputs.items()}
    targets = torch.tensor(labels, dtype=torch.long, device=device)

    def forward():
        model.eval()
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16, enabled=half):
            for _ in range(STEPS):
                logits = model(**tensors).logits
        logits.float().cpu()  # waits for a GPU

    def train():
        model.train()
        for _ in range(STEPS):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                loss = model(**tensors, labels=targets).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert np.isfinite(loss.item())

    return sum(parameter.numel() for parameter in model.parameters()), (forward, train)


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--padding", type=float, default=0.0, help="share of the tokens that is padding, at most 0.5")
    parser.add_argument("--policy", default="float32", help="dtype policy")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    if not 0 <= arguments.padding <= 0.5:
        parser.error(f"--padding must be from 0 to 0.5. Received: {arguments.padding}")
    random, shape = np.random.default_rng(7), (arguments.batch_size, arguments.length)
    lengths = np.linspace(1 - 2 * arguments.padding, 1, arguments.batch_size) * arguments.length
    real = np.arange(arguments.length) < random.permutation(np.maximum(1, np.round(lengths)))[:, None]
    inputs = {"input_ids": random.integers(1000, VOCABULARY, shape, dtype="int32") * real}
    inputs |= {"attention_mask": real.astype("int32"), "token_type_ids": np.zeros(shape, "int32")}
    labels = random.integers(0, 2, arguments.batch_size, dtype="int32")
    sides = {}
    backend = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}[keras.backend.backend()]
    makers = {alternating.OURS: ours, "transformers, PyTorch": transformers, f"KerasHub, {backend}": keras_hub}
    skips = arguments.padding and backend == "TensorFlow"  # the other backends skip no padding
    if skips:
        makers[COMPUTING] = functools.partial(ours, skip_padding=False)
    for name, make in makers.items():
        parameters, sides[name] = make(arguments.layers, inputs, labels)
        print(f"{name:24} {parameters:,} parameters")
    tokens = STEPS * int(real.sum())
    chosen = [PARTS.index(part) for part in arguments.parts]
    alternating.warm_up({name: [side[index] for index in chosen] for name, side in sides.items()}, times=1)
    for part in arguments.parts:
        runs = {name: side[PARTS.index(part)] for name, side in sides.items()}
        times = alternating.in_turns(runs, arguments.rounds)
        case = f"{part}, {shape[0]} x {shape[1]}, {1 - real.mean():.0%} padding, {arguments.policy}"
        options = {"file": arguments.json, "variants": [COMPUTING] if skips else [], "steps": STEPS}
        alternating.report(case, times, tokens, "real tokens", **options)


if __name__ == "__main__":
    main()

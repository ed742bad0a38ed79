"""Text classifiers over padded batches: tokens a second in training and inference, keras_tx and its peers.

python -m benchmarks encoder
python -m benchmarks encoder --padding 0 --parts inference
python -m benchmarks encoder --shapes 16x128 4x512 1x2048 --policy mixed_bfloat16 --xla --jax --transformers

6 encoder layers, width 512, 8 heads, feed-forward 2048, dropout 0.1, Adam, and a head on the mean of the real tokens.
All sides get the same batches, in which texts have evenly spread lengths and 30 % of the tokens are padding. On
TensorFlow keras_tx runs twice: as a `TextClassifier` with its defaults, and with `skip_padding=False`. "of the limit"
compares a rate with that of plain matrix products, measured in the same rounds; padding tokens count.
"""

import argparse
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_tx
from benchmarks import alternating

VOCABULARY, LAYERS, WIDTH, HEADS, INTERMEDIATE, DROPOUT = 1009, 6, 512, 8, 2048, 0.1
STEPS = 4  # batches in one run
PARTS = ("training", "inference")
COMPUTING = f"{alternating.OURS}, skip_padding=False"
Sides = tuple[Callable[[], object], Callable[[], object]]  # training and inference, `STEPS` batches each


def batch(size: int, length: int, padding: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Ids (B, T), padded with 0, and labels (B,). A share of `padding` of the tokens is padding, at most 0.5."""
    random = np.random.default_rng(7)
    ids = random.integers(1, VOCABULARY, (size, length), dtype="int32")
    shares = random.permutation(np.linspace(1 - 2 * padding, 1, size)) if size > 1 else np.array([1 - padding])
    ids *= np.arange(length) < np.maximum(1, np.round(shares * length))[:, None]
    return ids, random.integers(0, 2, size, dtype="int32")


def of_keras(model: keras.Model, ids, labels, jit: bool = False) -> Sides:
    jit = jit or keras.backend.backend() == "jax"  # without it JAX would run one operation at a time
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit)
    x, y = keras.ops.convert_to_tensor(ids), keras.ops.convert_to_tensor(labels)

    def train():
        for _ in range(STEPS):
            value = model.train_on_batch(x, y)
        assert np.all(np.isfinite(value))

    def infer():
        for _ in range(STEPS):
            model.predict_on_batch(x)

    return train, infer


def our_stack(
    inputs: keras.KerasTensor, vocabulary_size: int, max_length: int, skip_padding: bool = False
) -> keras.KerasTensor:
    """(B, T) ids, 0 padding -> (B, T, D)."""
    options = {"position_encoding": "learned", "max_length": max_length, "dropout": 0.0}
    hidden = keras_tx.layers.TokenEmbedding(vocabulary_size, WIDTH, **options)(inputs)
    sizes = {"num_heads": HEADS, "intermediate_dim": INTERMEDIATE}
    encoder = keras_tx.layers.Encoder(LAYERS, **sizes, dropout=DROPOUT, skip_padding=skip_padding)
    return encoder(hidden)


def keras_hub_stack(inputs: keras.KerasTensor, vocabulary_size: int, max_length: int) -> keras.KerasTensor:
    import keras_hub

    hidden = keras_hub.layers.TokenAndPositionEmbedding(vocabulary_size, max_length, WIDTH, mask_zero=True)(inputs)
    for _ in range(LAYERS):
        hidden = keras_hub.layers.TransformerEncoder(INTERMEDIATE, HEADS, dropout=DROPOUT)(hidden)
    return hidden


def torch_model(vocabulary_size: int, max_length: int, num_classes: int | None = None):
    """(B, T) ids, 0 padding -> numbers (B, T), or logits (B, C) with `num_classes`."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = torch.nn.Embedding(vocabulary_size, WIDTH)
            self.positions = torch.nn.Embedding(max_length, WIDTH)
            layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, INTERMEDIATE, DROPOUT, batch_first=True)
            layer.dropout.p = 0.0  # inside the feed-forward, where the other sides have no dropout
            self.encoder = torch.nn.TransformerEncoder(layer, LAYERS)
            self.head = torch.nn.Linear(WIDTH, num_classes or 1)

        def forward(self, x):
            hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
            hidden = self.encoder(hidden, src_key_padding_mask=x == 0)
            if num_classes is None:
                return self.head(hidden)[..., 0]
            real = (x[:, : hidden.shape[1]] != 0)[..., None].to(hidden.dtype)
            return self.head((hidden * real).sum(1) / real.sum(1))

    return Model().to(torch_device())


def transformers_model(vocabulary_size: int, max_length: int, num_classes: int):
    """transformers' BERT of the same sizes, with PyTorch's fused attention: (B, T) ids, 0 padding -> logits (B, C)."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    config = transformers.BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=INTERMEDIATE,
        hidden_act="relu",
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        max_position_embeddings=max_length,
        attn_implementation="sdpa",
    )

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = transformers.BertModel(config, add_pooling_layer=False)
            self.bert.embeddings.dropout.p = 0.0  # as on the other sides
            self.head = torch.nn.Linear(WIDTH, num_classes)

        def forward(self, x):
            is_real = x != 0
            hidden = self.bert(x, attention_mask=is_real.long()).last_hidden_state
            real = is_real[..., None].to(hidden.dtype)
            return self.head((hidden * real).sum(1) / real.sum(1))

    return Model().to(torch_device())


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def ours(ids, labels, **encoder_options) -> Sides:
    embedding = {"position_encoding": "learned", "max_length": ids.shape[1], "dropout": 0.0}
    sizes = {"num_layers": LAYERS, "hidden_dim": WIDTH, "num_heads": HEADS, "intermediate_dim": INTERMEDIATE}
    options = {"embedding_options": embedding, "encoder_options": encoder_options}
    model = keras_tx.models.TextClassifier(VOCABULARY, 2, **sizes, dropout=DROPOUT, **options)
    return of_keras(model, ids, labels)


def keras_hub(ids, labels, jit: bool = False) -> Sides:
    inputs = keras.Input((ids.shape[1],), batch_size=ids.shape[0], dtype="int32")
    hidden = keras_hub_stack(inputs, VOCABULARY, ids.shape[1])
    pooled = keras.layers.GlobalAveragePooling1D(dtype="float32")(hidden)
    return of_keras(keras.Model(inputs, keras.layers.Dense(2, dtype="float32")(pooled)), ids, labels, jit)


def pytorch(ids, labels, make: Callable = torch_model) -> Sides:
    import torch

    half = keras.config.dtype_policy().compute_dtype == "bfloat16"
    device = torch_device()
    model = make(VOCABULARY, ids.shape[1], num_classes=2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    answering = copy.deepcopy(model).bfloat16() if half else model  # autocast has no fast path on CPUs
    x, y = (torch.tensor(one, dtype=torch.long, device=device) for one in (ids, labels))

    def train():
        model.train()
        for _ in range(STEPS):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert np.isfinite(loss.item())

    def infer():
        answering.eval()
        with torch.inference_mode():
            for _ in range(STEPS):
                outputs = answering(x)
            outputs.cpu()  # waits for a GPU

    return train, infer


def keras_hub_on_jax(size: int, length: int, padding: float) -> Sides:
    """KerasHub on JAX, compiled, in a process of its own that runs a part when it is asked to."""
    command = [sys.executable, "-m", "benchmarks", "encoder", "--shapes", f"{size}x{length}", "--serve"]
    command += ["--layers", str(LAYERS), "--padding", str(padding)]
    process = subprocess.Popen(
        [*command, "--policy", keras.config.dtype_policy().name],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def ask(part: int) -> None:
        print(part, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer == "done\n", answer

    return lambda: ask(0), lambda: ask(1)


def serve(sides: Sides) -> None:
    for part in sys.stdin:
        sides[int(part)]()
        print("done", flush=True)


def matrix_products(dtype: str, rows: int, inner: int, columns: int) -> Callable[[], object]:
    """A product of `rows` x `inner` and `inner` x `columns` numbers; waits for the last one.

    The numbers are random: GPUs multiply zeros and ones faster than what a model has.
    """
    a, b = (keras.random.normal(shape, dtype=dtype, seed=7) for shape in ((rows, inner), (inner, columns)))
    return lambda: keras.ops.convert_to_numpy(keras.ops.matmul(a, b)[-1:, -1:])


def operations(size: int, length: int) -> float:
    """The floating-point operations of a forward pass's matrix products: projections, feed-forward and attention."""
    by_token = 2 * (4 * WIDTH * WIDTH + 2 * WIDTH * INTERMEDIATE) + 2 * 2 * length * WIDTH
    return float(LAYERS * size * length * by_token)


def sizes(shape: str) -> tuple[int, int]:
    size, length = shape.split("x")
    return int(size), int(length)


def main() -> None:
    global LAYERS
    parser = alternating.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["16x128", "4x512", "1x2048"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--padding", type=float, default=0.3, help="share of the tokens that is padding, at most 0.5")
    parser.add_argument("--policy", default="float32", help="dtype policy")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--xla", action="store_true", help="KerasHub compiled by XLA, too")
    parser.add_argument("--jax", action="store_true", help="KerasHub on JAX, too")
    parser.add_argument("--transformers", action="store_true", help="BERT of transformers on PyTorch, too")
    parser.add_argument(
        "--products", type=int, nargs=3, default=[4096, 1024, 4096], help="sizes of the products that give the limit"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    LAYERS = arguments.layers
    if not 0 <= arguments.padding <= 0.5:
        parser.error(f"--padding must be from 0 to 0.5. Received: {arguments.padding}")
    if arguments.serve:
        return serve(keras_hub(*batch(*sizes(arguments.shapes[0]), arguments.padding), jit=True))
    backend = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}[keras.backend.backend()]
    makers: dict[str, Callable[..., Sides]] = {
        alternating.OURS: ours,
        f"KerasHub, {backend}": keras_hub,
        "PyTorch, nn.Transformer": pytorch,
    }
    if backend == "TensorFlow":  # the other backends skip no padding
        makers[COMPUTING] = lambda *data: ours(*data, skip_padding=False)
    if arguments.xla:
        makers["KerasHub, TensorFlow, XLA"] = lambda *data: keras_hub(*data, jit=True)
    if arguments.jax:
        makers["KerasHub, JAX"] = lambda ids, _: keras_hub_on_jax(*ids.shape, arguments.padding)
    if arguments.transformers:
        makers["PyTorch, transformers"] = lambda *data: pytorch(*data, make=transformers_model)
    product = matrix_products(keras.config.dtype_policy().compute_dtype, *arguments.products)
    product_operations = 2 * np.prod(arguments.products, dtype="float64")
    for shape in arguments.shapes:
        size, length = sizes(shape)
        sides = {name: make(*batch(size, length, arguments.padding)) for name, make in makers.items()}
        chosen = [PARTS.index(part) for part in arguments.parts]
        alternating.warm_up({name: [side[index] for index in chosen] for name, side in sides.items()})
        product()
        for part in arguments.parts:
            passes = 3 if part == "training" else 1
            runs = {name: side[PARTS.index(part)] for name, side in sides.items()} | {"matrix products": product}
            times = alternating.in_turns(runs, arguments.rounds)
            products = product_operations / np.median(times.pop("matrix products"))  # operations a second
            limit = products * size * length / (passes * operations(size, length))
            case = f"{part}, {shape}, {arguments.padding:.0%} padding, {arguments.policy}"
            amount = STEPS * size * length
            variants = [COMPUTING] if COMPUTING in times else []
            options = {"file": arguments.json, "limit": limit, "variants": variants, "steps": STEPS}
            alternating.report(case, times, amount, "tokens", **options)
            print(f"  the limit, plain matrix products: {products / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()

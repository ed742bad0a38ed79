"""A stack of encoder layers over padded batches: tokens a second in training and inference, keras_tx and its peers.

python -m benchmarks encoder
python -m benchmarks encoder --shapes 16x128 4x512 1x2048 --policy mixed_bfloat16 --xla --jax

6 layers, width 512, 8 heads, feed-forward 2048, dropout 0.1, Adam. All sides get the same batches, in which a quarter
of the tokens is padding. On TensorFlow keras_tx runs twice: once it computes the padding tokens like the others, once
it skips them. "of the limit" compares a rate with that of plain matrix products, measured in the same rounds; padding
tokens count.
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
SKIPPING = f"{alternating.OURS}, skip_padding"
Sides = tuple[Callable[[], object], Callable[[], object]]  # training and inference, `STEPS` batches each


def batch(size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (B, T), padded with 0, and targets (B, T). Padding is the second half of every other row."""
    random = np.random.default_rng(7)
    ids = random.integers(1, VOCABULARY, (size, length), dtype="int32")
    targets = random.normal(size=(size, length)).astype("float32")
    for row in range(0, size, 2):
        ids[row, length // 2 if size > 1 else 3 * length // 4 :] = 0
    return ids, targets


def of_keras(build: Callable[[keras.KerasTensor], keras.KerasTensor], ids, targets, jit: bool = False) -> Sides:
    jit = jit or keras.backend.backend() == "jax"  # without it JAX would run one operation at a time
    inputs = keras.Input((ids.shape[1],), batch_size=ids.shape[0], dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(build(inputs))[..., 0])
    model.compile(keras.optimizers.Adam(1e-4), "mean_squared_error", jit_compile=jit)
    x, y = keras.ops.convert_to_tensor(ids), keras.ops.convert_to_tensor(targets)

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


def torch_model(vocabulary_size: int, max_length: int):
    """(B, T) ids, 0 padding -> (B, T)."""
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
            self.head = torch.nn.Linear(WIDTH, 1)

        def forward(self, x):
            hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
            return self.head(self.encoder(hidden, src_key_padding_mask=x == 0))[..., 0]

    return Model().to(torch_device())


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def ours(ids, targets, skip_padding: bool = False) -> Sides:
    return of_keras(lambda inputs: our_stack(inputs, VOCABULARY, ids.shape[1], skip_padding), ids, targets)


def keras_hub(ids, targets, jit: bool = False) -> Sides:
    return of_keras(lambda inputs: keras_hub_stack(inputs, VOCABULARY, ids.shape[1]), ids, targets, jit)


def pytorch(ids, targets) -> Sides:
    import torch

    half = keras.config.dtype_policy().compute_dtype == "bfloat16"
    device = torch_device()
    model = torch_model(VOCABULARY, ids.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    answering = copy.deepcopy(model).bfloat16() if half else model  # autocast has no fast path on CPUs
    x, y = torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(targets, device=device)

    def train():
        model.train()
        for _ in range(STEPS):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
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


def keras_hub_on_jax(size: int, length: int) -> Sides:
    """KerasHub on JAX, compiled, in a process of its own that runs a part when it is asked to."""
    command = [sys.executable, "-m", "benchmarks", "encoder", "--shapes", f"{size}x{length}", "--serve"]
    command += ["--layers", str(LAYERS)]
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
    """A product of `rows` x `inner` and `inner` x `columns` numbers; waits for the last one."""
    a, b = keras.ops.ones((rows, inner), dtype), keras.ops.ones((inner, columns), dtype)
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
    parser.add_argument("--policy", default="float32", help="dtype policy")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--xla", action="store_true", help="KerasHub compiled by XLA, too")
    parser.add_argument("--jax", action="store_true", help="KerasHub on JAX, too")
    parser.add_argument(
        "--products", type=int, nargs=3, default=[4096, 1024, 4096], help="sizes of the products that give the limit"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    LAYERS = arguments.layers
    if arguments.serve:
        return serve(keras_hub(*batch(*sizes(arguments.shapes[0])), jit=True))
    backend = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}[keras.backend.backend()]
    makers: dict[str, Callable[..., Sides]] = {
        alternating.OURS: ours,
        f"KerasHub, {backend}": keras_hub,
        "PyTorch, nn.Transformer": pytorch,
    }
    if backend == "TensorFlow":  # the other backends skip no padding
        makers[SKIPPING] = lambda *data: ours(*data, skip_padding=True)
    if arguments.xla:
        makers["KerasHub, TensorFlow, XLA"] = lambda *data: keras_hub(*data, jit=True)
    if arguments.jax:
        makers["KerasHub, JAX"] = lambda ids, _: keras_hub_on_jax(*ids.shape)
    product = matrix_products(keras.config.dtype_policy().compute_dtype, *arguments.products)
    product_operations = 2 * np.prod(arguments.products, dtype="float64")
    for shape in arguments.shapes:
        size, length = sizes(shape)
        sides = {name: make(*batch(size, length)) for name, make in makers.items()}
        for part, (case, passes) in enumerate((("training", 3), ("inference", 1))):
            runs = {name: side[part] for name, side in sides.items()} | {"matrix products": product}
            alternating.in_turns(runs, 2)  # compiles
            times = alternating.in_turns(runs, arguments.rounds)
            products = product_operations / np.median(times.pop("matrix products"))  # operations a second
            limit = products * size * length / (passes * operations(size, length))
            case = f"{case}, {shape}, {arguments.policy}"
            amount = STEPS * size * length
            variants = [SKIPPING] if SKIPPING in times else []
            options = {"file": arguments.json, "limit": limit, "variants": variants, "steps": STEPS}
            alternating.report(case, times, amount, "tokens", **options)
            print(f"  the limit, plain matrix products: {products / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()

"""Peak memory and seconds of a training step with long sequences, a window or a large vocabulary.

python -m benchmarks memory
python -m benchmarks memory --only attention --lengths 4096 8192 16384
KERAS_BACKEND=jax python -m benchmarks memory --policy mixed_bfloat16 --together   # on a GPU

Each case has a process of its own. Attention: 2 encoder layers of 4 heads x 64, feed-forward 1024, batch 1, Adam.
Vocabulary: logits of 8,192 tokens over 50,000 and their cross-entropy, forward and backward, by chunks of 128 and of
1,024 tokens, and whole. Memory is what the steps need beyond what was held before the first one: of the GPU if there is
one, else of the process.
"""

import argparse
import contextlib
import fcntl
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import alternating

WIDTH, HEADS, INTERMEDIATE, LAYERS = 256, 4, 1024, 2
TOKENS, VOCABULARY, HIDDEN, WINDOW = 8192, 50000, 256, 256
CHUNKS = {f"keras_tx, chunks of {size:,}": size for size in (128, 1024)}


def attention_step(side: str, length: int):
    """A function that trains one step of `side`: "keras_tx", with or without more words, or "KerasHub"."""
    import keras
    import numpy as np

    import keras_tx

    inputs = keras.Input((length, WIDTH), batch_size=1)
    if side == "KerasHub":
        import keras_hub

        hidden = inputs
        for _ in range(LAYERS):
            hidden = keras_hub.layers.TransformerEncoder(INTERMEDIATE, HEADS)(hidden)
    else:
        options = {"blockwise": None if "kernels" in side else True}
        options |= {"sliding_window": WINDOW} if "window" in side else {}
        sizes = {"num_heads": HEADS, "intermediate_dim": INTERMEDIATE}
        hidden = keras_tx.layers.Encoder(LAYERS, **sizes, dropout=0.0, attention_options=options)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    on_tensorflow = keras.backend.backend() == "tensorflow"
    model.compile("adam", "mean_squared_error", jit_compile=False if on_tensorflow else "auto")
    x = np.random.default_rng(7).normal(size=(1, length, WIDTH)).astype("float32")
    return lambda: model.train_on_batch(x, x[..., :1])


def vocabulary_step(side: str, tokens: int):
    """A function that computes loss and gradients of `side`: one of `CHUNKS`, or "Keras" on whole logits."""
    import keras
    import numpy as np

    from keras_tx.training import PaddedCrossentropy

    random = np.random.default_rng(7)
    dtype = keras.config.dtype_policy().compute_dtype
    hidden = keras.ops.convert_to_tensor(random.normal(size=(1, tokens, HIDDEN)), dtype)
    table = keras.ops.convert_to_tensor(0.02 * random.normal(size=(VOCABULARY, HIDDEN)), dtype)
    labels = keras.ops.convert_to_tensor(random.integers(1, VOCABULARY, (1, tokens)), "int32")
    ours = PaddedCrossentropy(chunk_size=CHUNKS.get(side))
    theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(hidden, table):
        if side in CHUNKS:
            return ours.call_in_chunks(labels, hidden, table, None)
        return theirs(labels, keras.ops.einsum("btd,vd->btv", hidden, table))

    if keras.backend.backend() == "jax":
        import jax

        gradients = jax.jit(jax.grad(loss_of, argnums=(0, 1)))
        return lambda: jax.block_until_ready(gradients(hidden, table))
    if keras.backend.backend() == "torch":
        import torch

        given = hidden.requires_grad_(), table.requires_grad_()
        return lambda: [x[..., -1:, -1:].cpu() for x in torch.autograd.grad(loss_of(*given), given)]  # waits for a GPU

    import tensorflow as tf

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            loss = loss_of(hidden, table)
        return tape.gradient(loss, [hidden, table])

    return step


def held_and_peak() -> tuple[float, float]:
    """GiB that are held now, and the most that was held so far: of the GPU if the backend has one."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        if jax.devices()[0].platform in ("gpu", "cuda"):
            stats = jax.devices()[0].memory_stats()
            return stats["bytes_in_use"] / 2**30, stats["peak_bytes_in_use"] / 2**30
    if keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
    return resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextlib.contextmanager
def lock(file: Path | None, kind: int) -> Iterator[None]:
    """Holds the lock `file`, shared with others or alone: processes that compile side by side are timed one by one."""
    if file is None:
        yield
        return
    with file.open("w") as opened:
        fcntl.flock(opened, kind)
        yield


def child(kind: str, side: str, length: int, rounds: int, policy: str, file: Path | None) -> None:
    import keras

    keras.config.set_dtype_policy(policy)
    step = attention_step(side, length) if kind == "attention" else vocabulary_step(side, length)
    before, _ = held_and_peak()
    with lock(file, fcntl.LOCK_SH):
        alternating.seconds(step)  # compiles
    with lock(file, fcntl.LOCK_EX):
        times = [alternating.seconds(step) for _ in range(rounds)]
    _, peak = held_and_peak()
    print(json.dumps({"GiB": peak - before, "seconds": statistics.median(times)}))


def main() -> None:
    parser = alternating.parser(__doc__, rounds=3)
    parser.add_argument("--only", choices=["attention", "vocabulary"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the vocabulary's case")
    parser.add_argument("--policy", default="float32", help="dtype policy")
    parser.add_argument("--together", action="store_true", help="start all cases at once: they compile side by side")
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, side, length = arguments.child
        return child(kind, side, int(length), arguments.rounds, arguments.policy, arguments.lock)
    cases = []
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if arguments.only != "vocabulary":
        sides = ["keras_tx", "keras_tx, window", "KerasHub"]
        sides += [] if backend == "tensorflow" else ["keras_tx, kernels"]  # TensorFlow has none
        cases += [("attention", side, length) for length in arguments.lengths for side in sides]
    if arguments.only != "attention":
        cases += [("vocabulary", side, arguments.tokens) for side in (*CHUNKS, "Keras")]
    with tempfile.NamedTemporaryFile() as file:
        processes = (start(arguments, case, backend, file.name) for case in cases)
        for (kind, side, length), process in zip(
            cases, list(processes) if arguments.together else processes, strict=True
        ):
            output, errors = process.communicate()
            case = f"{kind}, {length:,} tokens, {arguments.policy}, {backend}"
            name = f"{case}, {side}"
            if process.returncode:
                error = (errors.strip().splitlines() or [f"exit {process.returncode}"])[-1][:100]
                print(f"{name:72} fails: {error}", flush=True)
                alternating.write(arguments.json, {"case": case, "run": side, "error": error})
                continue
            row = json.loads(output.splitlines()[-1])
            print(f"{name:72} {row['GiB']:6.2f} GiB {row['seconds']:8.4f} s", flush=True)
            alternating.write(arguments.json, {"case": case, "run": side, **row})


def start(arguments: argparse.Namespace, case: tuple[str, str, int], backend: str, file: str) -> subprocess.Popen:
    """The process of a case."""
    command = [sys.executable, "-m", "benchmarks", "memory", "--rounds", str(arguments.rounds)]
    command += ["--policy", arguments.policy, "--lock", file, "--child", *map(str, case)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        cwd=Path(__file__).resolve().parents[1],
    )


if __name__ == "__main__":
    main()

"""Peak memory and seconds of a training step: long sequences, a window, a large vocabulary, each in its own process.

python -m benchmarks memory
python -m benchmarks memory --only attention --lengths 4096 8192 16384

Attention: 2 encoder layers of 4 heads x 64, feed-forward 1024, batch 1, Adam. Vocabulary: logits of 8,192 tokens over
50,000, and their cross-entropy, forward and backward, by chunks of 128 and of 1,024 tokens, and whole. Memory is what
the process grows by from before the first step.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import alternating

WIDTH, HEADS, INTERMEDIATE, LAYERS = 256, 4, 1024, 2
TOKENS, VOCABULARY, HIDDEN, WINDOW = 8192, 50000, 256, 256
CHUNKS = {f"keras_tx, chunks of {size:,}": size for size in (128, 1024)}


def attention_step(side: str, length: int):
    """A function that trains one step of `side`: "keras_tx", "keras_tx, window" or "KerasHub"."""
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
        options = {"blockwise": True, **({"sliding_window": WINDOW} if "window" in side else {})}
        hidden = keras_tx.layers.Encoder(LAYERS, INTERMEDIATE, HEADS, dropout=0.0, attention_options=options)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mean_squared_error", jit_compile=False)
    x = np.random.default_rng(7).normal(size=(1, length, WIDTH)).astype("float32")
    return lambda: model.train_on_batch(x, x[..., :1])


def vocabulary_step(side: str):
    """A function that computes loss and gradients of `side`: one of `CHUNKS`, or "Keras" on whole logits."""
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_tx.training import PaddedCrossentropy

    random = np.random.default_rng(7)
    hidden = tf.constant(random.normal(size=(1, TOKENS, HIDDEN)), "float32")
    table = tf.constant(0.02 * random.normal(size=(VOCABULARY, HIDDEN)), "float32")
    labels = tf.constant(random.integers(1, VOCABULARY, (1, TOKENS)), "int32")
    ours = PaddedCrossentropy(chunk_size=CHUNKS.get(side))
    theirs = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            tape.watch([hidden, table])
            if side in CHUNKS:
                loss = ours.call_in_chunks(labels, hidden, table, None)
            else:
                loss = theirs(labels, tf.einsum("btd,vd->btv", hidden, table))
        return tape.gradient(loss, [hidden, table])

    return step


def resident() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def child(kind: str, side: str, length: int, rounds: int) -> None:
    step = attention_step(side, length) if kind == "attention" else vocabulary_step(side)
    before = resident()
    alternating.seconds(step)  # compiles
    times = [alternating.seconds(step) for _ in range(rounds)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"GiB": peak - before, "seconds": statistics.median(times)}))


def main() -> None:
    parser = alternating.parser(__doc__, rounds=3)
    parser.add_argument("--only", choices=["attention", "vocabulary"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, side, length = arguments.child
        return child(kind, side, int(length), arguments.rounds)
    cases = []
    if arguments.only != "vocabulary":
        sides = ("keras_tx", "keras_tx, window", "KerasHub")
        cases += [("attention", side, length) for length in arguments.lengths for side in sides]
    if arguments.only != "attention":
        cases += [("vocabulary", side, TOKENS) for side in (*CHUNKS, "Keras")]
    for kind, side, length in cases:
        command = [sys.executable, "-m", "benchmarks", "memory", "--rounds", str(arguments.rounds)]
        environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        command += ["--child", kind, side, str(length)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=Path(__file__).resolve().parents[1]
        )
        name = f"{kind}, {length:,} tokens, {side}"
        if done.returncode:
            error = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:100]
            print(f"{name:52} fails: {error}")
            alternating.write(arguments.json, {"case": f"{kind}, {length:,} tokens", "run": side, "error": error})
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"{name:52} {row['GiB']:6.2f} GiB {row['seconds']:8.2f} s", flush=True)
        alternating.write(arguments.json, {"case": f"{kind}, {length:,} tokens", "run": side, **row})


if __name__ == "__main__":
    main()

"""A gradient of attention with and without XLA, with and without dropout: ours and Keras' in turns, medians.

python -m benchmarks.xla_dropout
"""

import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import keras_tx

BATCH, LENGTH, HIDDEN, HEADS = 32, 256, 64, 4
RUNS = 5
LAYERS = {"keras_tx": keras_tx.layers.MultiHeadAttention, "keras": keras.layers.MultiHeadAttention}


def gradient(layer_class, dropout, jit_compile):
    layer = layer_class(HEADS, HIDDEN // HEADS, dropout=dropout)
    layer.build((None, None, HIDDEN), (None, None, HIDDEN))

    @tf.function(jit_compile=jit_compile)
    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, x, training=True) ** 2)
        return tape.gradient(loss, layer.trainable_weights)

    return function


def main():
    x = tf.random.normal((BATCH, LENGTH, HIDDEN), seed=1)
    print(f"batch {BATCH}, length {LENGTH}, width {HIDDEN}, {HEADS} heads, float32; milliseconds, median of {RUNS}")
    for dropout in (0.0, 0.1):
        for jit_compile in (False, True):
            functions = {name: gradient(layer, dropout, jit_compile) for name, layer in LAYERS.items()}
            times = {name: [] for name in LAYERS}
            for _ in range(RUNS + 1):  # the first run compiles
                for name, function in functions.items():
                    start = time.perf_counter()
                    function(x)
                    times[name].append(1000 * (time.perf_counter() - start))
            medians = ", ".join(f"{name} {statistics.median(runs[1:]):.0f}" for name, runs in times.items())
            print(f"dropout {dropout}, XLA {'on' if jit_compile else 'off'}: {medians}")


if __name__ == "__main__":
    main()

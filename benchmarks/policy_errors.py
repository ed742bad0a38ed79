"""The error of an encoder layer against float64, by dtype policy: outputs and gradients, ours and KerasHub's.

python -m benchmarks policy_errors

Layers of width 512, 8 heads and feed-forward 2,048 with the same weights over 3 texts of 128 random vectors; each error
is the root mean square of the difference over that of the float64 numbers. A gradient is that of the sum of squares of
the outputs.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from benchmarks import alternating
from keras_tx.layers import EncoderLayer

WIDTH, HEADS, INTERMEDIATE, SHAPE = 512, 8, 2048, (3, 128)
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")


def ours(policy: str) -> keras.Layer:
    return EncoderLayer(INTERMEDIATE, HEADS, dropout=0.0, dtype=policy)


def keras_hub(policy: str) -> keras.Layer:
    import keras_hub

    return keras_hub.layers.TransformerEncoder(INTERMEDIATE, HEADS, dtype=policy)


def results(make: Callable[[str], keras.Layer], policy: str, weights: list[np.ndarray], x: np.ndarray) -> list:
    """The outputs, and the gradients of the inputs and of all weights, in float64."""
    layer = make(policy)
    layer.build(x.shape)
    layer.set_weights(weights)
    given = tf.constant(x, layer.compute_dtype)
    with tf.GradientTape() as tape:
        tape.watch(given)
        outputs = layer(given)
        loss = tf.reduce_sum(tf.cast(outputs, "float64") ** 2)
    gradients = tape.gradient(loss, [given, *(one.value for one in layer.trainable_variables)])
    return [np.asarray(one).astype("float64") for one in (outputs, *gradients)]


def error(found: list, right: list) -> float:
    """The root mean square of all differences, relative to that of the right numbers."""
    pairs = list(zip(found, right, strict=True))
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in pairs) / sum((b**2).sum() for _, b in pairs)))


def main() -> None:
    arguments = alternating.parser(__doc__).parse_args()
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(7).normal(size=(*SHAPE, WIDTH))
    for name, make in ((alternating.OURS, ours), ("KerasHub, TensorFlow", keras_hub)):
        layer = make("float32")
        layer.build(x.shape)
        weights = [np.asarray(one, "float64") for one in layer.get_weights()]
        right = results(make, "float64", weights, x)
        for policy in POLICIES:
            found = results(make, policy, weights, x)
            outputs, gradients = error(found[:1], right[:1]), error(found[1:], right[1:])
            print(f"{name:22} {policy:16} outputs {outputs:.1e}, gradients {gradients:.1e}", flush=True)
            row = {"case": policy, "run": name, "kind": "error", "outputs": outputs, "gradients": gradients}
            alternating.write(arguments.json, row)


if __name__ == "__main__":
    main()

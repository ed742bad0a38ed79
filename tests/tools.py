"""What several test files use."""

from pathlib import Path

import keras
import numpy as np

SHARED = Path(__file__).resolve().parents[2] / "shared"  # data beside the checkout; tests that need it skip without it


def to_numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x))


def assert_close(actual, expected, atol=1e-6, rtol=1e-6):
    np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), atol=atol, rtol=rtol)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("float32")


def randomize(layer, seed=0, scale=0.3):
    """Gives every weight other values than its initializer would: biases of zero and scales of one hide mistakes."""
    generator = np.random.default_rng(seed)
    layer.set_weights([w + scale * generator.normal(size=w.shape).astype(w.dtype) for w in layer.get_weights()])
    return layer

"""What several test files use."""

import functools
from pathlib import Path

import keras
import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"  # data beside the checkout; tests that need it skip without it


# How far outputs with scores may be from those without: PyTorch's kernels give none, so `attend` computes them.
OTHER_WAY = 2e-6 if keras.backend.backend() == "torch" else 0


def to_numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x))


def assert_close(actual, expected, atol=1e-6, rtol=1e-6):
    np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), atol=atol, rtol=rtol)


@functools.cache
def has_int8_products():
    """Whether an export can be in int8 on this processor."""
    from keras_tx.serving import int8_support

    try:
        int8_support.check_int8_products()
    except ValueError:
        return False
    return True


def skip_without_int8_products(precision="int8"):
    """Skips the test that calls it if this precision is int8, where TensorFlow does not multiply it exactly."""
    if precision == "int8" and not has_int8_products():
        pytest.skip("TensorFlow does not multiply int8 matrices exactly on this processor")


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("float32")


def randomize(layer, seed=0, scale=0.3):
    """Gives every weight other values than its initializer would: biases of zero and scales of one hide mistakes."""
    generator = np.random.default_rng(seed)
    layer.set_weights([w + scale * generator.normal(size=w.shape).astype(w.dtype) for w in layer.get_weights()])
    return layer


def gradients(function, tensors):
    """What `function(*tensors)` gives, and the gradients of its sum, weighted by fixed numbers, on any backend."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        tensors = [tf.constant(x) for x in tensors]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)
            total = tf.reduce_sum(output * normal(*output.shape, seed=99))
        slopes = tape.gradient(total, tensors, unconnected_gradients="zero")
    elif backend == "jax":
        import jax

        output = function(*tensors)
        weights = normal(*output.shape, seed=99)
        total = jax.grad(lambda *x: (function(*x) * weights).sum(), argnums=tuple(range(len(tensors))))
        slopes = total(*[jax.numpy.asarray(x) for x in tensors])
    else:
        import torch

        device = keras.ops.convert_to_tensor(0.0).device  # where Keras computes
        tensors = [torch.tensor(x, requires_grad=True, device=device) for x in tensors]
        output = function(*tensors)
        (output * torch.tensor(normal(*output.shape, seed=99), device=device)).sum().backward()
        output, slopes = output.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    return [to_numpy(x) for x in (output, *slopes)]


def hessian_products(function, tensors):
    """The Hessian of the sum of `sin(function(*tensors))`, weighted by fixed numbers, times fixed directions.

    On JAX it is computed forward over reverse, on other backends as a gradient of gradients.
    """
    backend, directions = keras.backend.backend(), [normal(*x.shape, seed=98) for x in tensors]

    def total(*tensors):
        output = function(*tensors)
        return keras.ops.sum(keras.ops.sin(output) * keras.ops.convert_to_tensor(normal(*output.shape, seed=99)))

    if backend == "jax":
        import jax

        tensors = [jax.numpy.asarray(x) for x in tensors]
        slopes = jax.grad(total, argnums=tuple(range(len(tensors))))
        products = jax.jvp(slopes, tuple(tensors), tuple(jax.numpy.asarray(x) for x in directions))[1]
    elif backend == "tensorflow":
        import tensorflow as tf

        tensors = [tf.constant(x) for x in tensors]
        with tf.GradientTape() as outer:
            outer.watch(tensors)
            with tf.GradientTape() as inner:
                inner.watch(tensors)
                result = total(*tensors)
            slopes = inner.gradient(result, tensors)
            inclines = sum(tf.reduce_sum(slope * way) for slope, way in zip(slopes, directions, strict=True))
        products = outer.gradient(inclines, tensors)
    else:
        import torch

        tensors = [keras.ops.convert_to_tensor(x).clone().requires_grad_() for x in tensors]
        directions = [keras.ops.convert_to_tensor(x) for x in directions]
        slopes = torch.autograd.grad(total(*tensors), tensors, create_graph=True)
        inclines = sum((slope * way).sum() for slope, way in zip(slopes, directions, strict=True))
        products = torch.autograd.grad(inclines, tensors)
    return [to_numpy(x) for x in products]

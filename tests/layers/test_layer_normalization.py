"""The norm of all layers against NumPy in float64, and its gradients against those of Keras' own."""

import keras
import numpy as np
import pytest

from keras_tx.layers import Encoder
from keras_tx.layers.layer_normalization import LayerNormalization
from tests.tools import assert_close, normal, to_numpy

SHAPES = {"rows": (7, 5), "tokens": (2, 3, 5), "more axes": (2, 3, 4, 5), "no rows": (0, 3, 5), "one number": (2, 3, 1)}
EPSILON = 1e-3
DTYPES = ["float32", "mixed_bfloat16", "float16"]
DTYPES += [] if keras.backend.backend() == "jax" else ["float64"]  # which JAX turns into float32


def made(cls, size, center=True, **options):
    layer = cls(epsilon=EPSILON, center=center, **options)
    layer.build((None, None, size))
    layer.set_weights([np.linspace(0.5, 2.0, size), np.linspace(-1.0, 1.0, size)][: 1 + center])
    return layer


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_outputs_are_those_of_the_equation(shape, dtype, center):
    layer, x = made(LayerNormalization, shape[-1], center, dtype=dtype), 3.0 + normal(*shape)
    given = keras.ops.cast(x, layer.compute_dtype)
    outputs = layer(given)
    assert keras.backend.standardize_dtype(outputs.dtype) == layer.compute_dtype
    x = to_numpy(keras.ops.cast(given, "float32")).astype("float64")
    weights = [to_numpy(weight).astype("float64") for weight in layer.weights]
    normalized = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    expected = normalized * weights[0] + (weights[1] if center else 0.0)
    atol = {"float32": 3e-6, "float64": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}[layer.compute_dtype]
    assert_close(keras.ops.cast(outputs, "float32"), expected, atol=atol)


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_the_output_has_the_dtype_of_the_layer(policy, given):
    layer = made(LayerNormalization, 5, dtype=policy)
    outputs = layer(keras.ops.cast(normal(2, 3, 5), given))
    assert keras.backend.standardize_dtype(outputs.dtype) == layer.compute_dtype


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [None, False, True], ids=["eager", "graph", "xla"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_of_both_orders_are_those_of_keras(shape, jit_compile):
    import tensorflow as tf

    weights = normal(*shape, seed=1)

    def gradients(layer, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                result = tf.reduce_sum(tf.sin(layer(x)) * weights)
            first = inner.gradient(result, [x, *layer.trainable_weights])
            penalty = sum(tf.reduce_sum(tf.square(one)) for one in first)
        return [*first, *outer.gradient(penalty, [x, *layer.trainable_weights])]

    def found(cls):
        layer = made(cls, shape[-1])
        run = lambda x: gradients(layer, x)
        if jit_compile is not None and cls is LayerNormalization:
            sizes = shape if jit_compile else [None] * (len(shape) - 1) + [shape[-1]]
            run = tf.function(run, input_signature=[tf.TensorSpec(sizes)], jit_compile=jit_compile)
        return run(tf.constant(3.0 + normal(*shape)))

    for ours, theirs in zip(found(LayerNormalization), found(keras.layers.LayerNormalization), strict=True):
        expected = to_numpy(theirs)
        assert_close(ours, expected, atol=1e-5 * max(1.0, np.abs(expected).max(initial=0)))


def test_layers_have_this_norm_with_the_weights_of_keras():
    encoder = Encoder(1, 7, 2, normalize_first=True)
    encoder.build((None, None, 6))
    norms = [encoder.layers[0].self_attention_norm, encoder.layers[0].feed_forward_norm, encoder.final_norm]
    assert [type(norm) for norm in norms] == [LayerNormalization] * 3
    theirs = keras.layers.LayerNormalization()
    theirs.build((None, None, 6))
    for norm in norms:
        assert [w.name for w in norm.weights] == [w.name for w in theirs.weights]

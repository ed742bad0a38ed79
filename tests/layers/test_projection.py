"""Projections are plain products, however they are computed, and Keras' own layers."""

import keras
import numpy as np
import pytest

from keras_tx.layers import MultiHeadAttention, xla
from keras_tx.layers.projection import HeadProjection, Projection, project
from tests.tools import assert_close, normal, randomize, to_numpy

SIZE, MADE = 264, 251  # enough numbers for the product in parts, of a size that parts into eight


@pytest.mark.parametrize("by_xla", [False, True])
@pytest.mark.parametrize("rows", range(1, 10))
def test_products_of_few_rows_are_those_of_float64(rows, by_xla):
    x, kernel = normal(rows, SIZE), normal(SIZE, MADE)
    with xla.tracing(by_xla):
        product = project(*map(keras.ops.convert_to_tensor, (x, kernel)))
    assert_close(product, x.astype("float64") @ kernel.astype("float64"), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("by_xla", [False, True])
@pytest.mark.parametrize(("size", "num_axes"), [(88, 2), (7, 1), (5, 2)])
def test_several_axes_are_summed_and_made(size, num_axes, by_xla):
    summed = (3, size)[-num_axes:]
    x, kernel = normal(2, 1, *summed), normal(*summed, 11, 31)
    expected = np.tensordot(x.astype("float64"), kernel.astype("float64"), num_axes)
    with xla.tracing(by_xla):
        product = project(*map(keras.ops.convert_to_tensor, (x, kernel)), num_axes)
    assert tuple(product.shape) == (2, 1, 11, 31)
    assert_close(product, expected, atol=5e-5, rtol=1e-5)


def test_several_axes_may_be_summed_to_none():
    x, kernel = normal(3, 4, 5), normal(4, 5, seed=1)
    product = project(*map(keras.ops.convert_to_tensor, (x, kernel)), 2)
    assert_close(product, np.einsum("BTD,TD->B", x, kernel), atol=1e-5)


@pytest.mark.tensorflow
@pytest.mark.parametrize("by_xla", [False, True])
def test_the_product_in_parts_is_chosen_for_a_single_row_under_xla_alone(by_xla):
    import tensorflow as tf

    kernel = normal(SIZE, MADE)
    for rows, split in ((1, by_xla), (2, False)):
        with xla.tracing(by_xla):
            traced = tf.function(lambda x: project(x, kernel)).get_concrete_function(tf.zeros((rows, SIZE)))
        assert any(op.type == "Sum" for op in traced.graph.get_operations()) == split


def test_another_width_than_at_first_is_refused():
    layer, x = MultiHeadAttention(3, 5), normal(2, 7, 12)
    layer(x, x)
    for inputs, name in (((x[..., :8], x), "query"), ((x, x, x[..., :8]), "key"), ((x, x[..., :8], x), "value")):
        with pytest.raises(ValueError, match=f"'{name}' is incompatible .* axis -1 .* have value 12, .* \\(2, 7, 8\\)"):
            layer(*inputs)
    layer = HeadProjection("abcd,cde->abe", (None, 5))
    layer(normal(2, 7, 3, 11))
    for shape, axis in (((2, 7, 11, 3), -2), ((2, 7, 3, 13), -1)):
        with pytest.raises(ValueError, match=f"expected axis {axis} of input shape to have value"):
            layer(normal(*shape))


@pytest.mark.tensorflow
@pytest.mark.parametrize("layer", [HeadProjection("abc,cde->abde", (None, 3, 5), bias_axes="de"), Projection(15)])
def test_a_bias_follows_the_product_at_once(layer):
    """What TensorFlow's optimizer of graphs makes one operation of."""
    import tensorflow as tf

    traced = tf.function(layer).get_concrete_function(tf.zeros((2, 7, 11)))
    (add,) = [op for op in traced.graph.get_operations() if op.type == "BiasAdd"]
    assert add.inputs[0].op.type == "MatMul"


PAIRS = [
    (
        HeadProjection("abc,cde->abde", (None, 3, 5), bias_axes="de", activation="tanh"),
        keras.layers.EinsumDense("abc,cde->abde", (None, 3, 5), bias_axes="de", activation="tanh"),
        (2, 7, 11),
    ),
    (
        HeadProjection("abcd,cde->abe", (None, 5)),
        keras.layers.EinsumDense("abcd,cde->abe", (None, 5)),
        (2, 7, 3, 11),
    ),
    (Projection(5, activation="gelu"), keras.layers.Dense(5, activation="gelu"), (2, 7, 11)),
    (Projection(5, use_bias=False), keras.layers.Dense(5, use_bias=False), (3, 11)),
]


@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS)
def test_layers_are_those_of_keras(ours, theirs, shape):
    x = normal(*shape)
    ours(x), theirs(x)
    randomize(theirs)
    ours.set_weights(theirs.get_weights())
    assert_close(ours(x), theirs(x), atol=5e-6)
    assert [w.path.split("/")[-1] for w in ours.weights] == [w.path.split("/")[-1] for w in theirs.weights]


@pytest.mark.tensorflow
@pytest.mark.parametrize(("ours", "theirs", "shape"), PAIRS)
def test_gradients_are_those_of_keras(ours, theirs, shape):
    import tensorflow as tf

    x = tf.constant(normal(*shape))
    ours(x), theirs(x)
    ours.set_weights(theirs.get_weights())
    found = []
    for layer in (ours, theirs):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        found.append([to_numpy(part) for part in tape.gradient(loss, [x, *[w.value for w in layer.weights]])])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, atol=2e-5)

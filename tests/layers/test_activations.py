"""Activations by their formulas in float64, and as a layer's argument, by function and by name."""

import json
import math

import keras
import numpy as np
import pytest

from keras_tx.layers import FeedForward, activations
from tests.tools import assert_close, gradients, normal, to_numpy

X = np.linspace(-6, 6, 173)
FORMULAS = {
    "gelu_tanh": 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))),
    "quick_gelu": X / (1 + np.exp(-1.702 * X)),
    "gelu": 0.5 * X * (1 + np.array([math.erf(x / math.sqrt(2)) for x in X])),  # the one of Keras is the exact one
    "silu": X / (1 + np.exp(-X)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_are_their_formulas(name):
    function = activations.get(name)
    assert_close(function(keras.ops.convert_to_tensor(X.astype("float32"))), FORMULAS[name], atol=2e-6)
    assert activations.get(function) is function


def test_the_kinds_of_gelu_differ():
    values = [FORMULAS[name] for name in ("gelu", "gelu_tanh", "quick_gelu")]
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(values, values[1:] + values[:1], strict=True))


@pytest.mark.parametrize("activation", [*activations.NAMES, *activations.NAMES.values()])
def test_a_layer_takes_them_and_comes_back_from_its_config(activation):
    layer = FeedForward(7, activation=activation)
    again = FeedForward.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.activation is layer.activation is activations.get(activation)
    x = normal(2, 5, 3)
    layer(x)
    again(x)
    again.set_weights(layer.get_weights())
    assert_close(again(x), layer(x), atol=0)
    relu = FeedForward(7)
    relu(x)
    relu.set_weights(layer.get_weights())
    assert np.abs(to_numpy(relu(x)) - to_numpy(layer(x))).max() > 1e-3


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="Could not interpret activation function identifier: gelu_old"):
        activations.get("gelu_old")


@pytest.mark.parametrize("training", [False, True])
def test_gelu_and_its_gradient_are_the_formulas(training):
    """The derivative is Phi(x) + x * phi(x), with the normal distribution and its density."""
    x = X.astype("float32")
    found, slope = gradients(lambda x: activations.apply(keras.activations.gelu, x, training), [x])
    assert_close(found, FORMULAS["gelu"], atol=2e-6)
    distribution = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in X]))
    derivative = distribution + X * np.exp(-(X**2) / 2) / math.sqrt(2 * math.pi)
    assert_close(slope, derivative * normal(*X.shape, seed=99), atol=3e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_the_second_gradient_of_gelu_in_training_is_that_of_keras(mode):
    import tensorflow as tf

    def second(x, training):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = activations.apply(keras.activations.gelu, x, training)
            slope = inner.gradient(y, x)
        return outer.gradient(slope, x)

    compiled = second if mode == "eager" else tf.function(second, jit_compile=mode == "xla")
    x = tf.constant(X, "float32")
    assert_close(compiled(x, True), second(x, False), atol=3e-6)

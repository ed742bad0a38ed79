"""Functions with gradients of their own, on TensorFlow."""

from collections.abc import Callable
from typing import Any

from keras_tx.layers import exported_weights, xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.custom_gradient`; in exports and generation, of which nobody takes a gradient, the function alone."""
    if xla.is_generating() or exported_weights.current() is not None:
        return lambda *tensors: function(*tensors)[0]
    made: Callable[..., Any] = tf.custom_gradient(function)
    return made

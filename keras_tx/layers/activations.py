"""Activation functions that checkpoints use and for which Keras has no name.

Keras' own "gelu" is the exact one, with the error function: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


@keras.saving.register_keras_serializable(package="keras_tx")  # type: ignore[untyped-decorator]  # as all of Keras
def gelu_tanh(x: Tensor) -> Tensor:
    """GELU approximated with a hyperbolic tangent: "gelu_new" of GPT-2 and T5 1.1."""
    return keras.activations.gelu(x, approximate=True)


@keras.saving.register_keras_serializable(package="keras_tx")  # type: ignore[untyped-decorator]  # as all of Keras
def quick_gelu(x: Tensor) -> Tensor:
    """GELU approximated with a sigmoid, x * sigmoid(1.702 x): that of CLIP."""
    return x * ops.sigmoid(1.702 * x)


NAMES: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu}


def get(identifier: Any) -> Any:
    """A name in `NAMES`, or anything that `keras.activations.get` takes, -> a function."""
    is_ours = isinstance(identifier, str) and identifier in NAMES
    return NAMES[identifier] if is_ours else keras.activations.get(identifier)


def apply(activation: Callable[[Tensor], Tensor], x: Tensor, training: bool | None = None) -> Tensor:
    """Returns `activation(x)`. On TensorFlow in float32 the exact "gelu" is computed by the error function.

    Keras uses the complementary error function there: half precision needs it, but ONNX does not have it. In training
    "gelu" has a gradient of its own, of fewer operations than the one that TensorFlow derives.
    """
    by_erf = activation is keras.activations.gelu and keras.backend.backend() == "tensorflow" and x.dtype == "float32"
    if not by_erf:
        return activation(x)
    if training:
        made: Tensor = tf.custom_gradient(_gelu_with_gradient)(x)
        return made
    return 0.5 * x * (1 + ops.erf(x * math.sqrt(0.5)))


def _gelu_with_gradient(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    both_tails = 1 + tf.math.erf(x * math.sqrt(0.5))

    def gradient(upstream: Tensor) -> Tensor:
        density = tf.exp(-0.5 * tf.square(x)) * (1 / math.sqrt(2 * math.pi))
        return upstream * (0.5 * both_tails + x * density)

    return 0.5 * x * both_tails, gradient


serialize = keras.activations.serialize

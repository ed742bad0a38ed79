"""Activations that checkpoints ask for and Keras has not under a name: any shape -> the same shape.

Keras' own "gelu" is the exact one, with the error function: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

import math

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_tx")
def gelu_tanh(x):
    """GELU by its approximation with a hyperbolic tangent, "gelu_new" of GPT-2 and T5 1.1."""
    return keras.activations.gelu(x, approximate=True)


@keras.saving.register_keras_serializable(package="keras_tx")
def quick_gelu(x):
    """GELU by its approximation with a sigmoid, x * sigmoid(1.702 x), of CLIP."""
    return x * ops.sigmoid(1.702 * x)


NAMES = {"gelu_tanh": gelu_tanh, "quick_gelu": quick_gelu}


def get(identifier):
    """What `keras.activations.get` takes, or a name of `NAMES` -> a function."""
    is_ours = isinstance(identifier, str) and identifier in NAMES
    return NAMES[identifier] if is_ours else keras.activations.get(identifier)


def apply(activation, x):
    """`activation(x)`; Keras' exact "gelu" on TensorFlow in float32 by the error function.

    Keras' has the complementary one there, which half precision needs, but which has no form in ONNX.
    """
    by_erf = activation is keras.activations.gelu and keras.backend.backend() == "tensorflow" and x.dtype == "float32"
    return 0.5 * x * (1 + ops.erf(x * math.sqrt(0.5))) if by_erf else activation(x)


serialize = keras.activations.serialize

"""RMS normalization over the last axis: (..., D) -> (..., D). Zhang and Sennrich 2019, arXiv:1910.07467."""

import keras
from keras import ops

from keras_tx.layers.precision import wide_dtype
from keras_tx.types import Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class RMSNormalization(keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` over the last axis, which computes float64 inputs in float64 on every backend."""

    def call(self, inputs: Tensor) -> Tensor:
        if wide_dtype(inputs) == "float64":  # which Keras' form rounds to float32 on PyTorch and JAX
            return rms_normalized(inputs, self.epsilon) * ops.convert_to_tensor(self.scale)
        return super().call(inputs)


def rms_normalized(x: Tensor, epsilon: float) -> Tensor:
    """Float64 vectors (..., D), each divided by the root of the mean of its squares plus `epsilon`."""
    mean_square = ops.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
    return x / ops.sqrt(mean_square + epsilon)

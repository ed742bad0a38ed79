"""Layer normalization over the last axis: (..., D) -> (..., D). Ba et al. 2016, arXiv:1607.06450.

Reading and writing memory takes most of the time of a norm. The gradient that TensorFlow derives from Keras' form reads
and writes far more than is needed; the one here takes the sums over the features as products with a vector.
"""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.layers.gradients import custom_gradient
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.rms_normalization import rms_normalized
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


@keras.saving.register_keras_serializable(package="keras_tx")
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` over the last axis, in float64 for float64 inputs.

    Its gradient is faster on TensorFlow.
    """

    def call(self, inputs: Tensor) -> Tensor:
        dtype = wide_dtype(inputs, self.compute_dtype)
        if keras.backend.backend() != "tensorflow" and dtype != "float64":
            return super().call(inputs)
        weights = [ops.cast(ops.convert_to_tensor(x), dtype) for x in (self.gamma, self.beta) if x is not None]
        if keras.backend.backend() == "tensorflow":
            outputs = _normalize(inputs, *weights, epsilon=self.epsilon)
        else:  # Keras' form would round float64 to float32
            outputs = _normalize_float64(ops.cast(inputs, dtype), *weights, epsilon=self.epsilon)
        return ops.cast(outputs, self.compute_dtype)


def _normalize_float64(inputs: Tensor, gamma: Tensor, *beta: Tensor, epsilon: float) -> Tensor:
    centred = inputs - ops.sum(inputs, axis=-1, keepdims=True) / inputs.shape[-1]
    outputs = rms_normalized(centred, epsilon) * gamma
    return outputs + beta[0] if beta else outputs


def _normalize(inputs: Tensor, *weights: Tensor, epsilon: float) -> Tensor:
    """`inputs` (..., D) normalized, times a scale (D,), and plus an offset (D,) if there is one."""

    def with_gradient(inputs: Tensor, gamma: Tensor, *beta: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        rows = tf.cast(tf.reshape(inputs, (-1, inputs.shape[-1])), gamma.dtype)
        centred = rows - tf.reduce_mean(rows, axis=1, keepdims=True)
        scale = tf.math.rsqrt(tf.reduce_mean(tf.square(centred), axis=1, keepdims=True) + epsilon)
        normalized = centred * scale
        outputs = normalized * gamma
        outputs = outputs + beta[0] if beta else outputs

        def gradient(upstream: Tensor) -> tuple[Tensor, ...]:
            upstream = tf.cast(tf.reshape(upstream, tf.shape(rows)), gamma.dtype)
            products = upstream * normalized
            # The means over the features of both, times gamma: products with a vector, in a single pass over memory.
            mean_weights = tf.expand_dims(gamma, 1) / rows.shape[1]
            mean, correlation = tf.matmul(upstream, mean_weights), tf.matmul(products, mean_weights)
            of_rows = (upstream * gamma - (mean + normalized * correlation)) * scale
            of_weights = [tf.reduce_sum(products, axis=0), tf.reduce_sum(upstream, axis=0)][: 1 + len(beta)]
            return _like(of_rows, inputs), *of_weights

        return _like(outputs, inputs), gradient

    made: Tensor = custom_gradient(with_gradient)(inputs, *weights)
    return made


def _like(rows: Tensor, inputs: Tensor) -> Tensor:
    """Rows (R, D) in the shape and the dtype of `inputs` (..., D)."""
    shape = [-1 if size is None else size for size in inputs.shape]
    return tf.reshape(tf.cast(rows, inputs.dtype), tf.shape(inputs) if shape.count(-1) > 1 else shape)

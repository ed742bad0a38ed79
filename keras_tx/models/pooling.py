"""Pooling over tokens: (B, T, D) -> (B, D); padding is never pooled.

B batch, T tokens, D hidden.
"""

import keras
from keras import ops

from keras_tx import checks
from keras_tx.layers.masked_layer import MaskedLayer

POOLINGS = ("first", "mean", "max")


@keras.saving.register_keras_serializable(package="keras_tx")
class TokenPooling(MaskedLayer):
    """One vector for a sequence: that of the first real token, or the mean or maximum over the real tokens.

    A sequence of padding alone gives zeros.

    Args:
        pooling: "first", "mean" or "max".

    Call arguments:
        inputs: (B, T, D).
        mask: (B, T), True at real tokens. Filled from the Keras mask.

    Raises:
        ValueError: for any other `pooling`.
    """

    def __init__(self, pooling="mean", **kwargs):
        super().__init__(**kwargs)
        self.pooling = checks.one_of("pooling", pooling, POOLINGS)

    def call(self, inputs, mask=None):
        mask = ops.ones_like(inputs[..., 0], dtype="bool") if mask is None else ops.cast(mask, "bool")
        if self.pooling == "max":
            if inputs.shape[1] == 0:
                return ops.zeros_like(ops.sum(inputs, axis=1))  # of nothing there is no maximum
            pooled = ops.max(ops.where(ops.expand_dims(mask, -1), inputs, float("-inf")), axis=1)
            return ops.where(ops.any(mask, axis=1, keepdims=True), pooled, 0.0)
        if self.pooling == "first":  # the first real token: padding may stand on the left
            weights = ops.cast(ops.logical_and(mask, ops.cumsum(ops.cast(mask, "int32"), axis=1) == 1), "float32")
        else:
            weights = ops.cast(mask, "float32")
            weights = weights / ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1.0)
        return ops.cast(ops.einsum("BT,BTD->BD", weights, ops.cast(inputs, "float32")), inputs.dtype)

    def compute_mask(self, inputs, mask=None):
        return None

    def compute_output_shape(self, inputs_shape):
        return (inputs_shape[0], inputs_shape[-1])

    def get_config(self):
        return {**super().get_config(), "pooling": self.pooling}

"""Pooling over the real tokens: (B, T, D) -> (B, D).

B batch, T tokens, D hidden.
"""

from typing import Any

import keras
from keras import ops

from keras_tx import checks
from keras_tx.layers.extremes import largest
from keras_tx.layers.masked_layer import MaskedLayer
from keras_tx.layers.precision import wide_dtype
from keras_tx.types import Shape, Tensor

POOLINGS = ("first", "mean", "max")
# ONNX has the choice of zeros as a sum of products, in which infinity times 0 would be NaN.
_LOWEST = {"float16": -65504.0}
_LOWEST_OF_OTHERS = -3e38


@keras.saving.register_keras_serializable(package="keras_tx")
class TokenPooling(MaskedLayer):
    """Pools each sequence to one vector: that of the first real token, or the mean or maximum over the real tokens.

    The result for a sequence without real tokens is zeros.

    Args:
        pooling: "first", "mean" or "max".

    Call arguments:
        inputs: (B, T, D).
        mask: (B, T), True at real tokens. If None, the Keras mask of `inputs` is used.

    Returns:
        (B, D).

    Raises:
        ValueError: for any other `pooling`.
    """

    def __init__(self, pooling: str = "mean", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pooling = checks.one_of("pooling", pooling, POOLINGS)

    def call(self, inputs: Tensor, mask: Tensor = None) -> Tensor:
        mask = ops.ones_like(inputs[..., 0], dtype="bool") if mask is None else ops.cast(mask, "bool")
        if self.pooling == "max":
            lowest = _LOWEST.get(keras.backend.standardize_dtype(inputs.dtype), _LOWEST_OF_OTHERS)
            pooled = largest(ops.where(ops.expand_dims(mask, -1), inputs, lowest), lowest, axis=1)
            return ops.where(ops.any(mask, axis=1, keepdims=True), pooled, 0.0)
        dtype = wide_dtype(inputs)
        if self.pooling == "first":  # the first real token: padding may stand on the left
            weights = ops.cast(ops.logical_and(mask, ops.cumsum(ops.cast(mask, "int32"), axis=1) == 1), dtype)
        else:
            weights = ops.cast(mask, dtype)
            weights = weights / ops.maximum(ops.sum(weights, axis=1, keepdims=True), 1.0)
        return ops.cast(ops.einsum("BT,BTD->BD", weights, ops.cast(inputs, dtype)), inputs.dtype)

    def compute_mask(self, inputs: Tensor, mask: Tensor = None) -> None:
        return None

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return (inputs_shape[0], inputs_shape[-1])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "pooling": self.pooling}

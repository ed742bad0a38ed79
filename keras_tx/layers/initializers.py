"""Initializers: copies for several weights, multiples, and a table with a row of zeros."""

from typing import Any

import keras
from keras import initializers, ops

from keras_tx.types import DType, Shape, Tensor


def clone_initializer(initializer: Any) -> Any:
    """A copy with a new seed, unless a seed was given: one object would give all weights the same values."""
    return initializer.clone() if hasattr(initializer, "clone") else initializer


@keras.saving.register_keras_serializable(package="keras_tx")
class Multiplied(initializers.Initializer):
    """The values of another initializer, times a factor."""

    def __init__(self, initializer: Any, factor: float) -> None:
        self.initializer, self.factor = initializers.get(initializer), factor

    def __call__(self, shape: Shape, dtype: DType = None) -> Tensor:
        values = self.initializer(shape, dtype=dtype)
        return values * ops.cast(self.factor, values.dtype)

    def get_config(self) -> dict[str, Any]:
        return {"initializer": initializers.serialize(self.initializer), "factor": self.factor}


@keras.saving.register_keras_serializable(package="keras_tx")
class ZeroRow(initializers.Initializer):
    """The values of another initializer for a table (V, D), with zeros in one row."""

    def __init__(self, initializer: Any, row: int) -> None:
        self.initializer, self.row = initializers.get(initializer), row

    def __call__(self, shape: Shape, dtype: DType = None) -> Tensor:
        values = self.initializer(shape, dtype=dtype)
        return ops.where(
            ops.expand_dims(ops.equal(ops.arange(shape[0], dtype="int32"), self.row), -1),
            ops.zeros_like(values),
            values,
        )

    def get_config(self) -> dict[str, Any]:
        return {"initializer": initializers.serialize(self.initializer), "row": self.row}

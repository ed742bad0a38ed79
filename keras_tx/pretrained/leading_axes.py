"""Rows for tensors that have additional leading axes of size 1: (1, V) for a variable (V,)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_tx.pretrained.table import Range, Row


@dataclass(frozen=True)
class LeadingAxesRow(Row):
    """A `Row` whose tensor has `axes` additional leading axes of size 1."""

    axes: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,) * self.axes + super().shape

    def read(self, tensor: np.ndarray) -> list[tuple[Any, np.ndarray]]:
        return super().read(tensor.reshape(super().shape))

    def part(self, variable: Any, ranges: Sequence[Range]) -> tuple[Range, ...] | None:
        block = super().part(variable, ranges)
        return None if block is None else (*[(0, 1)] * self.axes, *block)

    def write(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return super().write(values).reshape(self.shape)

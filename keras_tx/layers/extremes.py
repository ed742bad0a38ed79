"""The largest and the smallest number along an axis, also of none: `initial` counts as one more."""

import operator
from collections.abc import Callable

import keras
from keras import ops

from keras_tx.types import Tensor


def largest(x: Tensor, initial: float, axis: int | None = None) -> Tensor:
    if keras.backend.backend() == "torch":
        return _on_torch(ops.max, operator.lt, x, initial, axis)
    return ops.max(x, axis=axis, initial=initial)


def smallest(x: Tensor, initial: float, axis: int | None = None) -> Tensor:
    if keras.backend.backend() == "torch":
        return _on_torch(ops.min, operator.gt, x, initial, axis)
    return ops.min(x, axis=axis, initial=initial)


def _on_torch(
    reduce: Callable[..., Tensor],
    gives_way: Callable[[Tensor, float], Tensor],
    x: Tensor,
    initial: float,
    axis: int | None,
) -> Tensor:
    """On the device of `x`: Keras' own puts `initial` on the CPU, and its `maximum` makes int32 of int64."""
    if 0 in x.shape:
        shape = [] if axis is None else [size for number, size in enumerate(x.shape) if number != axis % len(x.shape)]
        return ops.full(shape, initial, dtype=x.dtype)
    found = reduce(x, axis=axis)
    return ops.where(gives_way(found, initial), ops.convert_to_tensor(initial, dtype=x.dtype), found)

"""Integer ids and the tables they index: (B, T), (V, D) -> (B, T, D), with checks of dtype, shape and range.

Values can be checked only in eager calls. In a TensorFlow graph the look-up itself raises an error for an id outside
the table. XLA and JAX cannot raise errors: there such an id reads the first or the last row.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.types import DType, Tensor


def check_ids(name: str, ids: Tensor, size: int) -> Tensor:
    """Returns `ids` as a tensor; raises unless they are integers in [0, size), as far as their values are known."""
    ids = ops.convert_to_tensor(ids)
    check_integers(name, ids)
    values = values_of(ids)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < size:
        wrong = values[(values < 0) | (values >= size)].ravel()[0]
        raise ValueError(f"`{name}` must be in [0, {size}). Received: {wrong} in {name} of shape {values.shape}")
    return ids


def check_integers(name: str, ids: Tensor) -> None:
    """Raises unless the dtype of `ids` is an integer one."""
    dtype = keras.backend.standardize_dtype(ids.dtype)
    if "int" not in dtype:
        raise ValueError(
            f"`{name}` must be integers; a keras.Input for them needs dtype='int32'. Received: {name} of dtype {dtype}"
        )


def keep_outside(ids: Tensor, size: int) -> Tensor:
    """Returns `ids` with negative ones made too large, so that a look-up raises; Keras would count them from the end.

    On JAX, which cannot raise, they are clipped to the table.
    """
    if keras.backend.backend() == "jax":
        return ops.clip(ids, 0, size - 1)  # a look-up on JAX would give NaN
    return ids if "uint" in keras.backend.standardize_dtype(ids.dtype) else ops.where(ids < 0, size, ids)


def look_up(name: str, table: Tensor, ids: Tensor, dtype: DType, offset: int = 0) -> Tensor:
    """The rows `offset + ids` of `table`, in this dtype."""
    size = table.shape[0] - offset
    rows = keep_outside(check_ids(name, ids, size), size)
    if offset:
        narrow = keras.backend.standardize_dtype(rows.dtype) in ("int8", "uint8", "int16", "uint16")
        rows = (ops.cast(rows, "int32") if narrow else rows) + offset
    return ops.cast(ops.take(table, rows, axis=0), dtype)


def check_positions(positions: Tensor, inputs: Tensor, num_axes: int = 1) -> Tensor:
    """Returns `positions` as a tensor; raises unless they are integers (..., T) or (T,) for `inputs` (..., T, D).

    `num_axes`: the number of axes of `inputs` after T.
    """
    positions = ops.convert_to_tensor(positions)
    expected = tuple(inputs.shape[: len(inputs.shape) - num_axes])
    pairs = zip(reversed(tuple(positions.shape)), reversed(expected), strict=False)
    if len(positions.shape) not in (1, len(expected)) or any(None not in (a, b) and a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"`positions` must have the shape {expected} or {expected[-1:]}. Received: positions.shape="
            f"{tuple(positions.shape)}"
        )
    check_integers("positions", positions)
    return positions


def values_of(x: Any) -> Any:
    """The tensor as a NumPy array, or None if it is symbolic and has no values."""
    if isinstance(x, keras.KerasTensor) or getattr(getattr(x, "device", None), "type", None) == "meta":
        return None
    try:
        return np.asarray(ops.convert_to_numpy(x))
    except Exception:  # each backend has its own error for a tensor of a graph
        return None

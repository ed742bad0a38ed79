"""Integer ids and the tables they index: (B, T), (V, D) -> (B, T, D), with checks of dtype, shape and range.

Values can be checked only in eager calls. In a TensorFlow graph on a CPU the look-up itself raises an error for an id
outside the table. Elsewhere no error can be raised: on a GPU TensorFlow reads zeros for such an id; XLA and JAX read
the first or the last row. The `fit`, `evaluate` and `predict` of the models of this package therefore check ids before.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.internals.keras_models import values_are_made_up
from keras_tx.layers.gradients import custom_gradient
from keras_tx.layers.precision import wide_dtype
from keras_tx.optional import Lazy
from keras_tx.types import DType, Tensor

tf = Lazy("tensorflow")


def check_ids(name: str, ids: Tensor, size: int) -> Tensor:
    """Returns `ids` as a tensor; raises unless they are integers in [0, size), as far as their values are known."""
    ids = as_integers(name, ids)
    check_range(name, values_of(ids), size)
    return ids


def as_integers(name: str, ids: Any) -> Tensor:
    """Returns `ids` as a tensor, or unchanged if they are symbolic; raises unless their dtype is an integer one."""
    check_no_texts(name, ids)
    ids = ids if isinstance(ids, keras.KerasTensor) else ops.convert_to_tensor(ids)
    check_integers(name, ids)
    return ids


def from_whole_numbers(name: str, ids: Any) -> Tensor:
    """As `as_integers`, but whole numbers in float32, the default dtype of `keras.Input`, or float64 become int32.

    That they are whole is checked only in eager calls.
    """
    check_no_texts(name, ids)
    ids = ids if isinstance(ids, keras.KerasTensor) else ops.convert_to_tensor(ids)
    if keras.backend.standardize_dtype(ids.dtype) not in ("float32", "float64"):
        check_integers(name, ids)
        return ids
    if isinstance(ids, keras.KerasTensor):
        return ids
    _check_whole(name, values_of(ids))
    return ops.cast(ids, "int32")


def _check_whole(name: str, values: Any) -> None:
    """Raises unless all `values`, a NumPy array of floats or None, are whole numbers."""
    if values is not None:
        wrong = values[values != np.trunc(values)]  # NaN is not equal to itself
        if wrong.size:
            raise ValueError(
                f"`{name}` must be integers or whole numbers. Received: {wrong[0]} in {name} of shape {values.shape}"
            )


def check_range(name: str, values: Any, size: int) -> None:
    """Raises unless all `values`, a NumPy array or None, are in [0, size)."""
    if values is not None and values.size and not 0 <= values.min() <= values.max() < size:
        wrong = values[~((values >= 0) & (values < size))].ravel()[0]
        raise ValueError(f"`{name}` must be in [0, {size}). Received: {wrong} in {name} of shape {values.shape}")


def check_in_each_row(name: str, values: Any, token: int, role: str, is_filled: Any = False) -> None:
    """Raises unless each row of `values`, a NumPy array (B, T) or None, has the id `token`, whose name is `role`.

    `is_filled`, booleans (B,), are True for rows that only fill a batch up, which need no such id.
    """
    if values is not None and values.ndim == 2:
        missing = np.flatnonzero(~((values == token).any(axis=1) | is_filled))
        if missing.size:
            raise ValueError(f"{rule_of_each_row(name, token, role)}{missing[0]}")


def rule_of_each_row(name: str, token: int, role: str) -> str:
    """The error of `check_in_each_row` without the number of the row."""
    return (
        f"Each row of `{name}` must have the `{role}` {token}, at which it is classified. Received: no such id in row "
    )


def check_no_texts(name: str, ids: Any) -> None:
    """Raises for a string and for an array or tensor of strings, of ids or, if the name is "y", of labels."""
    dtype = getattr(ids, "dtype", None)
    kind = dtype.kind if isinstance(dtype, np.dtype) else None
    if kind in ("U", "S", "T") or (kind == "O" and any(isinstance(one, (str, bytes)) for one in ids.flat)):
        received = f"{name} of dtype {dtype}"
    elif isinstance(ids, (str, bytes)):
        received = f"{name}={ids!r}"
    elif getattr(dtype, "name", dtype) == "string":
        received = f"{name} of dtype string"
    else:
        return
    hint = "number the classes" if name == "y" else "a tokenizer of `keras_tx.text` makes them of texts"
    raise ValueError(f"`{name}` must be integers; {hint}. Received: {received}")


def from_floats(name: str, ids: Tensor, size: int) -> Tensor:
    """`ids` in [0, size) as int32 if they are whole numbers of a float dtype, else unchanged.

    Keras makes such ids: the default dtype of `keras.Input` is float32. Values are checked in eager calls only.
    """
    check_no_texts(name, ids)
    dtype = keras.backend.standardize_dtype(getattr(ids, "dtype", "int32"))
    if "float" not in dtype:
        return ids
    most = _WHOLE.get(dtype, 2)
    if size > most:
        raise ValueError(
            f"`{name}` in [0, {size}) must be integers, because {dtype} holds whole numbers to {most} only; begin the "
            f"model with a keras.Input of dtype='int32'. Received: {name} of dtype {dtype}"
        )
    values = values_of(ids)
    _check_whole(name, values)
    check_range(name, values, size)  # casts of large numbers are undefined
    return ops.cast(ids, "int32")


_WHOLE = {"bfloat16": 2**8, "float16": 2**11, "float32": 2**24, "float64": 2**53}  # {dtype: it holds [0, n] exactly}


def check_integers(name: str, ids: Tensor) -> None:
    """Raises unless the dtype of `ids` is an integer one."""
    check_no_texts(name, ids)
    dtype = keras.backend.standardize_dtype(ids.dtype)
    if "int" not in dtype:
        raise ValueError(
            f"`{name}` must be integers; a keras.Input for them needs dtype='int32'. Received: {name} of dtype {dtype}"
        )


def keep_outside(ids: Tensor, size: int) -> Tensor:
    """Returns `ids` with negative ones made too large, so that a look-up raises; Keras would count them from the end.

    On JAX, which cannot raise, they are clipped to the table.
    """
    if keras.backend.standardize_dtype(ids.dtype) in ("int8", "uint8", "int16", "uint16"):
        ids = ops.cast(ids, "int32")  # `size` may be too large for them
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
    return ops.cast(take_rows(table, rows), dtype)


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """The rows `ids` (...) of `table` (V, D) as (..., D), whose gradient has one row for each of the table.

    TensorFlow's own gradient has a row for each id. Where an id occurs several times, optimizers of Keras that square
    gradients, such as Adam, would add up the squares of its rows, and not square their sum.
    """
    if keras.backend.backend() != "tensorflow":
        return ops.take(table, ids, axis=0)
    ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, "int32")

    def with_gradient(table: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        def gradient(upstream: Tensor) -> Tensor:
            rows = tf.cast(tf.reshape(upstream, (-1, table.shape[1])), wide_dtype(upstream))
            return tf.cast(tf.math.unsorted_segment_sum(rows, tf.reshape(ids, (-1,)), table.shape[0]), table.dtype)

        return tf.gather(table, ids), gradient

    made: Tensor = custom_gradient(with_gradient)(tf.convert_to_tensor(table))
    return made


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
    """The tensor as a NumPy array, or None if it is symbolic and has no values, or only made-up ones."""
    is_meta = getattr(getattr(x, "device", None), "type", None) == "meta"
    if isinstance(x, keras.KerasTensor) or is_meta or values_are_made_up():
        return None
    try:
        return np.asarray(ops.convert_to_numpy(x))
    except Exception:  # each backend has its own error for a tensor of a graph
        return None

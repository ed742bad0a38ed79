"""Initializes variables with the tensors of a checkpoint, with one tensor in memory at a time.

Keras initializes variables that are created inside a `StatelessScope` when the scope ends. They get the values of the
checkpoint at that moment. So no random values are drawn and replaced, which would cost time and fragment the memory.
"""

import functools
from collections.abc import Iterable
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_tx.keras_internals import set_initializer
from keras_tx.optional import Lazy
from keras_tx.pretrained.files import Tensors, aligned
from keras_tx.pretrained.table import Row
from keras_tx.types import DType

tf, torch = Lazy("tensorflow"), Lazy("torch")

LARGE = 2**24  # bytes
_NARROW = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_PIECE = 2**17  # numbers that are checked at once, so that they stay in the processor's cache


class VariableLoader:
    """Initializes the variables of rows.

    Args:
        tensors: the tensors of the checkpoint.
        names: {name in the rows: name in the file}.
    """

    def __init__(self, tensors: Tensors, names: dict[str, str]) -> None:
        self._tensors, self._names = tensors, names
        self._waiting: dict[int, tuple[Any, Row]] = {}  # id of a variable: (the variable, its row)
        self._last: tuple[Row | None, list[Any]] = (None, [])  # a row with several variables is read once
        self._error: BaseException | None = None

    def prepare(self, rows: Iterable[Row]) -> None:
        """Sets the tensors as the initial values of the variables of these rows. To be called inside the scope."""
        for row in rows:
            for variable in row.variables:
                self._waiting[id(variable)] = (variable, row)
                set_initializer(variable, functools.partial(self._initial, id(variable)))

    def finish(self) -> None:
        """Raises the first error that occurred in reading. To be called after the scope."""
        self._last = (None, [])
        if self._error is not None:
            raise self._error
        for variable, row in self._waiting.values():  # if Keras did not use the initializers
            variable.assign(self._read(variable, row))

    def _initial(self, key: int, shape: Any, dtype: DType = None) -> Any:
        # An error raised here would leave Keras with uninitialized variables, and break its next use anywhere.
        try:
            variable, row = self._waiting[key]
            value = _tensor(self._read(variable, row), dtype, row.theirs)
            del self._waiting[key]
            return value
        except BaseException as error:
            self._error = self._error or error
            return ops.zeros(shape, dtype=dtype)

    def _read(self, variable: Any, row: Row) -> Any:
        if self._last[0] is not row:
            tensor = self._tensors.read(self._names[row.theirs])
            check_finite(self._names[row.theirs], tensor)
            self._last = (row, row.read(tensor))
        values = self._last[1]
        if len(values) == 1:
            self._last = (None, [])  # no longer needed
        value = next(value for one, value in values if one is variable)
        if value.dtype == np.float32 and value.flags.c_contiguous:
            return value
        array = aligned(4 * value.size).view("float32").reshape(value.shape)
        with np.errstate(over="ignore"):
            array[...] = value
        if value.dtype == np.float64:
            check_finite(row.theirs, array)
        return array


def check_finite(name: str, array: np.ndarray) -> None:
    """Raises if a number is NaN or infinite.

    It looks at the exponents only, which are all ones in such numbers, piece by piece. For numbers of 16 and 32 bits
    that takes less time than to read them from a disk, and no memory to speak of.

    Args:
        name: the name of the tensor, for the error.
        array: floating-point numbers of any dtype.

    Raises:
        ValueError: the message has the name and says how many numbers are NaN or infinite.
    """
    flat = np.ascontiguousarray(array).reshape(-1).view(f"uint{8 * array.dtype.itemsize}")
    # Shifted by one bit, the sign is gone, and numbers from this one on are infinite or NaN.
    infinite = np.array(np.inf, array.dtype).view(flat.dtype) << flat.dtype.type(1)
    buffer = np.empty(min(_PIECE, flat.size), flat.dtype)
    wrong = nans = 0
    for begin in range(0, flat.size, _PIECE):
        piece = flat[begin : begin + _PIECE]
        shifted = np.left_shift(piece, 1, out=buffer[: piece.size])
        if shifted.max() >= infinite:
            wrong += int(np.count_nonzero(shifted >= infinite))
            nans += int(np.count_nonzero(shifted > infinite))
    if wrong:
        raise ValueError(
            f"Every number of the tensor {name!r} must be finite. Received: {wrong} of {flat.size} are not, {nans} of "
            f"them NaN, as {array.dtype}"
        )


def _tensor(value: Any, dtype: DType, name: str) -> Any:
    """Converts a float32 array to a tensor, without a copy if it is large; the usual conversion makes one or two."""
    if value.nbytes >= LARGE and dtype == "float32":
        if keras.backend.backend() == "tensorflow":
            return tf.experimental.dlpack.from_dlpack(value.__dlpack__())
        if keras.backend.backend() == "torch":
            return torch.from_dlpack(value)
    if dtype in _NARROW:  # where large numbers become infinite
        with np.errstate(over="ignore"):
            check_finite(name, value.astype(_NARROW[dtype]))
    return ops.convert_to_tensor(value, dtype=dtype)

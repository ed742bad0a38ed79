"""Initializes variables with the tensors of a checkpoint, with one tensor in memory at a time.

Keras initializes variables that are created inside a `StatelessScope` when the scope ends. They get the values of the
checkpoint at that moment. So no random values are drawn and replaced, which would cost time and fragment the memory.

Under a `keras.distribution`, on JAX, each process reads the slices that its devices hold, one at a time. No device and
no process then needs memory for a whole tensor that is split.
"""

import functools
from collections.abc import Iterable
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

from keras_tx.internals.keras_models import initialize_now, layout_of, set_initializer
from keras_tx.optional import Lazy
from keras_tx.pretrained.files import Tensors, aligned
from keras_tx.pretrained.table import Range, Row
from keras_tx.types import DType

tf, torch, jax = Lazy("tensorflow"), Lazy("torch"), Lazy("jax")

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
        self._split: list[tuple[Any, Row, Any]] = []  # a variable, its row, and its `jax.sharding.Sharding`
        self._last: tuple[Row | None, list[Any]] = (None, [])  # a row with several variables is read once
        self._error: BaseException | None = None

    def prepare(self, rows: Iterable[Row]) -> None:
        """Sets the tensors as the initial values of the variables of these rows. To be called inside the scope."""
        for row in rows:
            for variable in row.variables:
                sharding = _sharding(variable)
                if sharding is not None:
                    self._split.append((variable, row, sharding))
                else:
                    self._waiting[id(variable)] = (variable, row)
                    set_initializer(variable, functools.partial(self._initial, id(variable)))

    def read_split(self) -> None:
        """Reads the variables that a distribution lays out over devices. To be called inside the scope."""
        if self._split:
            initialize_now((variable, self._laid_out(variable, row, to)) for variable, row, to in self._split)
        self._last = (None, [])

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

    def _laid_out(self, variable: Any, row: Row, sharding: Any) -> Any:
        """The array of a variable, of whose slices each is read once and copied to the devices that hold it."""
        shape = tuple(variable.shape)
        arrays: dict[Any, Any] = dict.fromkeys(sharding.addressable_devices_indices_map(shape))  # in this order
        holders: dict[tuple[Range, ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            ranges = tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
            holders.setdefault(ranges, []).append(device)
        for ranges, devices in holders.items():
            value = _as_stored(self._slice(variable, row, ranges), variable.dtype, row.theirs)
            arrays.update({device: jax.device_put(value, device) for device in devices})
        return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays.values()))

    def _slice(self, variable: Any, row: Row, ranges: tuple[Range, ...]) -> np.ndarray:
        name = self._names[row.theirs]
        is_whole = ranges == tuple((0, size) for size in variable.shape)
        block = None if is_whole else row.part(variable, ranges)
        if block is None:
            whole: np.ndarray = self._read(variable, row)
            return whole[tuple(slice(*one) for one in ranges)]
        values = self._tensors.read_block(name, block)
        check_finite(name, values)
        return row.read_part(values, ranges)

    def _read(self, variable: Any, row: Row) -> Any:
        if self._last[0] is not row:
            tensor = self._tensors.read(self._names[row.theirs])
            check_finite(self._names[row.theirs], tensor)
            self._last = (row, row.read(tensor))
        values = self._last[1]
        if len(values) == 1:
            self._last = (None, [])  # no longer needed
        return _as_float32(next(value for one, value in values if one is variable), row.theirs)


def _sharding(variable: Any) -> Any:
    """Where a `keras.distribution` puts a variable, on JAX; None without one."""
    if keras.backend.backend() != "jax" or keras.distribution.distribution() is None:
        return None
    layout = layout_of(variable)
    return getattr(layout, "backend_layout", layout)


def _as_float32(value: np.ndarray, name: str) -> np.ndarray:
    """The values as float32 in C order, at an aligned address."""
    if value.dtype == np.float32 and value.flags.c_contiguous:
        return value
    array = aligned(4 * value.size).view("float32").reshape(value.shape)
    with np.errstate(over="ignore"):
        array[...] = value
    if value.dtype == np.float64:
        check_finite(name, array)
    return array


def _as_stored(value: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """The values as an array of the dtype of a variable."""
    narrow = _NARROW.get(dtype)
    if narrow is None:
        return _as_float32(value, name).astype(dtype, copy=False)
    if value.dtype == narrow:
        return value
    with np.errstate(over="ignore"):
        array: np.ndarray = _as_float32(value, name).astype(narrow)
    check_finite(name, array)
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

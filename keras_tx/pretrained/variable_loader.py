"""Tensors of a checkpoint -> the values of variables that have none yet, with one tensor in memory at a time.

Keras gives variables that are made inside a `StatelessScope` their values when it ends. They get those of the
checkpoint there: nothing is drawn at random before, and no value is ever replaced, which would leave holes in memory.
"""

import functools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.optional import Lazy
from keras_tx.pretrained.files import Tensors, aligned
from keras_tx.pretrained.table import Row
from keras_tx.types import DType

tf, torch = Lazy("tensorflow"), Lazy("torch")

LARGE = 2**24  # bytes


class VariableLoader:
    """The values of rows.

    Args:
        tensors: `Tensors`.
        names: {name as rows have it: name in the file}.
    """

    def __init__(self, tensors: Tensors, names: dict[str, str]) -> None:
        self._tensors, self._names = tensors, names
        self._waiting: dict = {}  # id of a variable: (the variable, its row)
        self._last: tuple = (None, [])  # a row of several variables is read once
        self._error: BaseException | None = None

    def prepare(self, rows: Iterable[Row]) -> None:
        """Inside the scope: says where the values of the variables of these rows will come from."""
        for row in rows:
            for variable in row.variables:
                self._waiting[id(variable)] = (variable, row)
                variable._initializer = functools.partial(self._initial, id(variable))

    def finish(self) -> None:
        """Behind the scope: raises what went wrong in reading."""
        self._last = (None, [])
        if self._error is not None:
            raise self._error
        for variable, row in self._waiting.values():  # of a Keras that has asked otherwise
            variable.assign(self._read(variable, row))

    def _initial(self, key: int, shape: Any, dtype: DType = None) -> Any:
        # An error here would leave Keras with variables that it tries to fill again, wherever it is used next.
        try:
            value = _tensor(self._read(*self._waiting[key]), dtype)
            del self._waiting[key]
            return value
        except BaseException as error:
            self._error = self._error or error
            return ops.zeros(shape, dtype=dtype)

    def _read(self, variable: Any, row: Row) -> Any:
        if self._last[0] is not row:
            self._last = (row, row.read(self._tensors.read(self._names[row.theirs])))
        values = self._last[1]
        if len(values) == 1:
            self._last = (None, [])  # no longer needed
        value = next(value for one, value in values if one is variable)
        if value.dtype == np.float32 and value.flags.c_contiguous:
            return value
        array = aligned(4 * value.size).view("float32").reshape(value.shape)
        array[...] = value
        return array


def _tensor(value: Any, dtype: DType) -> Any:
    """A float32 array as a tensor. A large one is taken as it is, where the usual way makes one or two copies of it."""
    if value.nbytes >= LARGE and dtype == "float32":
        if keras.backend.backend() == "tensorflow":
            return tf.experimental.dlpack.from_dlpack(value.__dlpack__())
        if keras.backend.backend() == "torch":
            return torch.from_dlpack(value)
    return ops.convert_to_tensor(value, dtype=dtype)

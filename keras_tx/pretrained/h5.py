"""Reads `tf_model.h5`, in which transformers up to version 4 saved TensorFlow models, with PyTorch's names and shapes.

Names are translated as in `modeling_tf_pytorch_utils.py` of transformers 4.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from keras_tx.pretrained.snapshot import OpenFile

# The type of the error that h5py raises depends on where the file is damaged.
_DAMAGED = (OSError, KeyError, RuntimeError, TypeError, ValueError, AttributeError, UnicodeDecodeError, OverflowError)


class _Refused(ValueError):
    """A ValueError that this module raises itself, to tell it from those of h5py."""


@dataclass(frozen=True)
class Dataset:
    """One array of the file, as it will be read."""

    file: OpenFile
    key: str
    axes: tuple[int, ...]  # the stored axes in PyTorch's order
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        try:
            with h5py.File(self.file.stream(), "r") as file:
                array = np.asarray(file[self.key][()])
        except _DAMAGED as error:
            raise ValueError(f"The file {self.file.path} must hold {self.key!r}. Received: {error}") from error
        if array.shape != self.stored or array.dtype != self.dtype:
            raise ValueError(
                f"{self.key!r} of {self.file.path} must not change while it is read. Received: {array.shape}, "
                f"{array.dtype}"
            )
        return array.transpose(self.axes).reshape(self.shape)

    def read_block(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        return self.read()[tuple(slice(*one) for one in ranges)]

    def pieces(self) -> Iterator[np.ndarray]:
        yield np.ascontiguousarray(self.read()).reshape(-1).view("uint8")


def datasets(file: OpenFile) -> dict[str, Dataset]:
    """Returns {PyTorch's name: Dataset} for all arrays of the file.

    Raises:
        ValueError: the file is damaged or links to other files; an array is compressed, incomplete or not of numbers;
            or two arrays have the same name.
    """
    found: dict[str, Dataset] = {}
    path = file.path
    try:
        with h5py.File(file.stream(), "r") as root:
            arrays = list(_arrays(path, root, "", set()))
    except _Refused:
        raise
    except _DAMAGED as error:
        raise ValueError(f"The file {path} must be HDF5. Received: {error}") from error
    for key, shape, dtype in arrays:
        name, is_kernel = torch_name(key.split("/", 1)[-1])
        axes = tuple(range(len(shape)))
        if is_kernel:  # (in, out) -> (out, in); (h, w, in, out) -> (out, in, h, w)
            axes = (*axes[:-3:-1], *axes[:-2]) if len(shape) == 4 else axes[::-1]
        torch_shape = tuple(shape[axis] for axis in axes)
        if name.endswith("bias") and len(shape) == 2 and shape[0] == 1 and name != "final_logits_bias":
            torch_shape = shape[1:]  # the biases of `Conv1D` in GPT-2
        if name in found:
            raise ValueError(f"The arrays of {path} must have different names. Received: {name!r} for two")
        found[name] = Dataset(file, key, axes, shape, torch_shape, dtype)
    return found


def torch_name(name: str) -> tuple[str, bool]:
    """Translates TensorFlow's name of a tensor into PyTorch's, and says whether it is a kernel.

    ```python
    torch_name("tf_bert_model/bert/encoder/layer_._0/output/dense/kernel:0")
    # "bert.encoder.layer.0.output.dense.weight", True
    ```
    """
    name = re.sub(r"/[^/]*___([^/]*)/", r"/\1/", name.replace(":0", ""))
    parts = [part for part in name.replace("_._", "/").split("/") if part]
    *levels, last = parts if len(parts) == 1 else parts[1:]  # the first level is the class of the model
    renamed = {"kernel": "weight", "embeddings": "weight", "gamma": "weight", "beta": "bias"}.get(last, last)
    return ".".join([*levels, renamed]), last == "kernel"


def _arrays(
    path: str | Path, group: Any, prefix: str, seen: set[Any]
) -> Iterator[tuple[str, tuple[int, ...], np.dtype]]:
    """Yields the key, shape and dtype of each array in a group and in the groups below it."""
    for key in group:
        where = f"{prefix}{key}"
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise _Refused(f"The file {path} must not contain links. Received: a link at {where!r}")
        value = group[key]
        if value.id in seen:
            raise _Refused(f"The file {path} must hold each array once. Received: {where!r} a second time")
        seen.add(value.id)
        if isinstance(value, h5py.Group):
            yield from _arrays(path, value, f"{where}/", seen)
            continue
        is_numbers = isinstance(value, h5py.Dataset) and value.shape is not None and value.dtype.kind in "fiub"
        stored = is_numbers and not value.external and not value.is_virtual and not value.compression
        if not stored or value.id.get_storage_size() < value.nbytes:
            raise _Refused(
                f"The arrays of {path} must be numbers, stored in full and not compressed. Received: {value!r} at "
                f"{where!r}"
            )
        yield where, value.shape, value.dtype

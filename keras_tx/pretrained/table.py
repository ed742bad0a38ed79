"""The mapping between the tensors of a checkpoint, as PyTorch stores them, and our variables.

Rows are exact: writing returns bit for bit what was read. PyTorch stores the kernel of a linear layer as (out, in);
ours are (in, out), where `in` or `out` may consist of two axes, heads and head size.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from keras_tx.internals.keras_models import kernel_of, kernel_or_table_of
from keras_tx.layers.lora import LowRank

AS_IS = "as_is"  # the same axes in both
VECTOR = "vector"  # (n,), for a bias with an axis for heads
LINEAR = "linear"  # (out, in), for a kernel (in, out)
KERNEL = "kernel"  # (in, out), for a kernel (in, out): `Conv1D` of GPT-2
Range = tuple[int, int]  # begin and end on an axis

CONV2D = "conv2d"  # (out, in, height, width), for a kernel (height, width, in, out)


@dataclass(frozen=True)
class Row:
    """One tensor of the checkpoint, and the variables that it fills.

    Args:
        theirs: the name of the tensor, with the family's prefix.
        ours: a variable; or several, if the tensor is their concatenation along its output axis.
        how: how the checkpoint stores it: AS_IS, VECTOR, LINEAR, KERNEL or CONV2D.
        inputs: the number of input axes of our kernel.
    """

    theirs: str
    ours: Any
    how: str = AS_IS
    inputs: int = 1

    @property
    def variables(self) -> tuple[Any, ...]:
        return tuple(self.ours) if isinstance(self.ours, (list, tuple)) else (self.ours,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the tensor of the checkpoint must have."""
        shapes = [tuple(variable.shape) for variable in self.variables]
        first = shapes[0]
        if self.how == VECTOR:
            return (sum(map(math.prod, shapes)),)
        if self.how in (LINEAR, KERNEL):
            rows = math.prod(first[: self.inputs])
            columns = sum(math.prod(shape[self.inputs :]) for shape in shapes)
            return (columns, rows) if self.how == LINEAR else (rows, columns)
        if self.how == CONV2D:
            return (first[3], first[2], first[0], first[1])
        return (*first[:-1], sum(shape[-1] for shape in shapes)) if first else ()

    def read(self, tensor: np.ndarray) -> list[tuple[Any, np.ndarray]]:
        """Returns our variables, each with its value from the tensor of the checkpoint."""
        if self.how == LINEAR:
            tensor = tensor.T
        elif self.how == CONV2D:
            tensor = tensor.transpose(2, 3, 1, 0)
        rows = math.prod(tensor.shape[:-1])
        widths = [math.prod(variable.shape) // rows for variable in self.variables]
        parts = np.split(tensor, np.cumsum(widths)[:-1], axis=-1) if len(widths) > 1 else [tensor]
        return [(one, part.reshape(one.shape)) for one, part in zip(self.variables, parts, strict=True)]

    def part(self, variable: Any, ranges: Sequence[Range]) -> tuple[Range, ...] | None:
        """Where a part of one of our variables is in the tensor of the checkpoint: for each axis of it (begin, end).

        None: the part does not lie in one block of the tensor. `read_part` makes the part from the block.

        Args:
            variable: one of `variables`.
            ranges: (begin, end) for each axis of the variable.
        """
        shape, count = tuple(variable.shape), len(variable.shape)
        if self.how == CONV2D or not shape:
            return None
        cuts = {VECTOR: [0], AS_IS: list(range(count))}.get(self.how, [0, self.inputs])  # where our axes are joined
        groups = [slice(begin, end) for begin, end in zip(cuts, [*cuts[1:], count], strict=True)]
        joined = [_joined(shape[group], ranges[group]) for group in groups]
        blocks = [one for one in joined if one is not None]
        if len(blocks) < len(joined):
            return None
        index = next(index for index, one in enumerate(self.variables) if one is variable)
        offset = sum(math.prod(one.shape[groups[-1]]) for one in self.variables[:index])
        blocks[-1] = (blocks[-1][0] + offset, blocks[-1][1] + offset)
        return tuple(blocks[::-1] if self.how == LINEAR else blocks)

    def read_part(self, block: np.ndarray, ranges: Sequence[Range]) -> np.ndarray:
        """Returns the part of a variable from the block of the tensor at `part`."""
        return (block.T if self.how == LINEAR else block).reshape([end - begin for begin, end in ranges])

    def write(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor of the checkpoint from the values of our variables."""
        if self.how == CONV2D:
            return values[0].transpose(3, 2, 0, 1)
        if self.how == LINEAR:
            columns = [value.reshape(math.prod(value.shape[: self.inputs]), -1) for value in values]
            return np.concatenate(columns, axis=1).T if len(columns) > 1 else columns[0].T
        leading = self.shape[:-1]
        parts = [value.reshape(*leading, -1) for value in values]
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0].reshape(self.shape)


def _joined(shape: tuple[int, ...], ranges: Sequence[Range]) -> Range | None:
    """The range that `ranges` of several axes are when the axes are made one; None if it is not a single range."""
    inner = math.prod(shape[1:])
    if any(one != (0, size) for one, size in zip(ranges[1:], shape[1:], strict=True)):
        return None
    return ranges[0][0] * inner, ranges[0][1] * inner


def linear(theirs: str, *layers: Any, how: str = LINEAR) -> Iterator[Row]:
    """Rows for `theirs.weight` and, if there is one, `theirs.bias`, of one dense layer or of several in one tensor."""
    # With LoRA, `layer.kernel` is a sum instead of a variable.
    yield Row(f"{theirs}.weight", tuple(kernel_of(layer) for layer in layers), how, _input_axes(layers[0]))
    if layers[0].bias is not None:
        yield Row(f"{theirs}.bias", tuple(layer.bias for layer in layers), VECTOR)


def norm(theirs: str, layer: Any) -> Iterator[Row]:
    """Rows for `theirs.weight` and, if there is one, `theirs.bias`, of a normalization layer."""
    yield Row(f"{theirs}.weight", layer.gamma if hasattr(layer, "gamma") else layer.scale)
    if getattr(layer, "beta", None) is not None:
        yield Row(f"{theirs}.bias", layer.beta)


def by_path(theirs: str, names: dict[str, str], layer: Any) -> Iterator[Row]:
    """Rows for the dense and normalization layers inside `layer`.

    Args:
        theirs: the prefix of the names in the checkpoint.
        names: {name under `theirs`: path of the sublayer inside `layer`, such as "self_attention.query_dense"}.
        layer: the layer.
    """
    for name, path in names.items():
        sublayer = attrgetter(path)(layer)
        rows = linear if hasattr(sublayer, "kernel") else norm
        yield from rows(f"{theirs}.{name}", sublayer)


def with_lora(layers: Iterable[Any]) -> dict[int, LowRank]:
    """Returns {id of a kernel or table: its layer} for layers with LoRA."""
    found = [layer for layer in layers if isinstance(layer, LowRank) and layer.lora_enabled]
    return {id(kernel_or_table_of(layer)): layer for layer in found}


def _input_axes(layer: Any) -> int:
    """The number of input axes of the kernel of a dense layer."""
    if not hasattr(layer, "equation"):
        return 1
    left, right = layer.equation.split("->")[0].split(",")
    return len(set(left) & set(right))

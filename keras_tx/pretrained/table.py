"""The table of a checkpoint: tensors as PyTorch has them <-> our variables, by rows that read both ways.

A row is exact: what it reads it writes back bit for bit. PyTorch stores the kernel of a linear layer as (out, in); ours
are (in, out), with axes for heads where there are any.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

AS_IS = "as_is"  # the same axes
VECTOR = "vector"  # (n,), for a bias that has axes for heads
LINEAR = "linear"  # (out, in), for a kernel (in, out)
KERNEL = "kernel"  # (in, out), for a kernel (in, out): `Conv1D` of GPT-2
CONV2D = "conv2d"  # (out, in, height, width), for a kernel (height, width, in, out)


@dataclass(frozen=True)
class Row:
    """One tensor of theirs, and the variable or variables of ours that it fills.

    Args:
        theirs: its name, with the family's prefix.
        ours: a variable; or several, for a tensor that holds them one after the other along its output axis.
        how: AS_IS, VECTOR, LINEAR, KERNEL or CONV2D: how they store it.
        inputs: how many axes of our kernel are inputs.
    """

    theirs: str
    ours: Any
    how: str = AS_IS
    inputs: int = 1

    @property
    def variables(self) -> tuple:
        return tuple(self.ours) if isinstance(self.ours, (list, tuple)) else (self.ours,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that their tensor must have."""
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
        """Their tensor -> our variables, each with its value."""
        if self.how == LINEAR:
            tensor = tensor.T
        elif self.how == CONV2D:
            tensor = tensor.transpose(2, 3, 1, 0)
        rows = math.prod(tensor.shape[:-1])
        widths = [math.prod(variable.shape) // rows for variable in self.variables]
        parts = np.split(tensor, np.cumsum(widths)[:-1], axis=-1) if len(widths) > 1 else [tensor]
        return [(one, part.reshape(one.shape)) for one, part in zip(self.variables, parts, strict=True)]

    def write(self, values: dict[str, Any]) -> np.ndarray:
        """The values of our variables -> their tensor."""
        if self.how == CONV2D:
            return values[0].transpose(3, 2, 0, 1)
        if self.how == LINEAR:
            columns = [value.reshape(math.prod(value.shape[: self.inputs]), -1) for value in values]
            return np.concatenate(columns, axis=1).T if len(columns) > 1 else columns[0].T
        leading = self.shape[:-1]
        parts = [value.reshape(*leading, -1) for value in values]
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0].reshape(self.shape)


def linear(theirs: str, *layers: Iterable[Any], how: str = LINEAR) -> Iterator[Row]:
    """`theirs.weight`, and `theirs.bias` where there is one, of a dense layer; or of several, in one tensor."""
    # Not `layer.kernel`: under LoRA that is a sum, and no variable.
    yield Row(f"{theirs}.weight", tuple(layer._kernel for layer in layers), how, _input_axes(layers[0]))
    if layers[0].bias is not None:
        yield Row(f"{theirs}.bias", tuple(layer.bias for layer in layers), VECTOR)


def norm(theirs: str, layer: Any) -> Iterator[Row]:
    """`theirs.weight`, and `theirs.bias` where there is one, of a norm."""
    yield Row(f"{theirs}.weight", layer.gamma if hasattr(layer, "gamma") else layer.scale)
    if getattr(layer, "beta", None) is not None:
        yield Row(f"{theirs}.bias", layer.beta)


def by_path(theirs: str, names: dict[str, str], layer: Any) -> Iterator[Row]:
    """Dense layers and norms inside `layer`: {name under `theirs`: path of the sublayer, as "self_attention_norm"}."""
    for name, path in names.items():
        sublayer = attrgetter(path)(layer)
        rows = linear if hasattr(sublayer, "_kernel") else norm
        yield from rows(f"{theirs}.{name}", sublayer)


def merged(layers: Iterable[Any]) -> dict[int, Any]:
    """{id of a kernel: its value with LoRA added} of the layers that have LoRA."""
    return {id(layer._kernel): layer.kernel for layer in layers if getattr(layer, "lora_enabled", False)}


def _input_axes(layer: Any) -> int:
    """How many axes of the kernel of a dense layer are inputs."""
    if not hasattr(layer, "equation"):
        return 1
    left, right = layer.equation.split("->")[0].split(",")
    return len(set(left) & set(right))

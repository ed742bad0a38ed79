"""Model parallelism: which axis of a kernel is split over devices, and the `LayoutMap` that layers fill.

D model, N heads, H head, F feed-forward, V vocabulary. Shoeybi et al. 2019, arXiv:1909.08053: the products into heads
and into the feed-forward dimension are split by their outputs, those back by their inputs, tables by the vocabulary.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras

from keras_tx.internals.keras_models import layout_map_of, variables_initialized_at_end, weight_path
from keras_tx.layers.remat_scope import Rematerializable
from keras_tx.types import Shape

_KERNELS = ("kernel", "embeddings")
_FIRST_OF_LORA = ("lora_kernel_a", "lora_embeddings_a")  # (*inputs, rank), or as the kernel with the rank for the last
_LAST_OF_LORA = ("lora_kernel_b", "lora_embeddings_b")  # (rank, *outputs), or (rank, last axis of the kernel)


@dataclass(frozen=True)
class Split:
    """The axis of a kernel or table that may be split over devices.

    Args:
        what: what the axis counts, by the name of the layer's argument: "num_heads".
        axis: the axis of the kernel.
        rank: the number of axes of the kernel.
        inputs: how many of them are inputs; the others are those of the bias.
        other: the axis that is split if the size of `axis` is not divisible by the number of devices.
        optional: whether the kernel stays whole if no size is divisible. If not, that is an error.
    """

    what: str
    axis: int
    rank: int = 2
    inputs: int = 1
    other: int | None = None
    optional: bool = False

    def axes_of(self, name: str | None, shape: Shape) -> list[int]:
        """The axes of a weight of the layer that may be split, the preferred one first."""
        if name in _KERNELS and len(shape) == self.rank:
            return [axis for axis in (self.axis, self.other) if axis is not None]
        if name == "bias" and self.axis >= self.inputs:
            return [self.axis - self.inputs]
        if name in _FIRST_OF_LORA and self.axis < len(shape) - 1:
            return [self.axis]
        axis = self.axis - self.rank + len(shape)  # counted from the last one
        return [axis] if name in _LAST_OF_LORA and axis > 0 else []


class SplitLayouts(keras.distribution.LayoutMap):
    """A `LayoutMap` that the layers of this package fill: each weight that they split has an entry with its path.

    Entries that a user sets, paths or regular expressions as in every `LayoutMap`, come first.

    Args:
        device_mesh: the `keras.distribution.DeviceMesh`.
        batch_axis: the name of the axis of the mesh over which batches are split.
        model_axis: the name of the axis of the mesh over which weights are split.
    """

    def __init__(self, device_mesh: Any, batch_axis: str, model_axis: str) -> None:
        super().__init__(device_mesh)
        self.batch_axis, self.model_axis = batch_axis, model_axis
        self._placed: dict[str, Any] = {}

    def place(self, path: str, name: str | None, shape: Shape, split: Split, is_integer: bool = False) -> None:
        """Decides the layout of a weight.

        Raises:
            ValueError: the axis that must be split is not divisible by the number of devices.
        """
        if super().__getitem__(path) is not None:
            return
        mesh = dict(zip(self.device_mesh.axis_names, self.device_mesh.shape, strict=True))
        axes, count = split.axes_of(name, shape), mesh[self.model_axis]
        divisible = [axis for axis in axes if shape[axis] % count == 0]
        if name in _KERNELS and axes and not (divisible or split.optional or is_integer):
            other = "" if split.other is None else ", or the other axis of the embedding table must be divisible by it"
            sizes = f"{split.what}={shape[split.axis]}"
            sizes += "" if split.other is None else f", and the other axis is {shape[split.other]}"
            raise ValueError(
                f"`{split.what}` must be divisible by the number of devices on the axis {self.model_axis!r} of the mesh"
                f"{other}. Received: {sizes}, in the weight {path!r} of shape {tuple(shape)}, with the mesh {mesh}"
            )
        self._placed.pop(path, None)
        if divisible:
            axis_names = [self.model_axis if axis == divisible[0] else None for axis in range(len(shape))]
            self._placed[path] = keras.distribution.TensorLayout(axis_names, self.device_mesh)

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        return self._placed.get(key) if found is None else found

    def __delitem__(self, key: str) -> Any:
        return self._placed.pop(key) if key in self._placed else super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._placed

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def summary(self, model: keras.Model, print_fn: Callable[[str], Any] = print) -> None:
        """Prints which weights of a model are split, over which axis of the mesh, and the bytes on each device.

        Weights that differ only in the numbers of their paths, as those of the layers of a stack, share a line.

        Args:
            model: a built model.
            print_fn: the function that is called with each line.
        """
        counted: dict[tuple[Any, ...], int] = {}
        whole = held = 0
        for weight in model.weights:
            value = weight.value
            axes = tuple(getattr(value.sharding, "spec", ()))
            part = tuple(value.sharding.shard_shape(value.shape))
            whole, held = whole + value.nbytes, held + value.dtype.itemsize * math.prod(part)
            row = (re.sub(r"\d+", "*", weight.path), tuple(value.shape), axes, part)
            counted[row] = counted.get(row, 0) + 1
        print_fn(f"Mesh: {dict(zip(self.device_mesh.axis_names, self.device_mesh.shape, strict=True))}")
        for (path, shape, axes, part), count in counted.items():
            times = f" ({count} times)" if count > 1 else ""
            where = f"{part} on each device, split over {axes}" if part != shape else "whole"
            print_fn(f"{path}{times}: {shape}, {where}")
        print_fn(f"Bytes of the weights: {whole:,}; on each device: {held:,}")


class Splittable(Rematerializable):
    """A layer whose kernel may be split over devices along the axis that its attribute `split` names."""

    split: Split | None = None

    def add_weight(self, *args: Any, shape: Any = None, name: str | None = None, **kwargs: Any) -> Any:
        layouts = active_layouts() if self.split is not None else None
        if layouts is not None and self.split is not None:
            given = args[0] if shape is None and args else shape
            is_integer = "int" in str(kwargs.get("dtype"))
            layouts.place(weight_path(self, name), name, tuple(given or ()), self.split, is_integer)
        return super().add_weight(*args, shape=shape, name=name, **kwargs)


def active_layouts() -> SplitLayouts | None:
    """The layouts of the current `keras.distribution.ModelParallel`; None if it has others, or there is none.

    Raises:
        ValueError: it splits batches over another axis of the mesh than the layouts were made for.
    """
    distribution = keras.distribution.distribution()
    layouts = None if distribution is None else layout_map_of(distribution)
    if not isinstance(layouts, SplitLayouts):
        return None
    if distribution.batch_dim_name != layouts.batch_axis:
        raise ValueError(
            "`batch_dim_name` of `ModelParallel` must be the `data_parallel_dim_name` of its layout map. Received: "
            f"batch_dim_name={distribution.batch_dim_name!r}, data_parallel_dim_name={layouts.batch_axis!r}"
        )
    return layouts


def whole_model_first() -> AbstractContextManager[None]:
    """A context in which a model is constructed: under model parallelism its weights get values at the end of it.

    So a mesh that does not fit one of its layers is refused before memory is allocated for any.
    """
    return nullcontext() if active_layouts() is None else variables_initialized_at_end()

"""Checks that call arguments are dense and have the right shapes, and reads single sizes of tensors."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.types import Shape, Tensor

tf = Lazy("tensorflow")


def size_of(x: Tensor, axis: int) -> Any:
    """The size of an axis: an integer, or a scalar tensor where the graph does not know it.

    `ops.shape` would add four operations to a graph of TensorFlow for every axis whose size that does not know.
    """
    size = x.shape[axis]
    return tf.shape(x)[axis] if size is None else size


_MADE_DENSE = {
    "RaggedTensor": "convert it with `.to_tensor()`, and pass a mask, or fill up ids with the padding id",
    "SparseTensor": "convert it with `tf.sparse.to_dense`",
    "KerasTensor": "do not pass `ragged=True` to its `keras.Input`",
}


def check_dense(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if one of these call arguments of `layer` is a ragged or sparse tensor of TensorFlow, or stands for one.

    A ragged tensor can be reshaped, which cuts its rows at other places. Of a symbolic tensor, `sparse` says nothing:
    `x * 8` of a dense one has it, too.
    """
    for place, x in (*enumerate(args), *kwargs.items()):
        kind = type(x).__name__
        if kind in _MADE_DENSE and (kind != "KerasTensor" or x.ragged):
            name = list(inspect.signature(layer.call).parameters)[place] if isinstance(place, int) else place
            raise ValueError(
                f"`{name}` must be a dense tensor: {_MADE_DENSE[kind]}. Received: a "
                f"{'ragged ' if kind == 'KerasTensor' else ''}{kind} of shape {tuple(x.shape)}"
            )


def check_shape(name: str, tensor: Tensor, expected: Shape, exact: bool = False) -> None:
    """Raises unless the static shape of `tensor` is `expected` or, without `exact`, can be broadcast to it.

    A size of None, in either shape, matches any size.
    """
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(
        size == wanted or None in (size, wanted) or (size == 1 and not exact)
        for size, wanted in zip(shape, expected, strict=True)
    )
    if not fits:
        rule = "have the shape" if exact else "broadcast to"
        raise ValueError(f"`{name}` must {rule} {tuple(expected)}. Received: {name}.shape={shape}")

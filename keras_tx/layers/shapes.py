"""Checks that call arguments are dense and have the right shapes, and reads single sizes of tensors."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

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
}


def check_dense(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if one of these call arguments of `layer` is a ragged or sparse tensor of TensorFlow.

    A ragged tensor can be reshaped, which cuts its rows at other places. Symbolic tensors may be declared ragged or
    sparse: the model that is made of them may be called with dense ones, and calls the layer with its real arguments.
    """
    for place, x in (*enumerate(args), *kwargs.items()):
        kind = type(x).__name__
        if kind in _MADE_DENSE:
            name = _name_at(layer, place) if isinstance(place, int) else place
            raise ValueError(
                f"`{name}` must be a dense tensor: {_MADE_DENSE[kind]}. Received: a {kind} of shape {x.shape}"
            )


def is_ragged(x: Any) -> bool:
    """Whether `x` is a ragged tensor, and the backend is TensorFlow."""
    return keras.backend.backend() == "tensorflow" and isinstance(x, tf.RaggedTensor)


def _name_at(layer: Any, place: int) -> str:
    """The name of the call argument at this place; "args[0]" for the first of those that an argument `*args` takes."""
    parameters = list(inspect.signature(layer.call).parameters.values())
    for index, one in enumerate(parameters[: place + 1]):
        if one.kind is one.VAR_POSITIONAL:
            return f"{one.name}[{place - index}]"
    return parameters[place].name


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

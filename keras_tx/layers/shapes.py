"""Checks the shapes of call arguments, and reads single sizes of tensors."""

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

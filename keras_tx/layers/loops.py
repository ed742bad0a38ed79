"""Loops over blocks (I, ...), and access to a block by an index that is known only at run time, on every backend."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.layers.precision import wide_dtype
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def product(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """The matrix product over the last two axes. On TensorFlow a separate transposition would copy the matrix."""
    if keras.backend.backend() == "tensorflow":
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    a = ops.swapaxes(a, -2, -1) if transpose_a else a
    b = ops.swapaxes(b, -2, -1) if transpose_b else b
    return a @ b if wide_dtype(a, b) == "float64" else ops.matmul(a, b)  # Keras' product of float64 is float32 there


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)), also in float64, which Keras computes in float32 on PyTorch."""
    if wide_dtype(a, b) == "float32" or keras.backend.backend() == "tensorflow":
        return ops.logaddexp(a, b)
    largest = ops.where(a > b, a, b)
    return largest + ops.log(ops.exp(a - largest) + ops.exp(b - largest))


def repeat(start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """`state = body(index, state)` for each index from `start` up to `stop`, one after the other.

    By default TensorFlow would run up to ten iterations in parallel, with the memory of ten.
    """
    if keras.backend.backend() != "tensorflow":
        return ops.fori_loop(start, stop, body, state)
    return tf.while_loop(
        lambda index, _: index < stop,
        lambda index, state: (index + 1, body(index, state)),
        (start, state),
        parallel_iterations=1,
    )[1]


def corner(*indices: Any) -> tuple[Any, ...]:
    """Where a slice begins. With 64-bit types on, JAX refuses integers of different dtypes there."""
    is_jax = keras.backend.backend() == "jax"
    return tuple(ops.cast(index, "int32") for index in indices) if is_jax else indices


def at(x: Tensor, index: Any) -> Tensor:
    """Block `index` of (I, ...). Under XLA, `x[index]` gives wrong results if `index` is a tensor inside a loop."""
    return ops.take(x, index, axis=0)


def add(x: Tensor, index: Any, blocks: Tensor) -> Tensor:
    """Adds `blocks` to (I, ...) from block `index` on. It may change `x` in place: do not use `x` afterwards."""
    if keras.backend.backend() == "tensorflow":
        return tf.tensor_scatter_nd_add(x, (index + tf.range(blocks.shape[0], dtype="int32"))[:, None], blocks)
    if keras.backend.backend() == "torch":
        x[index : index + blocks.shape[0]] += blocks
        return x
    start, rest = corner(index, *[0] * (len(x.shape) - 1)), ops.shape(x)[1:]
    return ops.slice_update(x, start, ops.slice(x, start, (blocks.shape[0], *rest)) + blocks)


def put(x: Tensor, index: Any, block: Tensor) -> Tensor:
    """Replaces block `index` of (I, ...). It may change `x` in place: do not use `x` afterwards."""
    if keras.backend.backend() == "tensorflow":  # in place; `slice_update` is an operation of XLA there
        return tf.tensor_scatter_nd_update(x, tf.reshape(index, (1, 1)), block[None])
    if keras.backend.backend() == "torch":  # in place, too: `slice_update` would copy all blocks
        x[index] = block
        return x
    return ops.slice_update(x, corner(index, *[0] * (len(x.shape) - 1)), block[None])

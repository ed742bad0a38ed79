"""What loops over blocks need on every backend: (I, ...) blocks, read and written by a number known at run time."""

import keras
from keras import ops

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def product(a, b, transpose_a=False, transpose_b=False):
    """The product of two (..., ., .); TensorFlow would write a transposition out."""
    if keras.backend.backend() == "tensorflow":
        return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    a = ops.swapaxes(a, -2, -1) if transpose_a else a
    return ops.matmul(a, ops.swapaxes(b, -2, -1) if transpose_b else b)


def repeat(start, stop, body, state):
    """`state = body(index, state)` for each index from `start` up to `stop`, one after the other.

    TensorFlow would begin ten rounds at once where a part of a round waits for no other, and hold memory for ten.
    """
    if keras.backend.backend() != "tensorflow":
        return ops.fori_loop(start, stop, body, state)
    return tf.while_loop(
        lambda index, _: index < stop,
        lambda index, state: (index + 1, body(index, state)),
        (start, state),
        parallel_iterations=1,
    )[1]


def at(x, index):
    """TransformerLayer `index` of (I, ...). XLA is wrong about `x[index]` where `index` is a tensor inside a loop."""
    return ops.take(x, index, axis=0)


def add(x, index, blocks):
    """(I, ...) with `blocks` added from block `index` on; `x` itself is not to be used again."""
    if keras.backend.backend() == "tensorflow":
        return tf.tensor_scatter_nd_add(x, (index + tf.range(blocks.shape[0], dtype="int32"))[:, None], blocks)
    if keras.backend.backend() == "torch":
        x[index : index + blocks.shape[0]] += blocks
        return x
    start, rest = (index, *[0] * (len(x.shape) - 1)), ops.shape(x)[1:]
    return ops.slice_update(x, start, ops.slice(x, start, (blocks.shape[0], *rest)) + blocks)


def put(x, index, block):
    """(I, ...) with another block `index`; `x` itself is not to be used again."""
    if keras.backend.backend() == "tensorflow":  # in place; `slice_update` is an op of XLA there
        return tf.tensor_scatter_nd_update(x, tf.reshape(index, (1, 1)), block[None])
    if keras.backend.backend() == "torch":  # in place, too: `slice_update` would copy all blocks for each
        x[index] = block
        return x
    return ops.slice_update(x, (index, *[0] * (len(x.shape) - 1)), block[None])

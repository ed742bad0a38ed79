"""The KV cache, a value that a decoding loop owns, hands in and gets back: keys (B, K, S, H) and values (B, K, S, V).

B batch, K key heads, S slots for tokens, H head, V value head. Heads stand before slots, so that no step transposes a
buffer. Each layer has a pair of its own, which is never stacked with others. The cache of a `MultiHeadAttention` is a
`KeyValue` that grows, or a `Memory` that was computed once for cross-attention; that of a `DecoderLayer` a tuple of one
or both; that of a `Decoder` a tuple over its layers.
"""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_tx.layers import xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


class KeyValue(NamedTuple):
    """Keys and values of self-attention, filled up to some slot."""

    key: Any
    value: Any


class Memory(NamedTuple):
    """Keys and values of cross-attention, whole."""

    key: Any
    value: Any


def as_stored(x):
    """Keys or values (B, T, K, H) -> (B, K, T, H)."""
    one = x.shape[1] == 1 and not xla.is_traced()  # XLA sees by itself that nothing need be moved
    return ops.reshape(x, (-1, x.shape[2], 1, x.shape[3])) if one else ops.swapaxes(x, 1, 2)


def write(cache, key, value, start):
    """`cache` with `key` (B, K, T, H) and `value` (B, K, T, V) in the slots from `start` on.

    Raises:
        ValueError: where there are no such slots, as far as `start` is known.
    """
    slots, length = cache.key.shape[2], key.shape[2]
    if isinstance(start, int) and None not in (slots, length) and not 0 <= start <= slots - length:
        raise ValueError(
            "`cache` must have slots for the tokens: start + T <= slots. Received: "
            f"start={start}, T={length}, slots={slots}"
        )
    return KeyValue(_write(cache.key, key, start), _write(cache.value, value, start))


def _write(buffer, update, start):
    update, shape = ops.cast(update, buffer.dtype), ops.shape(buffer)
    if xla.is_traced() or keras.backend.backend() == "torch":
        buffer, update = (ops.reshape(x, (-1, *ops.shape(x)[2:])) for x in (buffer, update))  # see `merged`
        buffer = ops.slice_update(buffer, (0, start, 0), update)  # in place, but on TensorFlow by an op of XLA's
        return ops.reshape(buffer, shape)
    # In place as well, where nothing else holds the buffer; a scatter or a selection would copy it in each step.
    end, only_slots = start + ops.shape(update)[2], 0b1011
    return tf.raw_ops.TensorStridedSliceUpdate(
        input=buffer,
        begin=[0, 0, start, 0],
        end=[0, 0, end, 0],
        strides=[1, 1, 1, 1],
        value=update,
        begin_mask=only_slots,
        end_mask=only_slots,
    )


def num_slots(cache):
    """S, the length of the self-attention buffers of any layer's cache."""
    return ops.shape(cache.key)[2] if isinstance(cache, KeyValue) else num_slots(cache[0])


def growing(cache):
    """The flat list of the tensors of self-attention, which change from step to step, in a fixed order."""
    if isinstance(cache, Memory):
        return []
    if isinstance(cache, KeyValue):
        return list(cache)
    return [tensor for part in cache for tensor in growing(part)]


def merged(tensors):
    """(B, K, S, H) -> (B * K, S, H), as loops carry them: with B = 1 XLA copies buffers of four axes in each step.

    Without XLA they stay as they are.
    """
    return [ops.reshape(x, (-1, *ops.shape(x)[2:])) for x in tensors] if xla.is_traced() else list(tensors)


def with_growing(cache, tensors):
    """`cache` with other tensors in the place of those that `growing` lists, `merged` or not."""
    rest = iter(tensors)

    def replaced(part):
        if isinstance(part, Memory):
            return part
        if isinstance(part, KeyValue):
            return KeyValue(*[_shaped_as(next(rest), old) for old in part])
        return tuple(replaced(one) for one in part)

    return replaced(cache)


def _shaped_as(x, old):
    return x if len(x.shape) == len(old.shape) else ops.reshape(x, ops.shape(old))

"""The key-value cache: keys (B, K, S, H) and values (B, K, S, V), which each decode step takes and returns.

B batch, K key heads, S slots for tokens, H head, V value head. The axis of heads comes before that of slots, so that no
decode step transposes a buffer. Each layer has its own pair of tensors; they are never stacked. The cache of a
`MultiHeadAttention` is a `KeyValue`, which decode steps fill, or a `Memory`, computed once for cross-attention, which
beams share. The cache of a `DecoderLayer` is a tuple of one or both, that of a `Decoder` a tuple with one entry for
each layer.
"""

from collections.abc import Iterable
from numbers import Integral
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_tx.layers import xla
from keras_tx.layers.ids import values_of
from keras_tx.layers.loops import corner
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_WIDE = 16  # bytes of the widest number of TensorFlow, a complex128


class KeyValue(NamedTuple):
    """Keys (B, K, S, H) and values (B, K, S, V) of self-attention, of which decode steps fill slot after slot."""

    key: Tensor
    value: Tensor


class Memory(NamedTuple):
    """Keys (B, K, S, H) and values (B, K, S, V) of the complete source, for cross-attention."""

    key: Tensor
    value: Tensor


class SharedMemory(NamedTuple):
    """A `Memory` of which each row is that of W rows of queries, side by side, such as the beams of a prompt."""

    key: Tensor
    value: Tensor
    rows: Tensor  # (W, 0): without numbers, as its static shape is what says W


_KINDS = (KeyValue, Memory, SharedMemory)
Cache = Any  # one of the three or a tuple of caches; mypy cannot express the recursion without casts


def check_cache(cache: Cache, inputs: Any, depth: int, num_layers: int | None = None) -> None:
    """Raises unless the call argument `cache` is None, or what `new_cache` or `new_memory` returned.

    Args:
        cache: the call argument.
        inputs: all arguments of the call. With a cache none of them may be symbolic.
        depth: 0 for attention, 1 for a layer, 2 for a stack of layers: the number of tuples around a `KeyValue`.
        num_layers: of a stack: how many parts the cache must have.
    """
    if cache is None:
        return
    if any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten([cache, inputs])):
        raise ValueError(
            "`cache` must be given in eager calls or in functions such as `tf.function` and `jax.jit`, not while a "
            "functional model is made. "
            "Received: cache, and a keras.KerasTensor among the arguments"
        )
    if not _has_depth(cache, depth):
        raise ValueError(
            "`cache` must be what `new_cache` or `new_memory` of the layer returned, or the cache of the call before. "
            f"Received: cache of types {_types_of(cache)}"
        )
    if num_layers is not None and len(cache) != num_layers:
        raise ValueError(
            "`cache` must have one part for each layer of the stack. "
            f"Received: a cache of {len(cache)} parts for {num_layers} layers"
        )


def _has_depth(cache: Any, depth: int) -> bool:
    if isinstance(cache, _KINDS) or not isinstance(cache, (tuple, list)):
        return depth == 0 and isinstance(cache, _KINDS)
    return depth > 0 and len(cache) > 0 and all(_has_depth(part, depth - 1) for part in cache)


def _types_of(cache: Any) -> str:
    if isinstance(cache, _KINDS) or not isinstance(cache, (tuple, list)):
        return type(cache).__name__
    return f"({', '.join(map(_types_of, cache))})"


def heads_first(x: Tensor) -> Tensor:
    """Keys or values (B, T, K, H) -> (B, K, T, H)."""
    is_reshape = x.shape[1] == 1 and not xla.is_traced()  # XLA removes the transposition by itself
    return ops.reshape(x, (-1, x.shape[2], 1, x.shape[3])) if is_reshape else ops.swapaxes(x, 1, 2)


def write(cache: KeyValue, key: Tensor, value: Tensor, start: Any) -> KeyValue:
    """Returns `cache` with `key` (B, K, T, H) and `value` (B, K, T, V) stored in the slots from `start` on.

    Raises:
        ValueError: if the batch size, the heads or the last axis of the cache and of `key` or `value` differ; or if
            `start` is known and the cache has no such slots.
        tf.errors.InvalidArgumentError: likewise when a graph of TensorFlow runs without XLA, if `start` is a tensor
            that only the graph knows, or 0. Not in `generate`, whose cache has slots for all tokens.
    """
    _check_sizes(cache, key, value)
    slots, length = cache.key.shape[2], key.shape[2]
    # To read `start` from a GPU, PyTorch would synchronize in each layer of each step.
    is_near = getattr(getattr(start, "device", None), "type", "cpu") == "cpu"
    is_tensor = not isinstance(start, Integral) and is_near and not xla.is_generating()
    number = values_of(start) if is_tensor else start if isinstance(start, Integral) else None
    if number is not None and None not in (slots, length) and not 0 <= int(number) <= slots - length:
        raise ValueError(
            "`cache` must have slots for the tokens: 0 <= start and start + T <= slots. Received: "
            f"start={number}, T={length}, slots={slots}"
        )
    if is_tensor and number is None and keras.backend.backend() == "tensorflow" and not xla.is_traced():
        slots, length = tf.shape(cache.key)[2], tf.shape(key)[2]
        rule = "`cache` must have slots for the tokens: 0 <= start and start + T <= slots. Received: start, T and slots"
        fits = (start >= 0) & (start <= tf.cast(slots - length, start.dtype))
        with tf.control_dependencies([tf.debugging.Assert(fits, [rule, start, length, slots])]):
            start = tf.identity(start)
    return KeyValue(_write(cache.key, key, start), _write(cache.value, value, start))


def _check_sizes(cache: KeyValue, key: Tensor, value: Tensor) -> None:
    """Raises for another batch size, or another layer's heads: PyTorch and JAX would write a part of the rows."""
    for of_cache, new in ((cache.key, key), (cache.value, value)):
        pairs = [*zip(of_cache.shape, new.shape, strict=False)]
        del pairs[2:3]  # slots and tokens
        is_other = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        if is_other or len(of_cache.shape) != len(new.shape):
            raise ValueError(
                "`cache` must come from `new_cache` of this layer, with the batch size of the inputs. Received: a "
                f"cache of shape {tuple(of_cache.shape)} (batch, heads, slots, dim) for keys or values of shape "
                f"{tuple(new.shape)} (batch, heads, tokens, dim)"
            )


def _write(buffer: Tensor, update: Tensor, start: Any) -> Tensor:
    update = ops.cast(update, buffer.dtype)
    if xla.is_traced() or keras.backend.backend() == "torch":
        shape = ops.shape(buffer)
        buffer, update = (ops.reshape(x, (-1, *ops.shape(x)[2:])) for x in (buffer, update))  # see `merged`
        buffer = ops.slice_update(
            buffer, corner(0, start, 0), update
        )  # in place; on TensorFlow it is an operation of XLA
        return ops.reshape(buffer, shape)
    if isinstance(start, Integral) and int(start) == 0:  # a prefill: the update below is slow for many tokens
        length, slots = tf.shape(update)[2], tf.shape(buffer)[2]
        rule = "`cache` must have slots for the tokens: start + T <= slots. Received: start=0, T and slots"
        with tf.control_dependencies([tf.debugging.Assert(length <= slots, [rule, length, slots])]):
            written = tf.concat([update, buffer[:, :, length:]], axis=2)
        written.set_shape(buffer.shape)
        return written
    # In place, too, if nothing else holds the buffer; a scatter or a selection would copy it in each step.
    if xla.is_generating() and update.shape[2] == 1 and update.shape[3] * update.dtype.size % _WIDE == 0:
        return _write_one(buffer, update, start)
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


def repeat_rows(x: Tensor, count: int) -> Tensor:
    """(B, ...) -> (B * count, ...), with the copies of a row side by side; `count` is a Python integer.

    XLA fuses `ops.repeat` into a reduction that follows it. On CPUs it then needs twice the time to compile the maximum
    of floats for each further element of the axis: seconds for 25 elements, minutes for 30. It does not fuse a gather.
    """
    return x if count == 1 else ops.take(x, ops.arange(ops.shape(x)[0] * count, dtype="int32") // count, axis=0)


def repeated(cache: Cache, count: int) -> Cache:
    """The cache for `count` rows in place of each one, which share a `Memory`."""
    if isinstance(cache, Memory):
        return SharedMemory(*cache, ops.zeros((count, 0)))
    if isinstance(cache, KeyValue):
        return KeyValue(*[repeat_rows(x, count) for x in cache])
    return tuple(repeated(part, count) for part in cache)


def _write_one(buffer: Tensor, update: Tensor, start: Any) -> Tensor:
    """`buffer` (B, K, S, H) with `update` (B, K, 1, H) in slot `start`, sooner than by the operation for slices.

    TensorFlow computes the place of each number with a division for each axis. So the buffer is taken as rows of wider
    numbers, of which every S-th is written. It has no gradient.
    """
    shape = tf.shape(buffer)

    def rows(x: Tensor) -> Tensor:
        count = _WIDE // x.dtype.size
        return tf.bitcast(tf.reshape(x, (-1, x.shape[3] // count, count)), "complex128")

    written = tf.raw_ops.TensorStridedSliceUpdate(
        input=rows(buffer),
        begin=[start, 0],
        end=[0, 0],
        strides=[shape[2], 1],
        value=rows(update),
        begin_mask=0b10,
        end_mask=0b11,
    )
    written = tf.reshape(tf.bitcast(written, buffer.dtype), shape)
    written.set_shape(buffer.shape)
    return written


def num_slots(cache: Cache) -> Any:
    """The number of slots S for self-attention in the cache of any layer."""
    return ops.shape(cache.key)[2] if isinstance(cache, KeyValue) else num_slots(cache[0])


def growing(cache: Cache) -> list[Tensor]:
    """The tensors of self-attention, which every decode step changes, as a flat list in a fixed order."""
    if isinstance(cache, (Memory, SharedMemory)):
        return []
    if isinstance(cache, KeyValue):
        return list(cache)
    return [tensor for part in cache for tensor in growing(part)]


def merged(tensors: Iterable[Tensor]) -> list[Tensor]:
    """(B, K, S, H) -> (B * K, S, H), the shape in which loops compiled by XLA carry them; unchanged without XLA.

    With B = 1, XLA would copy a buffer with four axes in every step.
    """
    return [ops.reshape(x, (-1, *ops.shape(x)[2:])) for x in tensors] if xla.is_traced() else list(tensors)


def with_growing(cache: Cache, tensors: Iterable[Tensor]) -> Cache:
    """Returns `cache` with other `tensors` in place of those that `growing` lists, in the same shapes or `merged`."""
    rest = iter(tensors)

    def replaced(part: Cache) -> Cache:
        if isinstance(part, (Memory, SharedMemory)):
            return part
        if isinstance(part, KeyValue):
            return KeyValue(*[_shaped_as(next(rest), old) for old in part])
        return tuple(replaced(one) for one in part)

    return replaced(cache)


def _shaped_as(x: Tensor, old: Tensor) -> Tensor:
    return x if len(x.shape) == len(old.shape) else ops.reshape(x, ops.shape(old))

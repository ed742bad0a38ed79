"""Batches of texts of similar length, made from whole windows of texts, as `bucket_by_length` makes them one by one.

N texts in a window, K buckets, B batches. tf.data needs 0.1 ms for each element, and a text has few tokens: here many
texts go through each operation, which is ten times faster. The full batches are those of `bucket_by_length`, in the
same order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_tx.data.buckets import _batch_sizes, _extended_boundaries
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def bucketed(windows: Any, batch_size: Any, max_tokens: Any, boundaries: Sequence[int], padding: Any) -> Any:
    """Batches of all texts of `windows`.

    Args:
        windows: a `tf.data.Dataset` of windows: features, or `(features, labels)`. Features are a dictionary of ragged
            tensors (N, None), and labels a ragged tensor or a tensor (N,).
        batch_size, max_tokens, boundaries: as in `bucket_by_length`.
        padding: the padding of each tensor, in the structure of a window.
    """
    limits = _extended_boundaries(boundaries)
    sizes = np.array(_batch_sizes(batch_size, max_tokens, boundaries, limits), "int64")
    spec = windows.element_spec
    features = spec[0] if isinstance(spec, tuple) else spec
    parts = [isinstance(one, tf.RaggedTensorSpec) for one in tf.nest.flatten(spec)]
    none = tf.zeros([0], "int32")
    empty = tuple((none, tf.zeros([0], "int64")) if is_ragged else (none,) for is_ragged in parts)
    marked = windows.map(lambda *window: (False, _split(tf.nest.flatten(window))))
    marked = marked.concatenate(tf.data.Dataset.from_tensors((True, empty)))

    def grouped(left: Any, window: Any) -> Any:
        """Adds a window to the texts that are left, and takes those of all full batches, of the last one of all."""
        is_last, new = window
        texts = [_joined(old, one) for old, one in zip(left, new, strict=True)]
        lengths = tf.reduce_max(tf.stack([x.row_lengths() for x in texts[: len(features)]]), 0)  # (N,)
        bucket = tf.searchsorted(tf.constant(limits, "int64"), lengths, side="left")
        order = tf.argsort(bucket, stable=True)
        bucket = tf.gather(bucket, order)
        begins = tf.searchsorted(bucket, tf.range(len(sizes)), side="left", out_type="int64")  # (K,)
        counts = tf.concat([begins[1:], [tf.size(bucket, "int64")]], 0) - begins
        rank, size = tf.range(tf.size(bucket, "int64")) - tf.gather(begins, bucket), tf.gather(sizes, bucket)
        is_full = is_last | (rank < tf.gather(counts // sizes * sizes, bucket))
        taken, rest = tf.boolean_mask(order, is_full), tf.boolean_mask(order, ~is_full)
        starts = tf.where(tf.boolean_mask(rank % size == 0, is_full))[:, 0]  # (B,)
        stops = tf.concat([starts[1:], [tf.size(taken, "int64")]], 0)[: tf.size(starts)]
        turn = tf.argsort(tf.gather(taken, stops - 1))  # a batch comes when its last text comes
        batches = tf.gather(starts, turn), tf.gather(stops, turn)
        return _split([tf.gather(x, rest) for x in texts]), (_split([tf.gather(x, taken) for x in texts]), batches)

    def each(texts: Any, batches: Any) -> Any:
        def batch(start: Tensor, stop: Tensor) -> Any:
            rows = [
                _padded(part, start, stop, value) for part, value in zip(texts, tf.nest.flatten(padding), strict=True)
            ]
            return tf.nest.pack_sequence_as(padding, rows)

        return tf.data.Dataset.from_tensor_slices(batches).map(batch)

    return marked.scan(empty, grouped).flat_map(each)


def _split(parts: list[Any]) -> tuple[tuple[Tensor, ...], ...]:
    """Ragged tensors as (values, lengths), others as (values,)."""
    return tuple((x.values, x.row_lengths()) if isinstance(x, tf.RaggedTensor) else (x,) for x in parts)


def _joined(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> Tensor:
    values, *lengths = (tf.concat(both, 0) for both in zip(old, new, strict=True))
    return tf.RaggedTensor.from_row_lengths(values, lengths[0], validate=False) if lengths else values


def _padded(part: tuple[Tensor, ...], start: Tensor, stop: Tensor, value: int) -> Tensor:
    """The rows from `start` to `stop`."""
    if len(part) == 1:
        return part[0][start:stop]
    values, lengths = part
    first = tf.reduce_sum(lengths[:start])
    lengths = lengths[start:stop]
    values = values[first : first + tf.reduce_sum(lengths)]
    return tf.RaggedTensor.from_row_lengths(values, lengths, validate=False).to_tensor(value)

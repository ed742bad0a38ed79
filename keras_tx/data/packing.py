"""Sequences of any length -> rows with several in each: (n,) ids -> (L,) ids, document numbers, positions and labels.

L the length of a row, n of a sequence, N sequences that are packed together, P pieces of them, R rows. With attention
inside `document_ids` alone and `positions` that start again, a row gives what its sequences give one by one.
Krell et al. 2021, arXiv:2107.02027.
"""

import reprlib
from typing import Any

import numpy as np

from keras_tx.checks import one_of, positive_int
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def pack_sequences(
    sequences: Any,
    length: int,
    *,
    padding_id: int = 0,
    label_padding: int | None = None,
    too_long: str = "error",
    window: int = 1000,
) -> Any:
    """Packs sequences into rows of `length` by first fit: every sequence once, whole, and little padding.

    The rows are elements `(features, labels)` or `(features, labels, sample_weight)` of (L,) tensors; `features` is a
    dict with "token_ids", "document_ids" (1, 2, 3, ... in each row), "positions" (from 0 in each document) and what
    else the features of `sequences` hold; all but the ids are 0 at padding. Sequences without tokens are left out.

    Args:
        sequences: a `tf.data.Dataset` of unpadded `features`, `(features, labels)` or `(features, labels,
            sample_weight)`, where `features` is a rank-1 tensor of token ids or a dict of rank-1 tensors with
            "token_ids" among them, and whatever is in an element is as long as its token ids. Or the same in memory:
            in place of each tensor a list of arrays, a ragged tensor or a rectangular array, a sequence in each row.
            What is in memory is packed at once and has a known number of rows. With a `Dataset` it is unknown: give
            `fit` its `steps_per_epoch`, or count and say so with `tf.data.experimental.assert_cardinality`.
        length: L.
        padding_id: fills "token_ids".
        label_padding: fills the labels; `padding_id` by default. Where no labels are given, a token's label is the next
            token of its document, and this at the last. It should be no label that occurs.
        too_long: what to do with a sequence of more than `length` tokens: "error", or "split" it into documents of
            `length` tokens and the rest. The last token before a cut has the first after it for its label.
        window: N. Each so many sequences are packed into rows of their own. More of them leave less padding.

    Raises:
        TypeError: `sequences` is nothing of the above.
        ValueError: a wrong argument, no "token_ids", something that is not of rank 1; and a sequence that is too long,
            or not as long as its labels. In a `Dataset` these two are found when they are read, and are a
            `tf.errors.InvalidArgumentError`.
    """
    positive_int("length", length)
    positive_int("window", window)
    one_of("too_long", too_long, ("error", "split"))
    label_padding = padding_id if label_padding is None else label_padding
    for name, value in (("padding_id", padding_id), ("label_padding", label_padding)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"`{name}` must be an integer. Received: {name}={value!r}")
    longest = length if too_long == "error" else None

    def pack(*element):
        parts = _parts(element, _as_ragged)
        _check_lengths(parts, longest)
        if len(parts) == 1:
            parts += (_next_tokens(parts[0]["token_ids"], label_padding),)
        paddings = {**dict.fromkeys(parts[0], 0), "token_ids": padding_id}, label_padding, 0
        return _pack(parts, paddings[: len(parts)], length)

    if isinstance(sequences, tf.data.Dataset):
        _parts(sequences.element_spec, _check_rank)
        return sequences.ragged_batch(window).map(pack, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
    parts = _parts(sequences, _in_memory)
    counts = [int(part.nrows()) for part in tf.nest.flatten(parts)]
    if min(counts) < max(counts) or not counts[0]:
        raise ValueError(f"`sequences` must have one or more of ids, and as many of all else. Received: {counts}")
    _check_lengths(parts, longest)
    windows = tf.data.Dataset.from_tensor_slices(parts).batch(window)
    packed = list(windows.map(pack, num_parallel_calls=tf.data.AUTOTUNE))
    return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), *packed))


def first_fit(sizes, room):
    """Sizes (P,) -> the row of each (P,), int32: the first that has room for it, where rows begin with `room`."""

    def put(i, left, rows):
        row = tf.argmax(left >= sizes[i], output_type="int32")
        return i + 1, tf.tensor_scatter_nd_sub(left, [[row]], [sizes[i]]), rows.write(i, row)

    count = tf.size(sizes)
    start = 0, tf.fill([count], room), tf.TensorArray("int32", count)
    return tf.while_loop(lambda i, *_: i < count, put, start)[2].stack()


def _pack(parts, paddings, length):
    """(features, labels, ...) of ragged (N, None) -> the same of (R, L), and what tells documents apart."""
    sizes = tf.cast(parts[0]["token_ids"].row_lengths(), "int32")  # (N,)
    begins = tf.ragged.range(0, sizes, length)  # of each sequence, where its pieces begin
    sizes = tf.minimum(tf.repeat(sizes, begins.row_lengths()) - begins.flat_values, length)  # (P,)
    row = first_fit(sizes, length)
    order = tf.argsort(row, stable=True)
    starts = tf.gather(tf.cumsum(sizes, exclusive=True), order)
    sizes, row = tf.gather(sizes, order), tf.gather(row, order)
    tokens = tf.ragged.range(starts, starts + sizes).flat_values  # in the order of the rows: where each comes from
    row_sizes = tf.math.segment_sum(sizes, row)  # (R,)
    documents = tf.math.segment_sum(tf.ones_like(row), row)  # (R,)

    def rows(values, padding):
        padding = tf.cast(padding, values.dtype)
        return tf.RaggedTensor.from_row_lengths(values, row_sizes).to_tensor(padding, shape=[None, length])

    packed = tf.nest.map_structure(lambda x, padding: rows(tf.gather(x.flat_values, tokens), padding), parts, paddings)
    packed[0]["document_ids"] = rows(tf.repeat(tf.ragged.range(documents).flat_values + 1, sizes), 0)
    packed[0]["positions"] = rows(tf.ragged.range(sizes).flat_values, 0)
    return packed


def _next_tokens(ids, last):
    """Ragged (N, None) -> of each token the one after it in its row, and `last` where there is none."""
    after = tf.concat([ids.flat_values[1:], ids.flat_values[:1]], axis=0)
    ends = tf.boolean_mask(ids.row_limits() - 1, ids.row_lengths() > 0)
    return ids.with_flat_values(tf.tensor_scatter_nd_update(after, ends[:, None], tf.fill(tf.shape(ends), last)))


def _parts(element, function):
    """`features`, `(features,)`, `(features, labels)` or with weights -> a tuple; `function` of each tensor."""
    features, *others = element if isinstance(element, tuple) else (element,)
    features = features if isinstance(features, dict) else {"token_ids": features}
    if "token_ids" not in features or set(features) & {"document_ids", "positions"} or len(others) > 2:
        raise ValueError(
            "`sequences` must be features, (features, labels) or (features, labels, sample_weight), with 'token_ids' "
            "among the features and no 'document_ids' or 'positions'. Received: features "
            f"{sorted(features)} and {len(others)} more"
        )
    features = {name: function(values) for name, values in features.items()}
    if not features["token_ids"].dtype.is_integer:
        raise ValueError(f"`sequences` must have integer token ids. Received: {features['token_ids'].dtype.name}")
    return features, *map(function, others)


def _check_rank(spec):
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank not in (1, None):
        raise ValueError(f"`sequences` must have elements of rank 1, unbatched. Received: {spec}")
    return spec


def _in_memory(values):
    try:
        if not tf.is_tensor(values):
            rows = [np.asarray(row) for row in values]
            sizes = [len(row) for row in rows]
            rows = [row for row in rows if len(row)] or [np.zeros(0, "int32")]  # an empty list would be float64
            values = tf.RaggedTensor.from_row_lengths(np.concatenate(rows), np.array(sizes, "int64"))
        if values.shape.rank == 2:
            return _as_ragged(values)
        reason = f"rank {values.shape.rank}"
    except (TypeError, ValueError) as error:
        reason = str(error)
    raise TypeError(
        "`sequences` must be a tf.data.Dataset, a list of arrays, a ragged tensor or a rectangular array. Received: "
        f"{reprlib.repr(values)} ({reason})"
    )


def _as_ragged(values):
    """Rows, dense where all have one known length -> ragged, integers as int32."""
    values = values if isinstance(values, tf.RaggedTensor) else tf.RaggedTensor.from_tensor(values)
    return tf.cast(values, "int32") if values.dtype.is_integer else values


def _check_lengths(parts, longest):
    sizes = parts[0]["token_ids"].row_lengths()
    rule = "Whatever is in an element of `sequences` must be as long as its token ids. Received:"
    for others in (part.row_lengths() for part in tf.nest.flatten(parts)):
        first = tf.argmax(others != sizes)
        _demand(others[first] == sizes[first], rule, others[first], "values for", sizes[first], "token ids")
    if longest is not None:
        rule = "`sequences` must not be longer than `length`, unless too_long='split'. Received:"
        _demand(tf.reduce_all(sizes <= longest), rule, tf.reduce_max(sizes), "tokens, length =", longest)


def _demand(condition, *message):
    """An error where the values are known, an assertion in a graph."""
    if not tf.executing_eagerly():
        tf.debugging.Assert(condition, message)
    elif not condition:
        raise ValueError(" ".join(str(part.numpy() if tf.is_tensor(part) else part) for part in message))

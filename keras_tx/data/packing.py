"""Packs several sequences into each row: ids (n,) -> ids, document ids, positions and labels, each (L,).

L length of a row, n length of a sequence, N sequences that are packed together, P pieces of them, R rows. If attention
is limited to the same `document_ids`, and `positions` restart in each document, the outputs for a packed row equal
those for its sequences one by one. Krell et al. 2021, arXiv:2107.02027.
"""

import reprlib
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np

from keras_tx.checks import one_of, positive_int
from keras_tx.data.padding_rows import fill_batches
from keras_tx.internals import keras_training
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

INT32 = np.iinfo("int32")
INT32_RULE = f"from {INT32.min} to {INT32.max}, because the rows are int32"


def pack_sequences(
    sequences: Any,
    length: int,
    *,
    padding_id: int = 0,
    label_padding: int | None = None,
    too_long: str = "error",
    window: int = 1000,
    multiple_of: int | None = None,
) -> Any:
    """Packs sequences into rows of one length, to avoid padding tokens.

    Every sequence is put, undivided, into the first row that has room for it (first fit). Empty sequences are left out.
    The rows are elements `(features, labels)`, or `(features, labels, sample_weight)`, of tensors (L,). `features` is a
    dictionary with "token_ids", "document_ids" (1, 2, 3, ... in each row), "positions" (from 0 in each document) and
    the other features of `sequences`. At padding tokens the token ids are `padding_id`, the labels `label_padding`, and
    all else is 0.

    Args:
        sequences: a `tf.data.Dataset` of unpadded elements `features`, `(features, labels)` or `(features, labels,
            sample_weight)`. `features` is a tensor of token ids of rank 1, or a dictionary of such tensors with
            "token_ids" among them. All tensors of an element have the length of its token ids. Or the same structure in
            memory, with a list of arrays, a ragged tensor or a rectangular array in place of each tensor; then the
            number of rows is known. With a `Dataset` it is unknown: pass `steps_per_epoch` to `fit`, or count the rows
            and use `tf.data.experimental.assert_cardinality`.
        length: the length L of a row, in tokens.
        padding_id: the id of padding tokens.
        label_padding: the label of padding tokens, which no real token should have. Give it to the loss and metrics as
            `padding_id`. None: the argument `padding_id`. If `sequences` has no labels, the label of a token is the
            next token of its document, and the label of the last token is `label_padding`.
        too_long: what to do with a sequence of more than `length` tokens: "error" raises an error; "split" divides it
            into documents of `length` tokens and a shorter last one. The label of the last token before a cut is the
            first token after it.
        window: N, the number of sequences that are packed together. A larger number leaves fewer padding tokens, and
            needs more memory.
        multiple_of: rows of padding are added at the end, until the number of rows is a multiple of this number, so
            that all batches of this size are full. The elements then have a sample weight, which is 0 for these
            rows: a scalar, or (L,) if `sequences` have weights; see `fill_batches`.

    Returns:
        A `tf.data.Dataset` of rows.

    Raises:
        TypeError: `sequences` has another type. ValueError: an argument is not valid, there are no "token_ids", a
            tensor is not of rank 1, an integer is too large for int32, a sequence is too long, or its length differs
            from that of its labels. For a `Dataset` the last three are found only when it is read, and raise
            `tf.errors.InvalidArgumentError`.

    Reference:
        Krell et al. 2021, arXiv:2107.02027.

    Examples:
        >>> rows = keras_tx.data.pack_sequences([[11, 12, 13], [21, 22], [31, 32, 33, 34]], 6)
        >>> for features, labels in rows:
        ...     print(features["token_ids"].numpy(), features["document_ids"].numpy(), labels.numpy())
        [11 12 13 21 22  0] [1 1 1 2 2 0] [12 13  0 22  0  0]
        [31 32 33 34  0  0] [1 1 1 1 0 0] [32 33 34  0  0  0]
    """
    length, window = positive_int("length", length), positive_int("window", window)
    multiple_of = positive_int("multiple_of", multiple_of, none=True)
    one_of("too_long", too_long, ("error", "split"))
    padding_id = _integer("padding_id", padding_id)
    last_label = padding_id if label_padding is None else _integer("label_padding", label_padding)
    limit = length if too_long == "error" else None

    def pack(*element: Any) -> Any:
        parts = _parts(element, _as_ragged)
        _check_lengths(parts, limit)
        if len(parts) == 1:
            parts += (_next_tokens(parts[0]["token_ids"], last_label),)
        paddings = {**dict.fromkeys(parts[0], 0), "token_ids": padding_id}, last_label, 0
        return _pack(parts, paddings[: len(parts)], length)

    if isinstance(sequences, tf.data.Dataset):
        _parts(sequences.element_spec, _check_rank)
        keras_training.let_data_end()
        packed = sequences.ragged_batch(window).map(pack, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
        return packed if multiple_of is None else _filled(packed, multiple_of, padding_id, last_label)
    parts = _parts(sequences, _in_memory)
    counts = [int(part.nrows()) for part in tf.nest.flatten(parts)]
    if min(counts) < max(counts) or not counts[0]:
        raise ValueError(
            f"`sequences` must have at least one sequence, and as many labels and weights. Received: {counts}"
        )
    _check_lengths(parts, limit)
    windows = tf.data.Dataset.from_tensor_slices(parts).batch(window)
    windows = windows.map(pack, num_parallel_calls=tf.data.AUTOTUNE)
    if multiple_of is not None:
        windows = _filled(windows.unbatch(), multiple_of, padding_id, last_label).batch(window)
    none = tf.nest.map_structure(lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), windows.element_spec)
    packed = tf.nest.map_structure(lambda *rows: tf.concat(rows, 0), none, *windows)  # all may be empty
    return tf.data.Dataset.from_tensor_slices(packed)


def first_fit(sizes: Tensor, room: int) -> Tensor:
    """Puts pieces of `sizes` (P,) into rows of size `room`; returns the index of the row of each piece, int32 (P,)."""

    pieces = tf.range(tf.size(sizes))
    # A piece that fills a row always opens one, and long texts have many of them: the loop leaves them out.
    shorter = tf.boolean_mask(pieces, sizes < room)  # (S,)
    rows = _first_fit_in_a_loop(tf.gather(sizes, shorter), room)
    openers = tf.math.unsorted_segment_min(shorter, rows, tf.size(shorter))  # the first piece in each of these rows
    opener = tf.tensor_scatter_nd_update(pieces, shorter[:, None], tf.gather(openers, rows))  # (P,)
    rows_before = tf.cumsum(tf.cast(opener == pieces, "int32"), exclusive=True)
    return tf.gather(rows_before, opener)


def _first_fit_in_a_loop(sizes: Tensor, room: int) -> Tensor:
    """`first_fit`, in a time that grows with the square of the number of pieces."""

    def put(i: Tensor, left: Tensor, rows: Any) -> tuple[Any, ...]:
        row = tf.argmax(left >= sizes[i], output_type="int32")
        return i + 1, tf.tensor_scatter_nd_sub(left, [[row]], [sizes[i]]), rows.write(i, row)

    count = tf.size(sizes)
    start = 0, tf.fill([count], room), tf.TensorArray("int32", count, element_shape=[])
    return tf.while_loop(lambda i, *_: i < count, put, start)[2].stack()


def _filled(rows: Any, multiple_of: int, padding_id: int, label: int) -> Any:
    """Rows, and after them rows of padding, until their number is a multiple of `multiple_of`."""
    batches = rows.batch(multiple_of)
    paddings = {**dict.fromkeys(rows.element_spec[0], 0), "token_ids": padding_id}, label
    return fill_batches(batches, multiple_of, padding_values=paddings).unbatch()


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"`{name}` must be an integer. Received: {name}={value!r}")
    if not INT32.min <= int(value) <= INT32.max:
        raise ValueError(f"`{name}` must be an integer {INT32_RULE}. Received: {name}={value!r}")
    return int(value)


def _pack(parts: tuple[Any, ...], paddings: tuple[Any, ...], length: int) -> Any:
    """Packs (features, labels, ...) of ragged (N, None) into (R, L), and adds "document_ids" and "positions"."""
    sizes = tf.cast(parts[0]["token_ids"].row_lengths(), "int32")  # (N,)
    starts = tf.ragged.range(0, sizes, length)  # where the pieces of each sequence start
    sizes = tf.minimum(tf.repeat(sizes, starts.row_lengths()) - starts.flat_values, length)  # (P,)
    row = first_fit(sizes, length)
    order = tf.argsort(row, stable=True)
    starts = tf.gather(tf.cumsum(sizes, exclusive=True), order)
    sizes, row = tf.gather(sizes, order), tf.gather(row, order)
    tokens = tf.ragged.range(starts, starts + sizes).flat_values  # the index of each token of the rows among all tokens
    row_sizes = tf.math.segment_sum(sizes, row)  # (R,)
    documents = tf.math.segment_sum(tf.ones_like(row), row)  # (R,)

    def rows(values: Tensor, padding: Any) -> Tensor:
        padding = tf.cast(padding, values.dtype)
        return tf.RaggedTensor.from_row_lengths(values, row_sizes).to_tensor(padding, shape=[None, length])

    packed = tf.nest.map_structure(lambda x, padding: rows(tf.gather(x.flat_values, tokens), padding), parts, paddings)
    packed[0]["document_ids"] = rows(tf.repeat(tf.ragged.range(documents).flat_values + 1, sizes), 0)
    packed[0]["positions"] = rows(tf.ragged.range(sizes).flat_values, 0)
    return packed


def _next_tokens(ids: Tensor, last: int) -> Tensor:
    """Ragged (N, None) -> the token after each one in its row, and `last` for the last one."""
    after = tf.concat([ids.flat_values[1:], ids.flat_values[:1]], axis=0)
    ends = tf.boolean_mask(ids.row_limits() - 1, ids.row_lengths() > 0)
    return ids.with_flat_values(tf.tensor_scatter_nd_update(after, ends[:, None], tf.fill(tf.shape(ends), last)))


def _parts(element: Any, function: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Returns an element as (features, ...) with a dictionary of features, and `function` applied to each tensor."""
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


def _check_rank(spec: Any) -> Any:
    shape = getattr(spec, "shape", None)
    if shape is None or shape.rank not in (1, None):
        raise ValueError(f"`sequences` must have elements of rank 1, unbatched. Received: {spec}")
    return spec


def _in_memory(values: Any) -> Tensor:
    """Converts sequences in memory to a ragged tensor."""
    try:
        if not tf.is_tensor(values):
            rows = [np.asarray(row) for row in values]
            sizes = [len(row) for row in rows]
            rows = [row for row in rows if len(row)] or [np.zeros(0, "int32")]  # NumPy takes an empty list for float64
            values = tf.RaggedTensor.from_row_lengths(np.concatenate(rows), np.array(sizes, "int64"))
        reason = None if values.shape.rank == 2 else f"rank {values.shape.rank}"
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason is None:
        return _as_ragged(values)  # not within `try`: its ValueError names the integer
    raise TypeError(
        "`sequences` must be a tf.data.Dataset, a list of arrays, a ragged tensor or a rectangular array. Received: "
        f"{reprlib.repr(values)} ({reason})"
    )


def _as_ragged(values: Tensor) -> Tensor:
    """Converts rows, which are dense if all have the same known length, to ragged rows, and integers to int32."""
    values = values if isinstance(values, tf.RaggedTensor) else tf.RaggedTensor.from_tensor(values)
    if not values.dtype.is_integer:
        return values
    if values.dtype.limits[1] > INT32.max:
        flat = values.flat_values
        narrow = tf.cast(flat, "int32")
        is_wrong = tf.cast(narrow, "int64") != tf.cast(flat, "int64")
        if values.dtype.is_unsigned:
            is_wrong |= narrow < 0
        wrong = tf.boolean_mask(flat, is_wrong)
        _require(tf.size(wrong) == 0, f"`sequences` must have integers {INT32_RULE}. Received:", wrong[:1])
    return tf.cast(values, "int32")


def _check_lengths(parts: tuple[Any, ...], limit: int | None) -> None:
    sizes = parts[0]["token_ids"].row_lengths()
    rule = "Everything in an element of `sequences` must be as long as its token ids. Received:"
    for others in (part.row_lengths() for part in tf.nest.flatten(parts)):
        first = tf.argmax(others != sizes)
        _require(others[first] == sizes[first], rule, others[first], "values for", sizes[first], "token ids")
    if limit is not None:
        rule = "`sequences` must not be longer than `length`, unless too_long='split'. Received:"
        _require(tf.reduce_all(sizes <= limit), rule, tf.reduce_max(sizes), "tokens, length =", limit)


def _require(condition: Any, *message: Any) -> None:
    """Raises an error if the values are known; otherwise adds an assertion to the graph."""
    if not tf.executing_eagerly():
        tf.debugging.Assert(condition, message)
    elif not condition:
        raise ValueError(" ".join(str(part.numpy() if tf.is_tensor(part) else part) for part in message))

"""`pack_sequences`: every sequence is in the rows once and whole, and the rows say which token belongs to which."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_tx.data import pack_sequences
from keras_tx.data.packing import first_fit

SEQUENCES = [[11, 12, 13], [21, 22], [], [31, 32, 33, 34, 35, 36, 37], [41]]
PACKED = {5: 1000, 11: 7}  # length: window


def dataset(rows, dtype="int32"):
    return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=tf.TensorSpec([None], dtype))


def documents(rows, *more):
    """(ids, labels, ...) of each document in the rows, in the order of the rows."""
    for features, *others in rows:
        columns = [features["token_ids"], *others, *(features[name] for name in more)]
        for number in range(1, features["document_ids"].max(initial=0) + 1):
            where = features["document_ids"] == number
            assert np.all(np.diff(np.flatnonzero(where)) == 1) and where.any()  # in one piece
            np.testing.assert_array_equal(features["positions"][where], np.arange(where.sum()))
            yield tuple(tuple(column[where].tolist()) for column in columns)


def fitted(sizes, room):
    """First fit, as one would say it."""
    left, rows = [], []
    for size in sizes:
        row = next((row for row, free in enumerate(left) if free >= size), len(left))
        left += [room] * (row == len(left))
        left[row] -= size
        rows.append(row)
    return rows


@given(st.integers(1, 9), st.data())
def test_first_fit_is_the_first_row_with_room(room, data):
    sizes = data.draw(st.lists(st.integers(1, room), min_size=1, max_size=15))
    assert first_fit(tf.constant(sizes), room).numpy().tolist() == fitted(sizes, room)


@tf.function(input_signature=[tf.TensorSpec([None], "int32")])
def graph_of_first_fit(sizes):
    return first_fit(sizes, 7)


@given(st.lists(st.sampled_from([7, 7, 7, 1, 2, 3, 4, 5, 6]), max_size=30))
def test_first_fit_with_many_pieces_as_long_as_a_row(sizes):
    assert graph_of_first_fit(sizes).numpy().tolist() == fitted(sizes, 7)


def test_pieces_as_long_as_a_row_are_not_compared_with_every_row():
    """The loop would take minutes for this."""
    sizes = np.full(300_000, 7, "int32")
    sizes[::100_000] = 4
    expected = np.arange(300_000)
    np.testing.assert_array_equal(graph_of_first_fit(sizes), expected)


@cache
def shared(length):
    """A list of sequences, and the rows of what is in it when they are read: one graph for many lists."""
    sequences = []
    options = {"too_long": "split", "label_padding": -100, "window": PACKED[length]}
    return sequences, pack_sequences(dataset(sequences), length, **options)


def pack(sequences, length):
    contents, rows = shared(length)
    contents[:] = sequences
    return list(rows.as_numpy_iterator())


@settings(max_examples=12)
@given(lengths=st.lists(st.integers(0, 23), min_size=1, max_size=40), length=st.sampled_from(list(PACKED)))
def test_every_token_comes_out_once_and_is_labelled_with_the_next(lengths, length):
    """No id is 0 or the same twice, so that neither the next token nor a piece of a sequence can be mistaken."""
    limits = np.cumsum([1, *lengths])
    sequences = [np.arange(*pair, dtype="int32") for pair in zip(limits, limits[1:], strict=False)]
    expected, sizes = Counter(), []
    for ids in sequences:
        for start in range(0, len(ids), length):
            last = [-100] if start + length >= len(ids) else ids[start + length : start + length + 1].tolist()
            piece = ids[start : start + length].tolist()
            expected[tuple(piece), tuple(piece[1:] + last)] += 1
            sizes.append(len(piece))
    rows = pack(sequences, length)
    assert Counter(documents(rows)) == expected
    for features, labels in rows:
        assert labels.shape == (length,)
        padding = features["document_ids"] == 0
        assert np.all(np.diff(padding.astype(int)) >= 0)  # at the end alone
        for values, filled in ((features["token_ids"], 0), (features["positions"], 0), (labels, -100)):
            assert set(values[padding]) <= {filled}
    if PACKED[length] >= len(lengths):
        assert len(rows) == max(fitted(sizes, length), default=-1) + 1


def test_in_memory_and_as_a_dataset_the_rows_are_the_same():
    sequences = [np.arange(1, size + 1) for size in np.random.default_rng(0).integers(0, 30, size=20)]
    packed = pack_sequences(sequences, 11, too_long="split", label_padding=-100, window=PACKED[11])
    rows = pack(sequences, 11)
    assert int(packed.cardinality()) == len(rows) > 3
    tf.nest.map_structure(np.testing.assert_array_equal, list(packed.as_numpy_iterator()), rows)


@pytest.mark.parametrize(
    "form",
    [
        lambda: [np.array(row, "int64") for row in SEQUENCES],
        lambda: tf.ragged.constant(SEQUENCES, dtype="int64"),
        lambda: dataset(SEQUENCES, "int64").map(lambda ids: {"token_ids": ids}),
    ],
    ids=["arrays", "ragged", "dataset of dicts"],
)
def test_rows_by_hand(form):
    """Room 8: 3 + 2 + 1 in the first row, 7 in the second."""
    rows = list(pack_sequences(form(), 8, padding_id=9).as_numpy_iterator())
    assert [(features["token_ids"].tolist(), labels.tolist()) for features, labels in rows] == [
        ([11, 12, 13, 21, 22, 41, 9, 9], [12, 13, 9, 22, 9, 9, 9, 9]),
        ([31, 32, 33, 34, 35, 36, 37, 9], [32, 33, 34, 35, 36, 37, 9, 9]),
    ]
    assert [features["document_ids"].tolist() for features, _ in rows] == [[1, 1, 1, 2, 2, 3, 0, 0], [1] * 7 + [0]]
    assert [features["positions"].tolist() for features, _ in rows] == [[0, 1, 2, 0, 1, 0, 0, 0], [*range(7), 0]]
    assert all(x.dtype == "int32" for features, labels in rows for x in (labels, *features.values()))


def test_a_rectangle_has_a_sequence_in_each_row():
    rows = pack_sequences(np.array([[1, 2], [3, 4], [5, 6]]), 4)
    assert [features["token_ids"].tolist() for features, _ in rows.as_numpy_iterator()] == [[1, 2, 3, 4], [5, 6, 0, 0]]
    fixed = tf.data.Dataset.from_tensor_slices([[1, 2], [3, 4], [5, 6]])  # elements of one known length
    assert [y.numpy().tolist() for _, y in pack_sequences(fixed, 4)] == [[2, 0, 4, 0], [6, 0, 0, 0]]


@pytest.mark.parametrize("in_memory", [True, False])
def test_labels_weights_and_other_features_stay_with_their_tokens(in_memory):
    sizes = [3, 2, 4, 1]
    ids = [np.arange(size) + 10 * n + 1 for n, size in enumerate(sizes)]
    elements = (
        {"token_ids": ids, "segment_ids": [row % 2 for row in ids]},
        [row * 100 for row in ids],
        [row / 7.0 for row in ids],
    )
    if not in_memory:
        spec = tf.TensorSpec([None], "int32")
        spec = {"token_ids": spec, "segment_ids": spec}, spec, tf.TensorSpec([None], "float64")
        rows = [({k: v[n] for k, v in elements[0].items()}, elements[1][n], elements[2][n]) for n in range(len(ids))]
        elements = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
    packed = list(pack_sequences(elements, 6, label_padding=-1).as_numpy_iterator())
    found = sorted(documents(packed, "segment_ids"))
    assert [(x, y, segments) for x, y, _, segments in found] == [
        (tuple(row), tuple(row * 100), tuple(row % 2)) for row in ids
    ]
    np.testing.assert_allclose(np.concatenate([weights for _, _, weights, _ in found]), np.concatenate(ids) / 7.0)
    features, labels, weights = packed[1]  # 4 of 6 places are taken
    assert labels[4:].tolist() == [-1, -1]
    assert not any(values[4:].any() for values in (weights, *features.values()))


def test_numpy_numbers_are_numbers():
    numbers = {"padding_id": np.int64(9), "label_padding": np.int64(-100), "window": np.int64(3)}
    rows = pack_sequences(SEQUENCES, np.int32(8), **numbers).as_numpy_iterator()
    assert [(features["token_ids"].tolist(), labels.tolist()) for features, labels in rows] == [
        ([11, 12, 13, 21, 22, 9, 9, 9], [12, 13, -100, 22, -100, -100, -100, -100]),
        ([31, 32, 33, 34, 35, 36, 37, 41], [32, 33, 34, 35, 36, 37, -100, -100]),
    ]


def test_a_window_is_packed_by_itself():
    rows = pack_sequences([[1], [2], [3], [4], [5]], 3, window=2)
    found = [features["token_ids"].tolist() for features, _ in rows.as_numpy_iterator()]
    assert found == [[1, 2, 0], [3, 4, 0], [5, 0, 0]]


def test_rows_are_nearly_full():
    sizes = np.random.default_rng(0).integers(5, 40, size=4000)
    rows = pack_sequences(tf.RaggedTensor.from_row_lengths(np.ones(sizes.sum(), "int32"), sizes), 512)
    assert sizes.sum() / 512 / len(rows) > 0.98


@pytest.mark.parametrize(
    ("sequences", "arguments", "error", "message"),
    [
        (SEQUENCES, {"length": 0}, ValueError, r"`length` must be a positive integer. Received: length=0"),
        (SEQUENCES, {"window": 0}, ValueError, r"`window` must be a positive integer. Received: window=0"),
        (SEQUENCES, {"too_long": "cut"}, ValueError, r"`too_long` must be one of .* Received: too_long='cut'"),
        (SEQUENCES, {"padding_id": 0.5}, ValueError, r"`padding_id` must be an integer. Received: padding_id=0.5"),
        (SEQUENCES, {"label_padding": True}, ValueError, r"`label_padding` must be .* Received: label_padding=True"),
        (
            SEQUENCES,
            {"padding_id": 2**31},
            ValueError,
            r"`padding_id` must .* 2147483647.* Received: padding_id=2147483648",
        ),
        ([[1, 2**31]], {}, ValueError, r"must have integers from -2147483648 to 2147483647.* Received: \[2147483648\]"),
        (([[1]], [[-(2**40)]]), {}, ValueError, r"must have integers from .* Received: \[-1099511627776\]"),
        (np.uint32([[7, 2**32 - 1]]), {}, ValueError, r"must have integers from .* Received: \[4294967295\]"),
        (np.uint64([[7, 2**64 - 1]]), {}, ValueError, r"must have integers from .* Received: \[18446744073709551615\]"),
        (SEQUENCES, {"length": 5}, ValueError, r"not be longer than `length`, .* Received: 7 tokens, length = 5"),
        ([], {}, ValueError, r"at least one sequence, and as many labels and weights. Received: \[0\]"),
        (([[1], [2]], [[1]]), {}, ValueError, r"as many labels and weights. Received: \[2, 1\]"),
        (([[1], [2, 3]], [[1], [4, 5, 6]]), {}, ValueError, r"as its token ids. Received: 3 values for 2 token ids"),
        ([[0.5]], {}, ValueError, r"must have integer token ids. Received: float64"),
        ({"ids": [[1]]}, {}, ValueError, r"with 'token_ids' among .* Received: features \['ids'\] and 0 more"),
        ({"token_ids": [[1]], "positions": [[0]]}, {}, ValueError, r"no 'document_ids' or 'positions'. Received: feat"),
        (([[1]], [[1]], [[1]], [[1]]), {}, ValueError, r"Received: features \['token_ids'\] and 3 more"),
        ([1, 2], {}, TypeError, r"must be a tf.data.Dataset, a list of arrays.* Received: \[1, 2\] \(.*unsized"),
        (["ab", "c"], {}, TypeError, r"Received: \['ab', 'c'\]"),
        (np.zeros([2, 3, 5], int), {}, TypeError, r"Received: .* \(rank 3\)"),
        (7, {}, TypeError, r"Received: 7 \(.*not iterable\)"),
    ],
)
def test_wrong_arguments_are_named(sequences, arguments, error, message):
    with pytest.raises(error, match=message):
        pack_sequences(sequences, **{"length": 8, **arguments})


def test_what_a_dataset_says_beforehand_is_refused_at_once():
    with pytest.raises(ValueError, match=r"must have elements of rank 1, unbatched. Received: .*shape=\(None, None\)"):
        pack_sequences(dataset(SEQUENCES).padded_batch(2), 8)
    with pytest.raises(ValueError, match=r"must have integer token ids. Received: float32"):
        pack_sequences(dataset(SEQUENCES, "float32"), 8)


def test_what_a_dataset_holds_is_refused_when_it_is_read():
    rows = pack_sequences(dataset(SEQUENCES), 5)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)must not be longer than `length`, .*7.*5"):
        list(rows)
    rows = pack_sequences(dataset(SEQUENCES, "int64").map(lambda ids: ids + 2**31 - 20), 8)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)must have integers from -2147483648 to 2147483647"):
        list(rows)
    rows = pack_sequences(dataset(SEQUENCES).map(lambda ids: (ids, tf.concat([ids, ids], 0))), 8)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)must be as long as its token ids. .*6.*3"):
        list(rows)

"""`fill_batches`: every row once and unchanged, then rows of padding of the weight -0.0."""

import re

import numpy as np
import pytest
import tensorflow as tf

from keras_tx.data import bucket_by_length, fill_batches, pack_sequences
from keras_tx.data.padding_rows import fill_arrays

X = {"ids": np.arange(1, 15, dtype="int32").reshape(7, 2), "texts": np.array(list("abcdefg"))}
Y = np.arange(7) + 0.5


def batches(*parts, size=3):
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


@pytest.mark.parametrize("multiple_of", [1, 2, 3, 4, 8])
def test_every_row_comes_once_and_batches_divide(multiple_of):
    filled = list(fill_batches(batches(X, Y), multiple_of).as_numpy_iterator())
    assert [len(y) for _, y, _ in filled] == [-(-n // multiple_of) * multiple_of for n in (3, 3, 1)]
    weights = np.concatenate([w for *_, w in filled])
    real = weights == 1
    assert not weights[~real].any() and np.signbit(weights[~real]).all() and weights.dtype == "float32"
    ids, y = np.concatenate([x["ids"] for x, *_ in filled]), np.concatenate([y for _, y, _ in filled])
    np.testing.assert_array_equal(ids[real], X["ids"])
    np.testing.assert_array_equal(y[real], Y)
    assert not ids[~real].any() and not y[~real].any()
    assert [text.decode() for x, *_ in filled for text in x["texts"] if text] == list("abcdefg")


def test_weights_are_kept_and_padding_has_the_values_that_are_given():
    weights = np.arange(14).reshape(7, 2)
    dataset = fill_batches(batches(X["ids"], Y, weights), 4, padding_values=(9, -100.0, 5.0))
    assert dataset.element_spec[0].shape == (None, 2)
    ids, y, filled = list(dataset.as_numpy_iterator())[-1]
    np.testing.assert_array_equal(ids, [[13, 14], [9, 9], [9, 9], [9, 9]])
    np.testing.assert_array_equal(y, [6.5, -100, -100, -100])
    np.testing.assert_array_equal(filled, [[12, 13], [0, 0], [0, 0], [0, 0]])
    assert np.signbit(filled[1:]).all()


def test_one_padding_value_is_that_of_features_and_labels():
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(6).reshape(3, 2), [0, 1, 1])).batch(2)
    *_, (x, y, _) = fill_batches(dataset, 2, padding_values=-1)
    assert x.numpy().tolist() == [[4, 5], [-1, -1]] and y.numpy().tolist() == [1, -1]
    for values in ([-1, -2], (-1,), {"x": -1}, (-1, -2, 0)):
        received = f"Received: padding_values={re.escape(str(values))}, batches of 2 parts"
        with pytest.raises(ValueError, match=f"`padding_values` must be a number, None, or a tuple .* {received}"):
            fill_batches(dataset, 2, padding_values=values)


def test_no_padding_value_is_0_as_in_padded_batch():
    dataset = batches(X, Y)
    values = {"ids": 7, "texts": None}, 0
    (x, _, _), (expected, *_) = (
        list(fill_batches(dataset, 4, padding_values=given).as_numpy_iterator())[-1]
        for given in (values, ({"ids": 7, "texts": ""}, 0))
    )
    np.testing.assert_array_equal(x["ids"], expected["ids"])
    np.testing.assert_array_equal(x["texts"], expected["texts"])
    x, *_ = list(fill_batches(dataset, 4, padding_values=({"ids": None, "texts": "x"}, 0)).as_numpy_iterator())[-1]
    assert x["ids"][1:].tolist() == [[0, 0]] * 3 and x["texts"][1:].tolist() == [b"x"] * 3


def test_arrays_are_filled_as_datasets_are():
    x, y, weights = fill_arrays(4, X["ids"], {"a": Y}, np.arange(7))
    expected = next(fill_batches(batches(X["ids"], {"a": Y}, np.arange(7), size=7), 4).as_numpy_iterator())
    for one, two in zip((x, y["a"], weights), (expected[0], expected[1]["a"], expected[2]), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(np.signbit(one), np.signbit(two))


def test_weights_of_some_outputs_are_filled_with_ones_for_the_others():
    dataset = batches(X["ids"], (Y, Y), Y, size=7)
    for weights in ((None, Y), (None, None)):
        expected = [np.append(np.ones(7) if one is None else one, -0.0) for one in weights]
        given = dataset.map(
            lambda x, y, w, weights=weights: (x, y, tuple(one if one is None else w for one in weights))
        )
        filled = next(iter(fill_batches(given, 4)))[2], fill_arrays(4, X["ids"], (Y, Y), weights)[2]
        for found in filled:
            for one, two in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, two)
                np.testing.assert_array_equal(np.signbit(one), np.signbit(two))


def test_what_cannot_be_filled_is_refused():
    with pytest.raises(TypeError, match=r"`dataset` must be a tf\.data\.Dataset\. Received: dataset=\[1\]"):
        fill_batches([1], 2)
    with pytest.raises(ValueError, match="`multiple_of` must be a positive integer. Received: multiple_of=0"):
        fill_batches(batches(X, Y), 0)
    for wrong in (tf.data.Dataset.range(3).batch(2), batches(X), batches(X, Y, Y, Y)):
        with pytest.raises(ValueError, match=r"`dataset` must be \(features, labels\) or .* Received: "):
            fill_batches(wrong, 2)
    ragged = tf.data.Dataset.from_tensor_slices((tf.ragged.constant([[1], [2, 3]]), [0, 1])).ragged_batch(2)
    for wrong in (ragged, tf.data.Dataset.from_tensor_slices(([1, 2], [3, 4]))):
        with pytest.raises(TypeError, match=re.escape("must be of dense tensors, one row for each example. Received:")):
            fill_batches(wrong, 2)


def sequences():
    elements = [np.arange(1, n + 1) for n in (3, 1, 5, 2, 2, 4, 1)]
    ragged = tf.ragged.constant([list(one) for one in elements], dtype="int32")
    return elements, tf.data.Dataset.from_tensor_slices(ragged).map(lambda ids: (ids, ids * 2))


def test_buckets_are_filled_with_their_padding_values():
    elements, dataset = sequences()
    options = {"boundaries": (2, 4), "padding_values": (0, -100)}
    filled = list(bucket_by_length(dataset, 3, **options, multiple_of=2).as_numpy_iterator())
    plain = list(bucket_by_length(dataset, 3, **options).as_numpy_iterator())
    assert [len(weights) for *_, weights in filled] == [-(-len(y) // 2) * 2 for _, y in plain]
    for (x, y, weights), (expected, labels) in zip(filled, plain, strict=True):
        np.testing.assert_array_equal(x[weights == 1], expected)
        np.testing.assert_array_equal(y[weights == 1], labels)
        assert (y[weights == 0] == -100).all() and (x[weights == 0] == 0).all()


def test_rows_of_padding_count_in_max_tokens():
    """With 30 tokens, 10, 4, 2 and 1 rows of the buckets would fit; 3 devices share 9, 3, 3 and 3."""
    lengths = [3] * 20 + [7] * 7 + [11] * 4 + [22]
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(1, sum(lengths) + 1), lengths)
    dataset = tf.data.Dataset.from_tensor_slices(ragged).map(lambda ids: (ids, ids[0]))
    options = {"max_tokens": 30, "boundaries": (3, 7, 11), "multiple_of": 3}
    batches = list(bucket_by_length(dataset, **options).as_numpy_iterator())
    assert sorted(ids.shape for ids, *_ in batches) == [
        (3, 3),
        (3, 7),
        (3, 7),
        (3, 7),
        *[(3, 11)] * 2,
        (3, 22),
        *[(9, 3)] * 2,
    ]
    assert sum(np.count_nonzero(weights) for *_, weights in batches) == len(lengths)
    with pytest.raises(ValueError, match="`multiple_of` must be a positive integer or None. Received: multiple_of=0"):
        bucket_by_length(dataset, **{**options, "multiple_of": 0})


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_packed_rows_are_filled_to_whole_batches(in_memory, weighted):
    elements, dataset = sequences()
    weights = [one * 0.5 for one in elements]
    given = (elements, [one * 2 for one in elements], weights)[: 3 if weighted else 2]
    if not in_memory:
        given = dataset.map(lambda x, y: (x, y, tf.cast(x, "float32") * 0.5)) if weighted else dataset
    options = {"padding_id": 7, "label_padding": -1}
    filled = list(pack_sequences(given, 6, **options, multiple_of=5).as_numpy_iterator())
    plain = list(pack_sequences(given, 6, **options).as_numpy_iterator())
    assert len(filled) == 5 > len(plain) == 3
    for row, expected in zip(filled, plain, strict=False):
        for name, values in expected[0].items():
            np.testing.assert_array_equal(row[0][name], values)
        np.testing.assert_array_equal(row[1], expected[1])
        np.testing.assert_array_equal(row[2], expected[2] if weighted else 1)
    features, labels, weight = filled[-1]
    assert (features.pop("token_ids") == 7).all() and (labels == -1).all() and not np.any(weight)
    assert np.signbit(weight).all() and np.shape(weight) == ((6,) if weighted else ())
    assert not any(values.any() for values in features.values())
    with pytest.raises(ValueError, match="`multiple_of` must be a positive integer or None. Received: multiple_of=-1"):
        pack_sequences(given, 6, multiple_of=-1)


@pytest.mark.parametrize("multiple_of", [None, 2])
def test_empty_sequences_alone_give_no_rows(multiple_of):
    rows = pack_sequences(([[], []], [[], []], [[], []]), 4, multiple_of=multiple_of)
    assert len(rows) == 0 and rows.element_spec[0]["token_ids"].shape == (4,) and len(rows.element_spec) == 3
    assert len(pack_sequences([[], []], 4, multiple_of=multiple_of)) == 0

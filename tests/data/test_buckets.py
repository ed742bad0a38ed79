"""`bucket_by_length`: everything in comes out once, padded no further than promised."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_tx.data import bucket_by_length


def elements(lengths, features="dict"):
    """Element i holds `lengths[i]` times the id i + 1, and the label i."""

    def generate():
        for label, length in enumerate(lengths):
            ids = np.full(length, label + 1)
            yield {"dict": ({"token_ids": ids, "segment_ids": ids * 0 + 1}, label), "pair": (ids, label), "bare": ids}[
                features
            ]

    ids, label = tf.TensorSpec([None], "int32"), tf.TensorSpec([], "int32")
    spec = {"dict": ({"token_ids": ids, "segment_ids": ids}, label), "pair": (ids, label), "bare": ids}[features]
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def rows(batches):
    return [tuple(row[row != 0]) for batch in batches for row in batch]


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 45), min_size=1, max_size=25),
    batch_size=st.integers(1, 5),
    pad_to_boundary=st.booleans(),
)
def test_every_element_comes_out_once_with_its_label(lengths, batch_size, pad_to_boundary):
    bucketed = bucket_by_length(elements(lengths), batch_size, boundaries=(3, 7, 11), pad_to_boundary=pad_to_boundary)
    found = []
    for features, labels in bucketed.as_numpy_iterator():
        assert features["token_ids"].shape == features["segment_ids"].shape
        assert len(labels) <= batch_size
        for ids, segments, label in zip(features["token_ids"], features["segment_ids"], labels, strict=True):
            np.testing.assert_array_equal(segments, ids != 0)
            assert set(ids[ids != 0]) <= {label + 1}
            found.append((label, np.count_nonzero(ids)))
    assert sorted(found) == list(enumerate(lengths))


def test_a_batch_is_as_long_as_its_longest_and_keeps_to_one_bucket():
    batches = bucket_by_length(elements([2, 5, 3, 1, 7], "bare"), 2, boundaries=(3, 7)).as_numpy_iterator()
    assert [batch.shape for batch in batches] == [(2, 3), (2, 7), (1, 1)]


def test_padding_to_the_boundary_leaves_as_many_lengths_as_buckets():
    lengths = [*range(1, 30)]
    batches = bucket_by_length(elements(lengths, "pair"), 1, boundaries=(4, 7), pad_to_boundary=True)
    assert {ids.shape[1] for ids, _ in batches} == {4, 7, 14, 28, 56}


def test_a_batch_size_for_each_bucket_and_one_for_longer_elements():
    batches = bucket_by_length(elements([3] * 6 + [7] * 6 + [9] * 6, "bare"), [6, 3, 2], boundaries=(3, 7))
    assert sorted(batch.shape for batch in batches.as_numpy_iterator()) == [(2, 9)] * 3 + [(3, 7)] * 2 + [(6, 3)]


def test_drop_remainder_leaves_out_what_does_not_fill_a_batch():
    batches = bucket_by_length(elements([3, 3, 3, 7], "bare"), 2, boundaries=(3, 7), drop_remainder=True)
    assert rows(batches.as_numpy_iterator()) == [(1, 1, 1), (2, 2, 2)]


def test_padding_values_fill_what_is_missing():
    (ids, label), *_ = bucket_by_length(elements([1, 3], "pair"), 2, padding_values=(5, None)).as_numpy_iterator()
    assert ids.tolist() == [[1, 5, 5], [2, 2, 2]]
    assert label.tolist() == [0, 1]


def test_length_is_asked_of_the_whole_element():
    batches = bucket_by_length(elements([3, 3, 3], "pair"), 2, boundaries=(1,), length=lambda ids, label: label)
    assert sorted(label.tolist() for _, label in batches.as_numpy_iterator()) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"`batch_size` must be a positive integer. Received: batch_size=0"),
        ({"batch_size": [2, -1]}, r"`batch_size` must be a positive integer. Received: batch_size=-1"),
        ({"batch_size": [2, 2, 2]}, r"and one more. Received: batch_size=\[2, 2, 2\], boundaries=\(4,\)"),
        ({"boundaries": (7, 4)}, r"`boundaries` must be increasing .* Received: boundaries=\(7, 4\)"),
        ({"boundaries": ()}, r"`boundaries` must be increasing .* Received: boundaries=\(\)"),
        ({"boundaries": (0, 4)}, r"`boundaries` must be a positive integer. Received: boundaries=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bucket_by_length(elements([1]), **{"batch_size": 2, "boundaries": (4,), **arguments})


def test_an_element_without_token_ids_is_refused_unless_length_is_given():
    data = elements([1, 2]).map(lambda features, label: ({"segment_ids": features["segment_ids"]}, label))
    with pytest.raises(ValueError, match=r"must have 'token_ids', .* Received: features \['segment_ids'\]"):
        bucket_by_length(data, 2)
    lengths = bucket_by_length(data, 2, length=lambda features, label: tf.size(features["segment_ids"]))
    assert [features["segment_ids"].shape for features, _ in lengths] == [(2, 2)]


def test_batched_elements_are_refused():
    with pytest.raises(ValueError, match=r"must be a tensor of rank 1, unbatched. Received: .*shape=\(2, 1\)"):
        bucket_by_length(elements([1, 1], "bare").batch(2, drop_remainder=True).map(lambda x: tf.reshape(x, [2, 1])), 2)

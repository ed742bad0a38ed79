"""`bucket_by_length`: everything in comes out once, padded no further than promised."""

from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_tx.data import bucket_by_length
from keras_tx.models import TextClassifier


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


@cache
def shared(batch_size, pad_to_boundary):
    """A list of lengths, and the batches of what is in it when they are read: one graph for many lists."""
    lengths = []
    options = {"boundaries": (3, 7, 11), "pad_to_boundary": pad_to_boundary}
    return lengths, bucket_by_length(elements(lengths), batch_size, **options)


@settings(max_examples=16)
@given(
    lengths=st.lists(st.integers(0, 45), min_size=1, max_size=25),
    batch_size=st.sampled_from([1, 4]),
    pad_to_boundary=st.booleans(),
)
def test_every_element_comes_out_once_with_its_label(lengths, batch_size, pad_to_boundary):
    contents, bucketed = shared(batch_size, pad_to_boundary)
    contents[:] = lengths
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


@cache
def pairs_within_30_tokens():
    """As `shared`: pairs of lengths, and the batches of sources and targets."""
    lengths = []

    def generate():
        for label, (source, target) in enumerate(lengths):
            yield {"source_ids": np.full(source, label + 1), "target_ids": np.full(target, label + 1)}, label

    ids = tf.TensorSpec([None], "int32")
    spec = {"source_ids": ids, "target_ids": ids}, tf.TensorSpec([], "int32")
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return lengths, bucket_by_length(dataset, max_tokens=30, boundaries=(3, 7, 11))


@settings(max_examples=16)
@given(st.lists(st.tuples(st.integers(0, 45), st.integers(0, 45)), min_size=1, max_size=40))
def test_a_batch_has_at_most_max_tokens_with_its_padding(lengths):
    contents, batches = pairs_within_30_tokens()
    contents[:] = lengths
    found = []
    for features, labels in batches.as_numpy_iterator():
        for ids in features.values():
            assert ids.size <= 30 or len(ids) == 1
        both = (np.count_nonzero(features[name], axis=1) for name in ("source_ids", "target_ids"))
        found += zip(labels.tolist(), *both, strict=True)
    assert sorted(found) == [(label, *pair) for label, pair in enumerate(lengths)]


def test_max_tokens_makes_large_batches_of_what_is_short():
    batches = bucket_by_length(elements([2] * 20 + [6] * 8 + [9] * 3 + [40]), max_tokens=30, boundaries=(3, 7, 11))
    shapes = [features["token_ids"].shape for features, _ in batches.as_numpy_iterator()]
    assert sorted(shapes) == [(1, 9), (1, 40), (2, 9), (4, 6), (4, 6), (10, 2), (10, 2)]


PAIR = {"source_ids": [1, 2], "target_ids": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("features", "longest"),
    [
        (PAIR, 5),
        (tuple(PAIR.values()), 5),
        ({"encoder_token_ids": [1, 2, 3], "decoder_token_ids": [1], "segment_ids": [0] * 9, "mask": [1] * 8}, 3),
        ({"token_ids": [1, 2], "segment_ids": [0, 0]}, 2),
    ],
)
def test_the_longest_of_the_ids_counts_and_no_label(features, longest):
    """A batch has as many elements as its bucket is long."""
    dataset = tf.data.Dataset.from_tensors((features, [1] * 20)).repeat(10)
    batches = bucket_by_length(dataset, range(1, 11), boundaries=range(1, 10), drop_remainder=True)
    assert {len(labels) for _, labels in batches} == {longest}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"`batch_size` must be a positive integer. Received: batch_size=0"),
        ({"batch_size": [2, -1]}, r"`batch_size` must be a positive integer. Received: batch_size=-1"),
        ({"batch_size": [2, 2, 2]}, r"and one more. Received: batch_size=\[2, 2, 2\], boundaries=\(4,\)"),
        (
            {"max_tokens": 9},
            r"Exactly one of `batch_size` and `max_tokens` must be given. Received: batch_size=2, max_tokens=9",
        ),
        (
            {"batch_size": None},
            r"Exactly one of `batch_size` and `max_tokens` must be given. Received: batch_size=None, max_tokens=None",
        ),
        ({"batch_size": None, "max_tokens": 0}, r"`max_tokens` must be a positive integer. Received: max_tokens=0"),
        ({"boundaries": (7, 4)}, r"`boundaries` must be increasing .* Received: boundaries=\(7, 4\)"),
        ({"boundaries": ()}, r"`boundaries` must be increasing .* Received: boundaries=\(\)"),
        ({"boundaries": 16}, r"`boundaries` must be increasing .* Received: boundaries=16"),
        ({"boundaries": (0, 4)}, r"`boundaries` must be a positive integer. Received: boundaries=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bucket_by_length(elements([1]), **{"batch_size": 2, "boundaries": (4,), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": lambda *_: 1.5}, r"`length` must return an integer for each element. Received: 1\.5"),
        ({"length": lambda *_: "3"}, "`length` must return an integer for each element. Received: '3'"),
        ({"length": lambda *_: [2, 3]}, r"`length` must return an integer for each element. Received: \[2, 3\]"),
        ({"drop_remainder": "x"}, "`drop_remainder` must be True or False. Received: drop_remainder='x'"),
        ({"pad_to_boundary": "x"}, "`pad_to_boundary` must be True or False. Received: pad_to_boundary='x'"),
    ],
)
def test_arguments_of_wrong_types_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        bucket_by_length(elements([1]), 2, **arguments)


def test_an_element_without_token_ids_is_refused_unless_length_is_given():
    data = elements([1, 2]).map(lambda features, label: ({"segment_ids": features["segment_ids"]}, label))
    with pytest.raises(ValueError, match=r"must have 'token_ids', .* Received: features \['segment_ids'\]"):
        bucket_by_length(data, 2)
    lengths = bucket_by_length(data, 2, length=lambda features, label: tf.size(features["segment_ids"]))
    assert [features["segment_ids"].shape for features, _ in lengths] == [(2, 2)]


def test_a_label_alone_counts_where_length_says_so():
    """Source and target as features and label: the label is a translation, and may be the longer one."""
    data = elements([5, 5], "pair").map(lambda ids, label: (ids, tf.concat([ids, ids], 0)))
    both = bucket_by_length(data, max_tokens=12, boundaries=(5, 10), length=lambda *sides: tf.size(sides[1]))
    assert [len(target) for _, target in both] == [1, 1]
    assert [len(target) for _, target in bucket_by_length(data, max_tokens=12, boundaries=(5, 10))] == [2]


def test_numpy_numbers_are_numbers():
    data = elements([2, 5, 3, 1, 7], "bare")
    expected = rows(bucket_by_length(data, 2, boundaries=(3, 7), padding_values=0).as_numpy_iterator())
    one = bucket_by_length(data, np.int64(2), boundaries=np.array([3, 7]), padding_values=np.int64(0))
    assert rows(one.as_numpy_iterator()) == expected
    sizes = bucket_by_length(data, np.array([2, 2, 2]), boundaries=(np.int32(3), 7))
    assert rows(sizes.as_numpy_iterator()) == expected
    batches = bucket_by_length(data, max_tokens=np.int32(9), boundaries=(3, 9))
    assert sorted(batch.shape for batch in batches.as_numpy_iterator()) == [(1, 5), (1, 7), (3, 3)]


def test_what_is_no_dataset_is_refused():
    with pytest.raises(TypeError, match=r"`dataset` must be a tf.data.Dataset. Received: dataset=\[1\]"):
        bucket_by_length([1], 2)


def test_batched_elements_are_refused():
    with pytest.raises(ValueError, match=r"must be a tensor of rank 1, unbatched. Received: .*shape=\(2, 1\)"):
        bucket_by_length(elements([1, 1], "bare").batch(2, drop_remainder=True).map(lambda x: tf.reshape(x, [2, 1])), 2)


def test_fit_says_nothing_of_batches_whose_number_is_unknown(capfd):
    """Neither that it does not shuffle them, nor that they ran out; every warning is an error here."""
    model = TextClassifier(23, num_classes=2, num_layers=1, hidden_dim=4, num_heads=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    data = elements([2, 5, 3]).map(lambda features, label: ({"token_ids": features["token_ids"]}, label % 2))
    batches = bucket_by_length(data, 2, boundaries=(3, 7))
    history = model.fit(batches, validation_data=batches, epochs=2)
    model.evaluate(batches, verbose=0)
    assert model.predict(batches, verbose=0).shape == (3, 2) and len(history.history["val_loss"]) == 2
    out, err = capfd.readouterr()
    ends = [line.rpartition("\r")[2] for line in out.strip().split("\n") if not line.startswith("Epoch")]
    assert len(ends) == 2 and all("2/2" in end for end in ends) and not err  # each epoch ends with a full bar
    with pytest.warns(UserWarning, match="`shuffle=True` was passed"):
        model.fit(batches, shuffle=True, verbose=0)


def test_lengths_may_be_of_any_integer_dtype_and_must_come_from_a_function():
    data = elements([1, 3, 2])
    shapes = lambda batches: [tf.nest.flatten(batch)[0].shape for batch in batches]
    expected = shapes(bucket_by_length(data, 2, boundaries=(2, 4)))
    found = bucket_by_length(data, 2, boundaries=(2, 4), length=lambda *x: tf.size(tf.nest.flatten(x)[0], "int64"))
    assert shapes(found) == expected
    with pytest.raises(TypeError, match="`length` must be a function of an element, or None. Received: length=3"):
        bucket_by_length(data, 2, length=3)

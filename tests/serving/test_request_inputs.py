"""What clients send is checked in the graph, and nothing invalid reaches the model."""

import numpy as np
import pytest

from keras_tx.serving.request_inputs import checked_ids, checked_segments, texts_of_examples
from keras_tx.serving.warmup import serialized
from tests.tools import to_numpy

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def checked():
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int32)])
    def checked(token_ids, lengths):
        return checked_ids(token_ids, lengths, 13, padding_id=11, max_length=5, name="source_ids", lengths_name="sizes")

    return lambda ids, lengths: to_numpy(checked(tf.constant(ids, tf.int32), tf.constant(lengths, tf.int32)))


def test_padding_is_put_behind_the_lengths_whatever_was_there(checked):
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 13, (7, 5))
    lengths = generator.integers(0, 6, 7)
    expected = [
        [id if t < length else 11 for t, id in enumerate(row)] for row, length in zip(ids, lengths, strict=True)
    ]
    assert checked(ids, lengths).tolist() == expected


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (4, 0)])
def test_empty_shapes_stay_as_they_are(checked, shape):
    assert checked(np.zeros(shape), np.zeros(shape[0])).shape == shape


@pytest.mark.parametrize(
    "ids, lengths, message",
    [
        ([[1, 13]], [2], r"source_ids must be in \[0, 13\). Received:.*13"),
        ([[1, -1]], [2], r"source_ids must be in \[0, 13\). Received:.*-1"),
        ([[1, 2, 3, 4, 2**31 - 1]], [5], r"source_ids must be in \[0, 13\). Received:.*2147483647"),
        ([[1, 2]], [3], "sizes must be between 0 and the width of source_ids. Received:.*3"),
        ([[1, 2]], [-1], "sizes must be between 0 and the width of source_ids. Received:.*-1"),
        ([[1, 2], [3, 4]], [2], "sizes must be one for each row of source_ids. Received:.*2"),
        ([[1, 2, 3, 4, 5, 6]], [6], "sizes must be at most 5, the positions of the model. Received:.*6"),
    ],
)
def test_invalid_ids_and_lengths_are_refused_by_the_name_of_the_input(checked, ids, lengths, message):
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        checked(ids, lengths)


def test_without_assertions_ids_are_still_within_the_vocabulary(monkeypatch):
    """A server may strip them from its graphs."""
    import tensorflow as tf

    monkeypatch.setattr(tf.debugging, "Assert", lambda *args: tf.no_op())
    given = [[-(2**31), -1, 0, 12, 13, 2**31 - 1]]
    assert to_numpy(checked_ids(tf.constant(given), tf.constant([6]), 13, 0)).tolist() == [[0, 0, 0, 12, 12, 12]]


def test_of_an_unknown_vocabulary_only_negative_ids_are_refused():
    import tensorflow as tf

    assert to_numpy(checked_ids(tf.constant([[10**9, 3]]), tf.constant([1]), None, 0)).tolist() == [[10**9, 0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"token_ids must not be negative. Received:'\s-7"):
        checked_ids(tf.constant([[-7]]), tf.constant([1]), None, 0)


def test_segments_after_the_lengths_are_zero_whatever_was_there(monkeypatch):
    import tensorflow as tf

    ids, lengths = tf.zeros([2, 3], tf.int32), tf.constant([3, 1])
    segments = tf.constant([[0, 1, 4], [2, 9, 9]])
    assert to_numpy(checked_segments(segments, ids, lengths, None)).tolist() == [[0, 1, 4], [2, 0, 0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"segment_ids must not be negative. Received:'\s-5"):
        checked_segments(-segments[:, ::-1] - 1, ids, lengths, None)
    monkeypatch.setattr(tf.debugging, "Assert", lambda *args: tf.no_op())  # a server may strip them
    assert to_numpy(checked_segments(segments - 1, ids, lengths, 3)).tolist() == [[0, 0, 2], [1, 0, 0]]


def test_examples_bring_their_texts():
    import tensorflow as tf

    texts = ["", "a text", "\x00 é 🎬", b"\xff", "x" * 100_000]
    texts_of = tf.function(lambda examples: texts_of_examples(examples)[0])
    expected = [text if isinstance(text, bytes) else text.encode() for text in texts]
    assert texts_of(tf.constant([serialized(text) for text in texts])).numpy().tolist() == expected
    assert texts_of(tf.constant([], tf.string)).shape == (0,)
    both = texts_of_examples(tf.constant([serialized("first", b"second")]), text_pairs=True)
    assert [one.numpy().tolist() for one in both] == [[b"first"], [b"second"]]


@pytest.mark.parametrize("serialized", [b"no example", b""])
def test_what_is_no_example_with_a_text_is_refused(serialized):
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError, match="Could not parse example|Feature: text .* is required"):
        texts_of_examples(tf.constant([serialized]))

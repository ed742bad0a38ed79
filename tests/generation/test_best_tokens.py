"""The best tokens of each row, found in parts of the row, are those of `keras.ops.top_k`."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_tx
from keras_tx.generation import state
from keras_tx.generation.state import best_tokens
from tests.tools import to_numpy

INFINITY = float("inf")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(2, 4096), (3, 6151), (2, 7919), (4, 16384)]),
    st.integers(1, 300),
    st.integers(1, 3),
    st.sampled_from([1.0, 0.0, 0.999]),
    st.integers(0, 2**16),
)
def test_they_are_those_of_top_k_and_the_first_of_equal_ones(shape, levels, rows, share_removed, seed):
    size, random = shape[1], np.random.default_rng(seed)
    scores = random.integers(0, levels, (rows, size)).astype("float32")  # many are equal
    scores[random.random((rows, size)) < share_removed] = -INFINITY
    actual = [to_numpy(x) for x in best_tokens(keras.ops.convert_to_tensor(scores), shape[0])]
    order = np.argsort(-scores, axis=1, kind="stable")[:, : shape[0]]
    np.testing.assert_array_equal(actual[0], np.take_along_axis(scores, order, axis=1))
    if keras.backend.backend() == "torch":  # whose `top_k` returns equal ones in any order
        assert [len({*row}) for row in actual[1]] == [shape[0]] * rows
        np.testing.assert_array_equal(np.take_along_axis(scores, actual[1], axis=1), actual[0])
        return
    np.testing.assert_array_equal(actual[1], order)


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_no_place_is_outside_of_the_row(jit_compile):
    import tensorflow as tf

    random = np.random.default_rng(7)
    scores = np.full((16, 8209), -INFINITY, "float32")
    scores[1], scores[2, ::2], scores[3, -5:], scores[4, :5] = np.nan, np.nan, np.nan, np.nan
    scores[5:][random.random((11, 8209)) < random.random((11, 1)) ** 4] = np.nan
    places = tf.function(best_tokens, jit_compile=jit_compile)(tf.constant(scores), 4)[1].numpy()
    assert places.min() >= 0 and places.max() < 8209


@pytest.mark.tensorflow
def test_a_graph_for_any_number_of_rows_does_the_same():
    import tensorflow as tf

    scores = np.random.default_rng(7).normal(size=(5, 6151)).astype("float32")
    for jit_compile in (False, True):
        found = tf.function(
            lambda x: best_tokens(x, 3), input_signature=[tf.TensorSpec((None, 6151))], jit_compile=jit_compile
        )
        for rows in (5, 0, 1):
            expected = tf.math.top_k(scores[:rows], 3)
            for actual, other in zip(found(scores[:rows]), expected, strict=True):
                np.testing.assert_array_equal(actual.numpy(), other.numpy())


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_beams_over_a_large_vocabulary_are_the_same(jit_compile, monkeypatch):
    def answers():
        keras.utils.set_random_seed(5)
        sizes = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "intermediate_dim": 16}
        model = keras_tx.models.CausalLM(8209, **sizes)
        prompts = np.array([[5, 7, 8208], [31, 2, 77]])
        options = {"max_new_tokens": 5, "stop_tokens": 3, "return_scores": True, "jit_compile": jit_compile}
        return [to_numpy(x) for x in model.generate(prompts, keras_tx.generation.Beam(2), **options)]

    in_parts = answers()
    monkeypatch.setattr(state, "_PART", 8209)  # so that the whole row is searched
    for actual, expected in zip(in_parts, answers(), strict=True):
        np.testing.assert_array_equal(actual, expected)

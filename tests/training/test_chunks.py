"""The loss in chunks and its gradients against those of the whole logits."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_tx.training import tokens
from keras_tx.training.chunks import chunked_loss
from tests.tools import assert_close, gradients, hessian_products, normal, to_numpy


def whole(hidden, table, labels, weights, smoothing):
    logits = ops.matmul(hidden, ops.transpose(table))
    arrays = [ops.convert_to_tensor(x[None]) for x in (labels, weights)]
    return ops.sum(
        tokens.token_losses(arrays[0], logits[None], arrays[1], label_smoothing=smoothing, from_logits=True) * arrays[1]
    )


@given(
    st.integers(1, 23), st.integers(2, 13), st.integers(1, 7), st.integers(1, 29), st.floats(0, 0.4), st.integers(0, 99)
)
def test_chunks_give_the_loss_and_the_gradients_of_whole_logits(count, size, width, chunk, smoothing, seed):
    rng = np.random.default_rng(seed)
    hidden, table = normal(count, width, seed=seed), normal(size, width, seed=seed + 1)
    labels = rng.integers(0, size, count).astype("int32")
    weights = (rng.random(count) * (rng.random(count) < 0.7)).astype("float32")

    def in_chunks(hidden, table):
        both = ops.convert_to_tensor(labels), ops.convert_to_tensor(weights)
        return chunked_loss(hidden, table, *both, chunk_size=chunk, label_smoothing=smoothing)

    found = gradients(in_chunks, [hidden, table])
    expected = gradients(lambda *x: whole(*x, labels, weights, smoothing), [hidden, table])
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_second_derivatives_are_those_of_whole_logits():
    tensors = normal(13, 5), normal(11, 5, seed=1)
    labels, weights = np.arange(13, dtype="int32") * 5 % 11, np.linspace(0.0, 1.0, 13).astype("float32")
    both = ops.convert_to_tensor(labels), ops.convert_to_tensor(weights)
    in_chunks = lambda *x: chunked_loss(*x, *both, chunk_size=4, label_smoothing=0.2)
    found = hessian_products(in_chunks, tensors)
    expected = hessian_products(lambda *x: whole(*x, labels, weights, 0.2), tensors)
    for got, wanted in zip(found, expected, strict=True):
        assert_close(got, wanted, atol=2e-5 * np.abs(wanted).max())


def test_hidden_vectors_at_tokens_of_weight_0_do_not_matter():
    hidden, table = normal(5, 3), normal(7, 3, seed=1)
    labels, weights = np.array([1, 2, 99, 3, 4], "int32"), np.array([1, 1, 0, 1, 1], "float32")
    found = []
    for value in (0.0, np.nan):
        hidden[2] = value
        call = lambda *x: chunked_loss(*x, labels, weights, chunk_size=2)
        found.append(gradients(call, [hidden, table]))
    for clean, dirty in zip(*found, strict=True):
        np.testing.assert_array_equal(clean, dirty)
    assert np.isfinite(found[1][0])


def test_a_label_outside_the_vocabulary_is_nan():
    for label in (7, -1):
        labels = np.array([1, label], "int32")
        loss = chunked_loss(normal(2, 3), normal(7, 3), labels, np.ones(2, "float32"), chunk_size=2)
        assert np.isnan(to_numpy(loss))


def test_half_precision_has_gradients_of_its_own_dtype():
    hidden, table = (ops.cast(x, "bfloat16") for x in (normal(11, 5), normal(7, 5, seed=1)))
    labels, weights = np.arange(11, dtype="int32") % 7, np.ones(11, "float32")
    exact = chunked_loss(*[ops.cast(x, "float32") for x in (hidden, table)], labels, weights, chunk_size=4)
    loss = chunked_loss(hidden, table, labels, weights, chunk_size=4)
    assert keras.backend.standardize_dtype(loss.dtype) == "float32"
    assert_close(loss, exact, rtol=2e-2)


@pytest.mark.tensorflow
def test_the_number_of_tokens_may_be_unknown():
    import tensorflow as tf

    specs = [tf.TensorSpec((None, 3)), tf.TensorSpec((7, 3)), tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None,))]
    graph = tf.function(lambda *x: chunked_loss(*x, chunk_size=4), input_signature=specs)
    arrays = normal(11, 3), normal(7, 3, seed=1), np.arange(11, dtype="int32") % 7, np.ones(11, "float32")
    assert_close(graph(*arrays), chunked_loss(*arrays, chunk_size=3), rtol=1e-5)

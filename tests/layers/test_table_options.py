"""Tables narrower than the model, and tables of positions with rows before the first."""

import keras
import numpy as np
import pytest

from keras_tx.internals.keras_models import get_keras_mask
from keras_tx.layers import LearnedPositionalEncoding, TokenEmbedding
from tests.tools import assert_close, normal, randomize, to_numpy

V, D, E = 23, 10, 7
IDS = np.array([[3, 4, 5, 6, 0], [7, 1, 22, 2, 9]], "int32")


def narrow(**arguments):
    layer = TokenEmbedding(V, D, embedding_dim=E, **arguments)
    layer(IDS)
    return randomize(layer)


def test_a_narrow_embedding_is_a_projection_of_one_of_that_width():
    options = {"scale": True, "position_encoding": "learned", "max_length": 5, "num_segments": 2}
    options |= {"normalization": "layer_norm"}
    layer = narrow(**options)
    inner = TokenEmbedding(V, E, **options)
    inner(IDS)
    kernel, bias = (to_numpy(w).astype("float64") for w in (layer.projection.kernel, layer.projection.bias))
    inner.set_weights([w for w in layer.get_weights() if w.shape not in (kernel.shape, bias.shape)])
    segments = np.array([[0, 0, 1, 1, 0], [1, 1, 1, 0, 1]])
    expected = to_numpy(inner(IDS, segment_ids=segments)) @ kernel + bias
    output = layer(IDS, segment_ids=segments)
    assert_close(output, expected, atol=5e-6)
    assert_close(get_keras_mask(output), IDS != 0)
    table = to_numpy(layer.tokens.embeddings)
    assert table.shape == (V, E)
    assert_close(layer(normal(2, 5, E), reverse=True), normal(2, 5, E) @ table.T, atol=3e-6)


def test_dropout_comes_before_the_projection():
    layer = narrow(dropout=0.9)
    layer.projection.kernel.assign(np.eye(E, D))
    layer.projection.bias.assign(np.ones(D))
    values = to_numpy(layer(IDS, training=True))
    assert (values == 1).mean() > 0.5 and not (values == 0).any()


@pytest.mark.parametrize("make", [lambda: narrow(), lambda: TokenEmbedding(V, D + 1)])
def test_vectors_that_are_not_as_wide_as_the_table_have_no_logits(make):
    for x in (normal(2, 5, D), keras.Input((5, D))):
        with pytest.raises(ValueError, match=r"a last axis of size (7|11), .*Received: inputs.shape=\(.*, 10\)"):
            layer = make()
            layer(IDS)
            layer(x, reverse=True)


def test_a_width_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="`embedding_dim` must be a positive integer or None. .* embedding_dim=0"):
        TokenEmbedding(V, D, embedding_dim=0)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8"])
def test_positions_count_from_the_offset(dtype):
    layer = LearnedPositionalEncoding(250 if dtype == "uint8" else 5, offset=11, embeddings_initializer="normal")
    x = normal(2, 5, 8)
    layer(x)
    table = to_numpy(layer.embeddings)
    assert table.shape == (layer.max_length + 11, 8)
    assert_close(layer(x), x + table[11:16])
    assert_close(layer(x, mask=np.array([[False, False, True, True, True]] * 2)), x + table[[11, 11, 11, 12, 13]])
    positions = np.array([layer.max_length - 1, 3, 2, 1, 0], dtype)  # 249 + 11 is no uint8
    assert_close(layer(x, positions=positions), x + table[positions.astype(int) + 11])


def test_positions_before_the_offset_or_behind_the_table_are_refused():
    layer, x = LearnedPositionalEncoding(4, offset=2), normal(2, 3, 8)
    with pytest.raises(ValueError, match=r"`positions` must be in \[0, 4\). Received: 4 in positions of shape \(3,\)"):
        layer(x, positions=np.array([0, 1, 4]))
    with pytest.raises(ValueError, match=r"`positions` must be in \[0, 4\). Received: -1"):
        layer(x, positions=np.array([0, 1, -1]))
    with pytest.raises(ValueError, match=r"longer than `max_length`. Received: inputs.shape=\(2, 5, 8\), max_length=4"):
        layer(normal(2, 5, 8))
    with pytest.raises(ValueError, match="`offset` must be an integer of at least 0. Received: offset=-1"):
        LearnedPositionalEncoding(4, offset=-1)


@pytest.mark.tensorflow
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_graph_refuses_positions_that_only_an_offset_brings_into_the_table(wrong):
    import tensorflow as tf

    layer = LearnedPositionalEncoding(4, offset=2)
    layer(normal(2, 3, 8))
    graph = tf.function(lambda x, positions: layer(x, positions=positions))
    graph(normal(2, 3, 8), tf.constant([0, 1, 3]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"= 6 is not in \[0, 6\)"):
        graph(normal(2, 3, 8), tf.constant([0, 1, wrong]))

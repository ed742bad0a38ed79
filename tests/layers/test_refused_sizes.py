"""Sizes and options that do not fit together raise an error instead of pairing the wrong rows or losing tokens."""

import keras
import numpy as np
import pytest

from keras_tx.layers import AlibiBias, Encoder, MultiHeadAttention, TokenEmbedding
from keras_tx.models import CausalLM
from tests.tools import normal, to_numpy


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize(("query", "value"), [((2, 2, 3, 4, 6), (2, 3, 2, 4, 6)), ((2, 3, 1, 4, 6), (2, 1, 3, 4, 6))])
def test_free_axes_must_have_equal_sizes(query, value, blockwise):
    attention = MultiHeadAttention(2, 3, attention_axes=(3,), blockwise=blockwise)
    with pytest.raises(ValueError, match="the same size along the axes that are not attended over. Received: sizes"):
        attention(normal(*query), normal(*value))
    assert attention(normal(*query), normal(*query[:3], 5, 6)).shape == query


def in_graph_of_unknown_sizes(encoder):
    import tensorflow as tf

    signature = [tf.TensorSpec([None, None, 8]), tf.TensorSpec([None, None], tf.bool)]
    return tf.function(lambda x, mask: encoder(x, mask=mask), input_signature=signature)


@pytest.mark.tensorflow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="padding is skipped on TensorFlow")
def test_a_mask_of_another_size_raises_an_error_where_padding_is_skipped():
    import tensorflow as tf

    encoder, x = Encoder(1, 16, 2, skip_padding=True), normal(4, 3, 8)
    call = in_graph_of_unknown_sizes(encoder)
    for shape in ((4, 2), (4, 5), (3, 3), (1, 3), (4, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="`mask` must have the shape .B, T. of `inputs`"):
            call(x, np.ones(shape, bool))
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0]], bool)
    np.testing.assert_allclose(to_numpy(call(x, mask))[mask], to_numpy(encoder(x, mask=mask))[mask], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Encoder(1, 16, 2, position_bias=keras.layers.Dense(3)),
            "`position_bias` must be one of .*, an `AlibiBias` or a `RelativePositionBias`. .* a layer of type Dense",
        ),
        (
            lambda: Encoder(1, 16, 2, position_bias=AlibiBias(4)),
            "`position_bias` must have as many heads .* Received: position_bias.num_heads=4, num_heads=2",
        ),
        (
            lambda: TokenEmbedding(10, 4, position_encoding=keras.layers.Dense(4)),
            "`position_encoding` must be one of .*, or a layer whose `call` takes .* Received: a layer of type Dense",
        ),
        (lambda: MultiHeadAttention(2, 3, seed=1.5), "`seed` must be an integer or None. Received: seed=1.5"),
        (lambda: MultiHeadAttention(2, 3, seed=True), "`seed` must be an integer or None. Received: seed=True"),
        (lambda: Encoder(1, 16, 2, attention_options={"seed": "a"}), "`seed` must be an integer or None"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make().build((2, 3, 8))


def test_a_packed_model_shows_the_attention_of_one_document_given_by_its_name():
    sizes = dict(num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
    model, ids = CausalLM(11, packed=True, **sizes), np.array([[3, 4, 5]])
    scores = [to_numpy(model.attention_scores(inputs)) for inputs in (ids, {"token_ids": ids})]
    np.testing.assert_array_equal(*scores)

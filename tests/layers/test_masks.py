"""Masks by hand sums, and the promise that padding changes nothing, for every layer and every way to write a model."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_tx import layers
from keras_tx.internals.keras_models import get_keras_mask
from keras_tx.layers import masks
from keras_tx.layers.mask_search import mask_of
from keras_tx.models.pooling import TokenPooling
from tests.tools import assert_close, randomize, to_numpy

D = 12


def test_join_allows_what_all_masks_allow():
    assert masks.join(None, None) is None
    joined = masks.join(np.array([True, True, False]), None, np.array([[True], [False]]))
    assert to_numpy(joined).astype(int).tolist() == [[1, 1, 0], [0, 0, 0]]


def test_positions_count_real_tokens():
    real = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]], "bool")
    counted = to_numpy(masks.count_positions(real))
    assert [row[keep].tolist() for row, keep in zip(counted, real, strict=True)] == [[0, 1], [0, 1], [0, 1], []]
    assert counted.min() == 0


def embedding():
    return keras.layers.Embedding(31, D, mask_zero=True)


# From embedded ids to what is compared. Each must give at real tokens what it gives without padding.
WAYS = {
    "token embedding, sinusoidal": lambda ids, x: layers.TokenEmbedding(31, D, position_encoding="sinusoidal")(ids),
    "token embedding, learned": lambda ids, x: layers.TokenEmbedding(
        31, D, position_encoding="learned", max_length=17, scale=True, num_segments=2, normalization="rms_norm"
    )(ids),
    "sinusoidal": lambda ids, x: layers.SinusoidalPositionalEncoding()(x),
    "learned": lambda ids, x: layers.LearnedPositionalEncoding(17)(x),
    "attention": lambda ids, x: layers.MultiHeadAttention(3, 4)(x, x),
    "attention, grouped": lambda ids, x: layers.MultiHeadAttention(
        4, 3, num_key_value_heads=2, qk_norm=True, use_gate=True
    )(x, x),
    "attention, windowed": lambda ids, x: layers.Encoder(2, 17, 3, attention_options={"sliding_window": 3})(x),
    "keys behind an operator": lambda ids, x: layers.MultiHeadAttention(3, 4)(
        x, keras.ops.stop_gradient(keras.ops.convert_to_tensor(x) * 1.0), x * 2.0
    ),
    "no mask given, in its place": lambda ids, x: layers.EncoderLayer(17, 3)(x * 2.0, None),
    "Keras' RMS norm": lambda ids, x: layers.EncoderLayer(17, 3)(keras.layers.RMSNormalization()(x * 2.0)),
    "feed-forward": lambda ids, x: layers.FeedForward(17, gated=True)(x),
    "encoder layer": lambda ids, x: layers.EncoderLayer(17, 3)(x),
    "encoder layer, pre-norm": lambda ids, x: layers.EncoderLayer(17, 3, normalize_first=True)(x),
    "encoder": lambda ids, x: layers.Encoder(2, 17, 3, normalize_first=True)(x),
    "embedding * scale": lambda ids, x: layers.EncoderLayer(17, 3)(x * D**0.5),
    "scale * embedding + position(embedding)": lambda ids, x: layers.EncoderLayer(17, 3)(
        2.0 * x + layers.SinusoidalPositionalEncoding()(x)
    ),
    "position(embedding * scale)": lambda ids, x: layers.Encoder(1, 17, 3)(
        layers.SinusoidalPositionalEncoding()(x * D**0.5)
    ),
    "Add()": lambda ids, x: layers.EncoderLayer(17, 3)(
        keras.layers.Add()([x * 2.0, layers.LearnedPositionalEncoding(17)(x)])
    ),
    "operators before attention": lambda ids, x: layers.MultiHeadAttention(3, 4)(x * 2.0, keras.ops.tanh(x - 1.0)),
    "operators between layers": lambda ids, x: layers.EncoderLayer(17, 3)(
        0.5 * keras.layers.Dropout(0.1)(x + layers.MultiHeadAttention(3, 4)(x * 2.0, x))
    ),
    "Keras layers between": lambda ids, x: layers.EncoderLayer(17, 3)(
        keras.layers.LayerNormalization()(keras.layers.Dense(D)(x / 3.0))
    ),
}
POOLINGS = {
    f"pooling {pooling}": lambda ids, x, pooling=pooling: TokenPooling(pooling)(layers.EncoderLayer(17, 3)(x * 2.0))
    for pooling in ("first", "mean", "max")
}
MODELS = {}


def model(way):
    if way not in MODELS:
        ids = keras.Input((None,), dtype="int32")
        outputs = {**WAYS, **POOLINGS}[way](ids, embedding()(ids))
        MODELS[way] = randomize(keras.Model(ids, outputs), scale=0.1)
    return MODELS[way]


sentences = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=3)


@functools.cache
def every_way():
    """A function from ids to the outputs of all models; on TensorFlow one graph for all lengths."""
    models = {way: model(way) for way in (*WAYS, *POOLINGS)}  # made outside of the graph
    function = lambda ids: {way: one(ids) for way, one in models.items()}
    if keras.backend.backend() != "tensorflow":
        return function
    import tensorflow as tf

    return tf.function(function, input_signature=[tf.TensorSpec((None, None), "int32")])


@settings(max_examples=20 if keras.backend.backend() == "tensorflow" else 2)
@given(sentences, st.integers(0, 3), st.booleans())
def test_padding_left_or_right_changes_nothing(sentences, extra, left):
    length = max(map(len, sentences)) + extra
    pads = [[0] * (length - len(ids)) for ids in sentences]
    batch = [pad + ids if left else ids + pad for ids, pad in zip(sentences, pads, strict=True)]
    outputs = every_way()(np.array(batch, "int32"))
    alone = [every_way()(np.array([ids], "int32")) for ids in sentences]
    for way in outputs:
        for row, expected, ids, pad in zip(to_numpy(outputs[way]), alone, sentences, pads, strict=True):
            real = row if way in POOLINGS else row[len(pad) :] if left else row[: len(ids)]
            expected = to_numpy(expected[way])[0]
            np.testing.assert_allclose(real, expected, atol=2e-6 * max(1.0, np.abs(expected).max()), err_msg=way)
            assert np.isfinite(row).all(), way


@pytest.mark.parametrize("way", ["embedding * scale", "operators between layers", "Add()"])
def test_masks_found_behind_operators_are_saved_with_the_model(way, tmp_path):
    model(way).save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    ids = np.array([[3, 4, 5, 0, 0], [7, 8, 9, 1, 2]])
    assert_close(again(ids), model(way)(ids), atol=0)
    assert_close(again(ids)[0, :3], again(ids[:1, :3])[0], atol=3e-6)


def test_a_mask_may_be_a_list():
    x = np.random.default_rng(0).normal(size=(1, 3, D)).astype("float32")
    layer = layers.EncoderLayer(17, 3)
    assert_close(layer(x, mask=[[True, True, False]])[:, :2], layer(x[:, :2]), atol=2e-6)


@pytest.mark.parametrize("length", [2, 3, 4, 5, None])
def test_masks_of_two_sources_are_joined(length):
    for _ in range(20):  # each mask is tried out with other patterns
        one, two = keras.Input((length,), dtype="int32"), keras.Input((length,), dtype="int32")
        x = embedding()(one) + embedding()(two)
        found = keras.Model([one, two], mask_of(x))
        ids = np.array([[1, 2, 0, 0, 3], [0, 1, 1, 1, 0]]), np.array([[1, 0, 2, 0, 3], [1, 0, 1, 0, 1]])
        expected = (ids[0] != 0) & (ids[1] != 0)
        np.testing.assert_array_equal(to_numpy(found([x[:, :length] for x in ids])), expected[:, :length])


def test_a_mask_given_by_hand_is_handed_on():
    x = keras.ops.convert_to_tensor(np.ones((2, 3, D), "float32"))
    mask = np.array([[True, True, False], [True, False, False]])
    assert_close(get_keras_mask(layers.EncoderLayer(17, 3)(x, mask=mask)), mask)


def test_a_row_of_padding_alone_is_finite_and_its_attention_zero():
    x = keras.Input((None,), dtype="int32")
    outputs, scores = layers.Encoder(2, 17, 3)(embedding()(x), return_attention_scores=True)
    outputs, scores = keras.Model(x, [outputs, scores])(np.array([[0, 0, 0], [1, 2, 0]]))
    assert np.isfinite(to_numpy(outputs)).all()
    assert not to_numpy(scores)[0].any() and to_numpy(scores)[1].any()


@pytest.mark.parametrize("mask", [np.ones((2, 4), "bool"), np.ones((2, 3, 1), "bool")])
def test_a_padding_mask_of_the_wrong_shape_is_refused(mask):
    x = np.ones((2, 3, D), "float32")
    for layer in (layers.EncoderLayer(17, 3), layers.SinusoidalPositionalEncoding(), TokenPooling()):
        with pytest.raises(ValueError, match=r"mask` must have the shape \(2, 3.*Received: .*mask.shape=\(2, "):
            layer(x, mask=mask)


@pytest.mark.tensorflow
def test_a_mask_of_an_unknown_length_is_handed_on_beside_a_known_one():
    import tensorflow as tf

    values, mask = keras.Input((24, D), name="values"), keras.Input((None,), dtype="bool", name="mask")
    x = layers.Encoder(1, 17, 3)(values, mask=mask)
    model = keras.Model([values, mask], keras.layers.GlobalAveragePooling1D()(x))
    given = np.random.default_rng(0).normal(size=(2, 24, D)).astype("float32"), np.arange(24) < np.array([[24], [5]])
    spec = [tf.TensorSpec((None, 24, D)), tf.TensorSpec((None, None), "bool")]
    traced = tf.function(lambda *inputs: model(list(inputs)), input_signature=spec)
    assert_close(traced(*map(tf.constant, given)), model(list(given)), atol=2e-6)

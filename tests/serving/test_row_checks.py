"""Before an export a user's model is tried: it answers a row by itself, whatever its padding and the other rows."""

import keras
import numpy as np
import pytest

from keras_tx.layers import Encoder, TokenEmbedding
from keras_tx.serving import export
from keras_tx.serving.row_checks import check_rows
from keras_tx.serving.text_encoder import TextEncoder
from tests.tools import randomize, to_numpy

pytestmark = pytest.mark.tensorflow


def token_ids(length=None):
    return keras.Input((length,), dtype="int32", name="token_ids")


def test_a_model_that_sees_padding_is_refused_with_a_way_out(tokenizer, tmp_path):
    ids = token_ids()
    x = keras.layers.Embedding(80, 3)(ids)
    seeing = keras.Model(ids, {"mean": keras.layers.GlobalAveragePooling1D()(x)})
    rule = (
        "`model` must ignore padding, the id 0.*fixed length. Received: output 'mean' that differs by .* padded to 16"
    )
    with pytest.raises(ValueError, match=rule):
        export(seeing, tmp_path, tokenizer=tokenizer)
    check_rows(TextEncoder(keras.Model(ids, x)), 0, [1, 2, 3], 5)  # vectors of the real tokens do not change
    assert not list(tmp_path.iterdir())


def test_padding_is_tried_with_a_mask_and_in_encoders():
    mask, ids = keras.Input((None,), dtype="int32", name="padding_mask"), token_ids()
    x = keras.layers.Embedding(80, 6)(ids)
    x = keras.layers.MultiHeadAttention(2, 3)(x, x, attention_mask=keras.ops.cast(mask, "bool")[:, None, :])
    check_rows(TextEncoder(randomize(keras.Model([mask, ids], x))), 4, [1, 2, 3], 5)
    x = Encoder(1, 3, 2)(TokenEmbedding(17, 4, padding_id=5)(ids))
    encoder = TextEncoder(randomize(keras.Model(ids, x)))
    check_rows(encoder, 5, [1, 2, 3], 7)
    with pytest.raises(ValueError, match="the id 6, or rows"):
        check_rows(encoder, 6, [1, 2, 3], 7)


def test_a_model_that_cannot_take_the_longest_row_is_refused(tokenizer, tmp_path):
    """It has fewer positions than the tokenizer's rows have tokens, which nothing tells but trying."""
    ids = token_ids()
    positions = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) - 1
    x = keras.layers.Embedding(80, 3, mask_zero=True)(ids) + keras.layers.Embedding(9, 3)(positions)
    with pytest.raises(
        ValueError, match="`model` must take rows as long as `tokenizer` makes them.*Received: ids of shape .1, 1[06].,"
    ):
        export(keras.Model(ids, x), tmp_path, tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())


class Centred(keras.layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class ByBatchStatistics(keras.layers.BatchNormalization):
    def call(self, x):
        return super().call(x, training=True)


def model_with(layer, length=None, dtype="float32"):
    """A classifier, with a layer before its head."""
    ids = token_ids(length)
    x = keras.layers.Embedding(13, 3, mask_zero=True, dtype=dtype)(ids)
    x = layer(keras.layers.GlobalAveragePooling1D(dtype=dtype)(x))
    return randomize(keras.Model(ids, keras.layers.Dense(2, name="head", dtype=dtype)(x)), seed=2)


@pytest.mark.parametrize("length", [None, 7])
@pytest.mark.parametrize("row", [[3, 5], [11, 1, 4], list(range(1, 13))])
def test_a_model_whose_rows_see_each_other_is_refused(row, length):
    rule = "must answer each row by itself, without the other rows.* Received: output 'head' that differs by .* alone"
    for layer in (Centred(), ByBatchStatistics()):
        with pytest.raises(ValueError, match=rule):
            check_rows(TextEncoder(model_with(layer, length)), 0, row, 9)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "float16"])
@pytest.mark.parametrize("length", [None, 7])
def test_norms_and_dropout_of_an_inference_see_no_other_rows(length, dtype):
    layers = [keras.layers.LayerNormalization(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = model_with(keras.Sequential(layers), length, dtype)
    check_rows(TextEncoder(model), 0, [3, 5], 9)
    rows = np.array([[3, 5, 0, 0, 0, 0, 0], [7, 1, 2, 0, 0, 0, 0]], "int32")
    tolerance = 1e-6 if dtype == "float32" else 0.02
    np.testing.assert_allclose(to_numpy(model(rows))[:1], to_numpy(model(rows[:1])), atol=tolerance)


def test_a_model_whose_rows_see_each_other_is_not_exported(tokenizer, tmp_path):
    ids = token_ids(16)
    x = Centred()(keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(80, 3)(ids)))
    with pytest.raises(ValueError, match="must answer each row by itself"):
        export(keras.Model(ids, keras.layers.Softmax()(x)), tmp_path, tokenizer=tokenizer, labels=["a", "b", "c"])
    assert not list(tmp_path.iterdir())


def test_a_model_that_takes_one_row_alone_is_refused():
    ids = token_ids()
    with pytest.raises(ValueError, match=r"and any number of them; .* Received: ids of shape \(2, 3\), on which"):
        check_rows(TextEncoder(keras.Model(ids, OfOneRow()(keras.ops.cast(ids, "float32")))), -1, [3, 5, 1], 3)


class OfOneRow(keras.layers.Layer):
    def call(self, x):
        return keras.ops.reshape(x, (1, 3))

    def compute_output_shape(self, shape):
        return shape

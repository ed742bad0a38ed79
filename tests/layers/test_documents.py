"""`document_ids`: they are integers, and 0 in them is padding, wherever it is."""

import keras
import numpy as np
import pytest

from keras_tx.layers import Decoder, DecoderLayer, Encoder, EncoderLayer, MultiHeadAttention
from tests.tools import assert_close, normal, randomize, to_numpy

D = 6
LAYERS = {
    "attention": lambda **options: MultiHeadAttention(3, 2, **options),
    "encoder layer": lambda **options: EncoderLayer(7, 3, attention_options=options),
    "encoder": lambda **options: Encoder(1, 7, 3, attention_options=options),
    "decoder layer": lambda **options: DecoderLayer(7, 3, attention_options=options),
    "decoder": lambda **options: Decoder(1, 7, 3, attention_options=options),
}


def called(layer, x, **options):
    return layer(x, x, **options) if isinstance(layer, MultiHeadAttention) else layer(x, **options)


@pytest.fixture(params=LAYERS)
def make(request):
    return LAYERS[request.param]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.float32([[1.0, 1.5, 2.0]]), "integers or whole numbers. Received: 1.5 in document_ids of shape"),
        (np.float32([[1.0, 1.0, np.nan]]), "integers or whole numbers. Received: nan in document_ids of shape"),
        (np.float16([[1.0, 2.0, 2.0]]), "integers; .* Received: document_ids of dtype float16"),
        (np.array([[True, True, False]]), "integers; .* Received: document_ids of dtype bool"),
        (np.array([["a", "b", "b"]]), "integers; .* Received: document_ids of dtype <U1"),
    ],
)
def test_document_ids_must_be_whole_numbers(make, ids, message):
    with pytest.raises(ValueError, match=f"`document_ids` must be {message}"):
        called(make(), normal(1, 3, D), document_ids=ids)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_an_input_of_the_default_dtype_may_have_document_ids(policy):
    x, ids = keras.Input((5, D)), keras.Input((5,))
    layer = Encoder(1, 7, 3, dtype=policy)
    model = keras.Model([x, ids], layer(x, document_ids=ids))
    vectors, documents = normal(1, 5, D), np.array([[256, 256, 257, 257, 0]])
    expected = layer(vectors, document_ids=documents)
    assert_close(model([vectors, documents.astype("float32")]), expected, atol=0)
    model.compile()
    assert_close(model.predict([vectors, documents.astype("float32")], verbose=0), expected, atol=0.02)


def test_large_documents_stay_apart_in_half_precision():
    layer, x = Encoder(1, 7, 3, dtype="mixed_bfloat16"), normal(1, 5, D)
    ids = [[256, 256, 257, 257, 257]]
    whole = layer(x, document_ids=ids)
    assert_close(whole[:, :2], layer(x[:, :2]), atol=0.05)
    assert_close(whole[:, 2:], layer(x[:, 2:]), atol=0.05)


def rotating(make):
    layer = make(rotary=True)
    called(layer, normal(1, 4, D))
    return randomize(layer, scale=1.0)


@pytest.mark.parametrize("mask", [None, [[True, False, True, True, True, False, True]]])
def test_padding_within_a_document_has_no_position(make, mask):
    """With random positions the rotation of a query and a key would change by the padding between them."""
    layer, x = rotating(make), normal(1, 7, D)
    ids = np.array([[2, 2, 0, 2, 5, 0, 5]])
    real = ids[0] != 0
    options = {"document_ids": ids}
    if mask is not None:
        real = real & np.array(mask[0])
        names = ("query_mask", "value_mask") if isinstance(layer, MultiHeadAttention) else ("mask",)
        options.update(dict.fromkeys(names, np.array(mask)))
    found = to_numpy(called(layer, x, **options))[:, real]
    assert_close(found, called(layer, x[:, real], document_ids=ids[:, real]), atol=2e-6)


@pytest.mark.parametrize("skip_padding", [False, True])
def test_an_encoder_counts_the_same_positions_if_it_skips_padding(skip_padding):
    layer, x = rotating(lambda **options: Encoder(1, 7, 3, attention_options=options)), normal(1, 5, D)
    layer.skip_padding = skip_padding
    found = to_numpy(layer(x, document_ids=np.array([[3, 0, 3, 0, 3]])))
    assert_close(found[:, ::2], layer(x[:, ::2]), atol=2e-6)


@pytest.mark.parametrize("rotary", [False, True])
def test_documents_are_for_self_attention(rotary):
    layer, ids = MultiHeadAttention(3, 2, rotary=rotary), np.ones((2, 5), "int32")
    with pytest.raises(ValueError, match="`document_ids` is for self-attention: .* Received: 5 queries, 7 keys"):
        layer(normal(2, 5, D), normal(2, 7, D), document_ids=ids)


def test_documents_of_other_lengths_are_refused_before_positions_are_counted():
    with pytest.raises(ValueError, match=r"`document_ids` must have the shape \(2, 5\)\. Received: .*\(2, 3\)"):
        MultiHeadAttention(3, 2, rotary=True)(normal(2, 5, D), normal(2, 5, D), document_ids=np.ones((2, 3), "int32"))

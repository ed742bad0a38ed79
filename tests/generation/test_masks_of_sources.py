"""Keras' masks of sources reach every decode step, and what other inputs would give to the target is refused."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.generation import Beam, Greedy, generate
from keras_tx.layers import DecoderLayer, EncoderLayer, MultiHeadAttention, TokenEmbedding
from tests.tools import randomize, to_numpy

V, D, F, N = 17, 12, 19, 3
SOURCES = [[3, 4, 5], [9, 10, 11, 2, 7], [6, 8]]


class Look(keras.layers.Layer):
    """Attention of a user's own. Keras gives it the mask of `memory` as `memory_mask`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.query, self.key = keras.layers.Dense(D), keras.layers.Dense(D)

    def build(self, x_shape, memory_shape):
        self.query.build(x_shape)
        self.key.build(memory_shape)

    def call(self, x, memory, memory_mask=None):
        scores = ops.einsum("btd,bsd->bts", self.query(x), self.key(memory))
        if memory_mask is not None:
            scores = ops.where(memory_mask[:, None], scores, -1e9)
        return x + ops.matmul(ops.softmax(scores, axis=-1), memory)

    def compute_output_shape(self, x_shape, memory_shape):
        return x_shape


def cross_attention_inside(x, memory):
    h, m = keras.Input((None, D)), keras.Input((None, D))
    layer = DecoderLayer(F, N, cross_attention=True, attention_options={"rotary": True})
    return keras.Model([h, m], layer(h, m))([x, memory])


def attention_to_values_inside(x, memory):
    h, m = keras.Input((None, D)), keras.Input((None, D))
    return keras.Model([h, m], h + MultiHeadAttention(N, 5)(h, m))([x, memory])


def attention_to_keys_inside(x, memory):
    h, m = keras.Input((None, D)), keras.Input((None, D))
    return keras.Model([h, m], h + MultiHeadAttention(N, 5)(h, m, m * 2.0))([x, memory])


def own_layer(x, memory):
    return Look()(x, memory)


def own_layer_twice(x, memory):
    look = Look()
    return look(DecoderLayer(F, N, cross_attention=True)(look(x, memory), memory), memory)


def model_with(attention):
    keras.utils.set_random_seed(5)
    source, target = (keras.Input((None,), dtype="int32", name=name) for name in ("source", "target"))
    memory = EncoderLayer(F, N)(TokenEmbedding(V, D, position_encoding="sinusoidal", padding_id=0)(source))
    x = DecoderLayer(F, N)(TokenEmbedding(V, D, padding_id=None)(target))
    model = keras.Model([source, target], keras.layers.Dense(V)(attention(x, memory)))
    randomize(model)
    return model


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("strategy", [Greedy(), Beam(2)])
@pytest.mark.parametrize(
    "attention",
    [cross_attention_inside, attention_to_values_inside, attention_to_keys_inside, own_layer, own_layer_twice],
)
def test_steps_see_the_masks_of_sources(attention, strategy, jit_compile):
    if keras.backend.backend() == "torch" and jit_compile:
        pytest.skip("PyTorch has no XLA")
    model = model_with(attention)
    options = {"start_token": 1, "max_new_tokens": 4, "jit_compile": jit_compile, "return_scores": True}
    rows, scores = generate(model, SOURCES, strategy, **options)
    for source, row, score in zip(SOURCES, rows, to_numpy(scores), strict=True):
        logits = model([np.array([source]), np.array([[1, *row[:-1]]])])
        logarithms = to_numpy(ops.log_softmax(ops.cast(logits, "float32")))[0]
        expected = sum(logarithms[place, token] for place, token in enumerate(row))
        assert score == pytest.approx(expected / (len(row) if isinstance(strategy, Beam) else 1), abs=1e-4)


def decoder_with(**options):
    return lambda x, other: DecoderLayer(F, N, attention_options={"rotary": True})(
        x, **{name: make(other) for name, make in options.items()}
    )


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (decoder_with(positions=lambda other: other), "positions"),
        (decoder_with(document_ids=lambda other: other), "document_ids"),
        (decoder_with(mask=lambda other: ops.cast(other, "bool")), "mask"),
        (decoder_with(mask=lambda other: ops.not_equal(other, 0)), "mask"),
        (
            lambda x, other: MultiHeadAttention(N, 5)(x, x, use_causal_mask=True, value_mask=ops.cast(other, "bool")),
            "value_mask",
        ),
    ],
)
def test_places_of_the_target_that_another_input_gives_are_refused(layer, name):
    ids, other = (keras.Input((None,), dtype="int32", name=name) for name in ("ids", "other"))
    model = keras.Model([ids, other], keras.layers.Dense(V)(layer(TokenEmbedding(V, D, padding_id=None)(ids), other)))
    with pytest.raises(ValueError, match=f"The `{name}` of layer '.*' must not come from another input"):
        generate(model, {"ids": [[3, 4]], "other": [[0, 1]]}, target="ids", max_new_tokens=1)


def test_positions_of_an_embedding_that_another_input_gives_are_refused():
    ids, other = (keras.Input((None,), dtype="int32", name=name) for name in ("ids", "other"))
    x = TokenEmbedding(V, D, position_encoding="learned", max_length=40)(ids, positions=other)
    model = keras.Model([ids, other], keras.layers.Dense(V)(DecoderLayer(F, N)(x)))
    with pytest.raises(ValueError, match="The `positions` of layer '.*' must not come from another input"):
        generate(model, {"ids": [[3, 4]], "other": [[0, 1]]}, target="ids", max_new_tokens=1)


def test_attention_scores_that_a_model_uses_are_refused():
    ids = keras.Input((None,), dtype="int32")
    x = TokenEmbedding(V, D)(ids)
    y, scores = MultiHeadAttention(N, 5, name="looks")(x, x, use_causal_mask=True, return_attention_scores=True)
    y = y + ops.max(ops.max(scores, axis=-1), axis=1)[..., None]
    with pytest.raises(ValueError, match="must not use the attention scores or hidden states of layer 'looks'"):
        generate(keras.Model(ids, keras.layers.Dense(V)(y)), [[3, 4]], max_new_tokens=1)

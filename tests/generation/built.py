"""Models as users put them together, and the tokens that a Python loop over the whole model generates."""

import keras
import numpy as np

from keras_tx.layers import (
    AlibiBias,
    Decoder,
    DecoderLayer,
    Encoder,
    FeedForward,
    MultiHeadAttention,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
)
from keras_tx.models import CausalLM, Seq2Seq
from tests.tools import randomize, to_numpy

V, SOURCE_V, N, D, F = 29, 37, 3, 12, 17
SIZES = {"num_layers": 1, "hidden_dim": D, "num_heads": N, "intermediate_dim": F}
LENGTH = 24  # of the padded rows that `naive` gives to the model


def ids_of(name="ids"):
    return keras.Input((None,), dtype="int32", name=name)


def attention_and_operators():
    ids = ids_of()
    x = keras.layers.Embedding(V, D)(ids) * 3.0
    x = SinusoidalPositionalEncoding()(x)
    x = x + MultiHeadAttention(N, 5)(x, x, use_causal_mask=True)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, MultiHeadAttention(2, 7, num_key_value_heads=1)(x, x, x, use_causal_mask=True)])
    return keras.Model(ids, keras.layers.Dense(V)(keras.ops.tanh(x)))


def biases_and_a_skip():
    ids = ids_of()
    embedding = TokenEmbedding(V, D, position_encoding="learned", max_length=LENGTH)
    x = embedding(ids)
    bias = AlibiBias(N)(x, x)
    y = MultiHeadAttention(N, 4, rotary=True)(x, x, x, use_causal_mask=True, attention_bias=bias)
    x = FeedForward(F)(keras.layers.RMSNormalization()(x + y))
    beside = TokenEmbedding(V, D, position_encoding="sinusoidal")(ids)  # joins after the last attention
    return keras.Model(ids, embedding(x + beside, reverse=True))


def nested():
    vectors = keras.Input((None, D))
    twice = DecoderLayer(F, N, attention_options={"rotary": True, "sliding_window": 4})
    inner = keras.Model(vectors, twice(twice(vectors)))
    ids = ids_of()
    head = keras.Sequential([keras.layers.Dense(F, activation="gelu"), keras.layers.Dense(V)])
    return keras.Model(ids, head(inner(TokenEmbedding(V, D, padding_id=None)(ids))))


def sequential():
    return keras.Sequential(
        [
            ids_of(),
            TokenEmbedding(V, D, position_encoding="sinusoidal"),
            Decoder(2, F, N, position_bias="relative", normalize_first=True),
            keras.layers.Dense(V),
        ]
    )


def encoder_and_decoder():
    source, target = ids_of("source"), ids_of("target")
    memory = Encoder(1, F, N)(TokenEmbedding(SOURCE_V, D, position_encoding="sinusoidal")(source))
    x = TokenEmbedding(V, D, position_encoding="learned", max_length=LENGTH)(target)
    x = keras.layers.Add()([x, MultiHeadAttention(N, 5)(x, x, use_causal_mask=True)])
    x = keras.layers.LayerNormalization()(x)
    x = x + MultiHeadAttention(N, 4, qk_norm=True)(x, memory)
    x = DecoderLayer(F, N, cross_attention=True)(x, memory)
    return keras.Model([source, target], keras.layers.Dense(V)(x))


def padded_output(rows=V):
    """A model with 7 logits more than its embedding has rows, and large ones."""
    ids = ids_of()
    x = DecoderLayer(F, N, attention_options={"rotary": True})(keras.layers.Embedding(rows, D)(ids))
    model = randomize(keras.Model(ids, keras.layers.Dense(V + 7)(x)), scale=0.4)
    model.layers[-1].bias.assign(np.where(np.arange(V + 7) < V, 0.0, 1.5))
    return model


def language_model(**options):
    return CausalLM(V, **{**SIZES, **options})


def translator(**options):
    return Seq2Seq(SOURCE_V, V, **{**SIZES, **options})


MODELS = {
    "attention_and_operators": attention_and_operators,
    "biases_and_a_skip": biases_and_a_skip,
    "nested": nested,
    "sequential": sequential,
    "encoder_and_decoder": encoder_and_decoder,
    "causal_lm": language_model,
    "untied": lambda: language_model(tie_embeddings=False, embedding_options={"normalization": "layer_norm"}),
    "learned": lambda: language_model(embedding_options={"position_encoding": "learned", "max_length": LENGTH}),
    "packed": lambda: language_model(packed=True)._generation_model(),
    "seq2seq": translator,
    "shared": lambda: Seq2Seq(V, **SIZES, num_decoder_layers=2),
}


def made(name):
    return randomize(MODELS[name](), scale=0.4)


def logits_of(model, rows, sources=None):
    """The logits (B, LENGTH, V) of rows of any lengths, by the whole model on rows padded on the right."""
    ids = np.zeros((len(rows), LENGTH), "int32")
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    inputs = ids if sources is None else [np.asarray(sources), ids]
    if keras.backend.backend() == "jax":  # which compiles each operation by itself if the model is called
        return np.array(model.predict_on_batch(inputs))
    return to_numpy(model(inputs, training=False))


def naive(model, rows, new, *, sources=None, stop=(), never=(0,)):
    """Rows with `new` greedy tokens, or up to one of `stop`: the whole model runs for each token."""
    rows, running = [list(row) for row in rows], set(range(len(rows)))
    for _ in range(new):
        logits = logits_of(model, rows, sources)
        for i in sorted(running):
            scores = logits[i, len(rows[i]) - 1]
            scores[list(never)] = -np.inf
            rows[i].append(int(scores.argmax()))
            if rows[i][-1] in stop:
                running.remove(i)
    return rows

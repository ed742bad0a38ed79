"""`MaskedLM`: its head by hand, its sizes, what a token sees."""

import math

import keras
import numpy as np
import pytest

from keras_tx.layers import activations
from keras_tx.models import MaskedLM
from tests.tools import assert_close, randomize, to_numpy

V, L, D, N, F = 31, 2, 12, 3, 17
IDS = np.array([[3, 5, 7, 0, 0], [9, 1, 22, 2, 9]], "int32")


def made(**options):
    arguments = {"num_layers": L, "hidden_dim": D, "num_heads": N, "intermediate_dim": F}
    return randomize(MaskedLM(V, **{**arguments, **options}), scale=0.2)


def test_logits_are_those_of_the_head_of_bert():
    model = made()
    weights = {w.path: to_numpy(w).astype("float64") for w in model.weights}
    part = lambda name: next(value for path, value in weights.items() if path.endswith(name))
    x = to_numpy(model.encoder(model.embedding(IDS))).astype("float64")
    x = x @ part("head_dense/kernel") + part("head_dense/bias")
    x = x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * part("head_norm/gamma") + part("head_norm/beta")
    assert_close(model(IDS), x @ part("tokens/embeddings").T + part("head_bias/bias"), atol=2e-5)


def test_it_has_one_table():
    layer = 4 * (D * D + D) + 2 * D * F + D + F + 2 * 2 * D
    head = D * D + D + 2 * D + V
    assert made().count_params() == V * D + 2 * D + L * layer + head
    segments = made(embedding_options={"num_segments": 3, "normalization": None})
    assert segments.count_params() == (V + 3) * D + L * layer + head
    assert MaskedLM(V, hidden_dim=D, num_heads=N).intermediate_dim == 4 * D


def test_a_token_sees_those_before_and_behind_it():
    model, other = made(), IDS.copy()
    other[1, 2] = 8
    assert np.abs(to_numpy(model(other)) - to_numpy(model(IDS)))[1].max(-1).min() > 1e-3


def test_attention_scores_are_those_that_the_model_computes_with():
    model = made(embedding_options={"num_segments": 2})
    inputs = {"segment_ids": IDS % 2, "token_ids": IDS}
    scores = to_numpy(model.attention_scores(inputs))
    assert scores.shape == (2, L, N, 5, 5) and not scores[0, ..., 3:].any()
    assert_close(scores[1].sum(-1), np.ones((L, N, 5)))
    _, expected = model.encoder(model.embedding(IDS, IDS % 2), return_attention_scores=True)
    assert_close(scores, expected, atol=0)


@pytest.mark.parametrize("name, function", [("tanh", keras.activations.tanh), ("gelu_tanh", activations.gelu_tanh)])
def test_the_activation_is_that_of_feed_forward_and_head(name, function):
    model = made(activation=name)
    assert model.encoder.layers[0].feed_forward.activation is function
    assert next(layer for layer in model.layers if layer.name == "head_dense").activation is function
    again = type(model).from_config(model.get_config())
    again.set_weights(model.get_weights())
    assert_close(again(IDS), model(IDS), atol=0)

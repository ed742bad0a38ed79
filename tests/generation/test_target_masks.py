"""Masks of the target: `generate` takes those that hide padding alone, in whatever way a model computes them."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.generation import generate, target_masks
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.layers import Decoder, MultiHeadAttention, TokenEmbedding
from tests.generation.built import D, F, N, ids_of
from tests.tools import assert_close, randomize, to_numpy

V, PROMPT, SOURCE = 113, [3, 5, 103, 7], [4, 2, 9]

pytestmark = pytest.mark.usefixtures("eager")


def decoded(ids, mask):
    return Decoder(1, F, N)(TokenEmbedding(V, D)(ids), mask=mask(ids))


def attended(ids, **masks):
    x = TokenEmbedding(V, D, padding_id=None)(ids)
    return MultiHeadAttention(N, 5)(x, x, use_causal_mask=True, **{name: mask(ids) for name, mask in masks.items()})


def model_of(make, **sources):
    ids = ids_of()
    return randomize(keras.Model({**sources, "ids": ids}, keras.layers.Dense(V)(make(ids))), scale=0.4)


@pytest.mark.parametrize(
    ("make", "name", "hidden", "padding_id"),
    [
        (lambda ids: decoded(ids, lambda ids: ids != 3), "mask", 3, 0),
        (lambda ids: decoded(ids, lambda ids: ops.not_equal(ids, np.int64(5))), "mask", 5, 0),
        (lambda ids: decoded(ids, lambda ids: ops.not_equal(ids, np.array(5))), "mask", 5, 0),
        (lambda ids: decoded(ids, lambda ids: ops.logical_and(ids != 0, ids != 103)), "mask", 103, 0),
        (lambda ids: decoded(ids, lambda ids: ops.cast(ids < 111, "float32")), "mask", 111, 0),
        (lambda ids: attended(ids, query_mask=lambda ids: ids != 103), "query_mask", 103, None),
        (lambda ids: attended(ids, value_mask=lambda ids: ids != 0), "value_mask", 0, None),
        (lambda ids: attended(ids, key_mask=lambda ids: ops.logical_not(ids >= 110)), "key_mask", 110, None),
    ],
)
def test_a_mask_of_other_ids_than_the_padding_is_refused(monkeypatch, make, name, hidden, padding_id):
    monkeypatch.setattr(target_masks, "_IDS_AT_ONCE", 47)
    message = f"The `{name}` of layer .* Received: a mask that hides the id {hidden}, padding_id={padding_id}"
    with pytest.raises(ValueError, match=message):
        IncrementalModel(model_of(make))


def check_score(model, **inputs):
    """Compares the score of a generated token with the logarithm of its probability in the whole model."""
    options = {"max_new_tokens": 1, "return_scores": True, "target": "ids", "jit_compile": False}
    rows, scores = generate(model, {name: [row] for name, row in inputs.items()}, **options)
    logits = to_numpy(model({name: np.array([row]) for name, row in inputs.items()}))[0, -1].astype("float64")
    assert_close(to_numpy(scores)[0], logits[rows[0][-1]] - np.log(np.exp(logits).sum()), atol=1e-5)


@pytest.mark.parametrize(
    "mask",
    [
        lambda ids: ops.not_equal(ids, np.int64(0)),
        lambda ids: ids > 0,
        lambda ids: ops.cast(ids, "bool"),
        lambda ids: ops.logical_and(ids != 0, ids < V),
        lambda ids: ids != -100,
        lambda ids: ops.any(TokenEmbedding(V, D)(ids) < 1e3, axis=-1),
    ],
)
def test_a_mask_of_padding_or_of_no_ids_is_taken(mask):
    IncrementalModel(model_of(lambda ids: decoded(ids, mask)))  # which compares steps with the whole model by itself


def test_a_mask_of_the_queries_of_cross_attention_may_hide_any_id():
    source = ids_of("source")

    def make(ids):
        x = Decoder(1, F, N)(TokenEmbedding(V, D)(ids))
        return x + MultiHeadAttention(N, 5)(
            x, TokenEmbedding(V, D)(source), query_mask=ops.logical_and(ids > 0, ids != 7)
        )

    check_score(model_of(make, source=source), source=SOURCE, ids=PROMPT)


def test_a_mask_that_depends_on_more_than_each_id_is_compared_at_some_tokens():
    """That of `Add` comes from the label, too; the other one from the outputs of attention."""
    label = keras.Input((1,), dtype="int32", name="label")

    def make(ids):
        x = keras.layers.Add()([TokenEmbedding(V, D)(ids), TokenEmbedding(5, D)(label)])
        x = Decoder(1, F, N)(x)
        return Decoder(1, F, N)(x, mask=ops.any(x < 1e3, axis=-1))

    check_score(model_of(make, label=label), label=[2], ids=PROMPT)

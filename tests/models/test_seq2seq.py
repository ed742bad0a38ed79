"""`Seq2Seq`: what it shares, what a token sees, and its scores."""

import keras
import numpy as np
import pytest

from keras_tx.layers import LearnedPositionalEncoding
from keras_tx.models import Seq2Seq
from tests.tools import assert_close, randomize, to_numpy

V, TARGET_V, L, D, N, F = 31, 23, 2, 12, 3, 17
SOURCE = np.array([[3, 5, 7, 0, 0], [9, 1, 22, 2, 9]], "int32")
TARGET = np.array([[1, 4, 6, 8], [1, 2, 0, 0]], "int32")


def made(*sizes, **options):
    arguments = {"num_layers": L, "hidden_dim": D, "num_heads": N, "intermediate_dim": F}
    return randomize(Seq2Seq(*sizes, **{**arguments, **options}), scale=0.2)


def test_vocabularies_and_logits_share_a_table_or_do_not():
    attention, feed_forward, norm = 4 * (D * D + D), 2 * D * F + D + F, 2 * D
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    layers = L * (encoder + decoder)
    assert made(V).count_params() == V * D + layers
    assert made(V, tie_embeddings=False).count_params() == 2 * V * D + layers
    assert made(V, TARGET_V).count_params() == (V + TARGET_V) * D + layers
    assert made(V, TARGET_V, tie_embeddings=False).count_params() == (V + 2 * TARGET_V) * D + layers
    assert made(V, num_decoder_layers=3).count_params() == V * D + layers + decoder
    shared = made(V)
    assert shared.embedding is shared.target_embedding
    assert Seq2Seq(V, hidden_dim=D, num_heads=N).intermediate_dim == 4 * D


def test_two_vocabularies_have_a_table_each_of_a_layer_of_positions(tmp_path):
    position_encoding = LearnedPositionalEncoding(11, dtype="float32")
    model = made(V, TARGET_V, embedding_options={"position_encoding": position_encoding})
    named = made(V, TARGET_V, embedding_options={"position_encoding": "learned", "max_length": 11})
    assert model.count_params() == named.count_params()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(again([SOURCE, TARGET]), model([SOURCE, TARGET]), atol=0)
    shared = made(V, embedding_options={"position_encoding": LearnedPositionalEncoding(11)})
    assert shared.embedding is shared.target_embedding


def test_logits_are_over_the_target_vocabulary_and_depend_on_the_source_and_earlier_target_tokens():
    model = made(V, TARGET_V)
    logits = to_numpy(model([SOURCE, TARGET]))
    assert logits.shape == (2, 4, TARGET_V)
    later, source = TARGET.copy(), SOURCE.copy()
    later[0, 2:] = 9
    source[0, 1] = 8
    assert_close(model([SOURCE, later])[0, :2], logits[0, :2], atol=0)
    assert np.abs(to_numpy(model([source, TARGET])) - logits)[0].min(-1).max() > 1e-4
    longer = np.pad(SOURCE, ((0, 0), (0, 3)))
    assert_close(model({"source_ids": longer, "target_ids": TARGET}), logits, atol=5e-6)


def test_an_encoder_that_skips_padding_changes_no_logit_and_no_generated_token(request):
    plain, skipping = made(V), made(V, encoder_options={"skip_padding": True})
    skipping.set_weights(plain.get_weights())
    assert_close(skipping([SOURCE, TARGET]), plain([SOURCE, TARGET]), atol=5e-6)
    asked = {"max_new_tokens": 6, "start_token": 1}
    found = skipping.generate(SOURCE, **asked)
    request.getfixturevalue("eager")
    np.testing.assert_array_equal(found, plain.generate(SOURCE, **asked))


def test_attention_scores_are_those_that_the_model_computes_with():
    model = made(V, TARGET_V, num_decoder_layers=3)
    scores = {name: to_numpy(x) for name, x in model.attention_scores([SOURCE, TARGET]).items()}
    assert {name: x.shape for name, x in scores.items()} == {
        "encoder": (2, L, N, 5, 5),
        "decoder": (2, 3, N, 4, 4),
        "cross": (2, 3, N, 4, 5),
    }
    assert not scores["encoder"][0, ..., 3:].any() and not scores["cross"][0, ..., 3:].any()
    assert not scores["decoder"][..., ~np.tril(np.ones((4, 4), bool))].any()
    assert_close(scores["cross"][0].sum(-1), np.ones((3, N, 4)))
    by_name = model.attention_scores({"target_ids": TARGET, "source_ids": SOURCE})
    assert_close(by_name["cross"], scores["cross"], atol=0)
    memory = model.encoder(model.embedding(SOURCE))
    _, _, cross = model.decoder(model.target_embedding(TARGET), memory, return_attention_scores=True)
    assert_close(cross, scores["cross"], atol=0)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((V, 0), {}, "`target_vocabulary_size` must be a positive integer or None. Received: target_vocabulary_size=0"),
        ((0,), {}, "`source_vocabulary_size` must be a positive integer. Received: source_vocabulary_size=0"),
        ((V,), {"num_decoder_layers": 0}, "`num_decoder_layers` must be .* Received: num_decoder_layers=0"),
        (
            (V,),
            {"decoder_options": {"cross_attention": False}},
            "`decoder_options` must be a dict .*'cross_attention': False",
        ),
        ((V,), {"encoder_options": {"num_layers": 1}}, "`encoder_options` must be a dict .*'num_layers': 1"),
    ],
)
def test_a_constructor_refuses_what_cannot_work(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        made(*sizes, **options)

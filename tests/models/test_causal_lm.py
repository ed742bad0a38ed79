"""`CausalLM`: what it has in it, what a token sees, and packed rows."""

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM
from keras_tx.training import PaddedCrossentropy
from tests.tools import assert_close, randomize, to_numpy

V, L, D, N, F = 31, 2, 12, 3, 17
POSITIONS = {
    "sinusoidal": {},
    "learned": {"embedding_options": {"position_encoding": "learned", "max_length": 11}},
    "rotary": {
        "embedding_options": {"position_encoding": None},
        "decoder_options": {"attention_options": {"rotary": True}},
    },
    "alibi": {"embedding_options": {"position_encoding": None}, "decoder_options": {"position_bias": "alibi"}},
}
FIRST, SECOND = [3, 5, 7], [9, 1, 22, 2]
APART = np.array([FIRST + [0], SECOND], "int32")
PACKED = {
    "token_ids": np.array([FIRST + SECOND + [0, 0]], "int32"),
    "document_ids": np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0]], "int32"),
    "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 0, 0]], "int32"),
}


def made(**options):
    sizes = {"num_layers": L, "hidden_dim": D, "num_heads": N, "intermediate_dim": F}
    return randomize(CausalLM(V, **{**sizes, **options}), scale=0.2)


def pair(**options):
    """A model for packed rows, and one for rows of one document, with the same weights."""
    packed, plain = made(packed=True, **options), made(**options)
    plain.set_weights(packed.get_weights())
    return packed, plain


def test_it_has_a_table_and_the_layers_and_no_other_table_unless_untied():
    layer = 4 * (D * D + D) + 2 * D * F + D + F + 2 * 2 * D
    assert made().count_params() == V * D + L * layer + 2 * D
    assert made(tie_embeddings=False).count_params() == 2 * V * D + L * layer + 2 * D
    assert made(decoder_options={"normalize_first": False}).count_params() == V * D + L * layer
    assert CausalLM(V, hidden_dim=D, num_heads=N).intermediate_dim == 4 * D


@pytest.mark.parametrize("options", [{}, {"embedding_options": {"embedding_dim": 7}, "tie_embeddings": False}], ids=str)
def test_token_embeddings_begin_as_vectors_of_length_1(options):
    model = CausalLM(997, num_layers=1, hidden_dim=D, num_heads=N, **options)
    table = to_numpy(model.embedding.table())
    lengths = np.linalg.norm(table, axis=1)
    np.testing.assert_allclose(np.sqrt(np.mean(lengths**2)), 1.0, rtol=0.05)


@pytest.mark.slow
def test_what_learned_positions_tell_is_learned_in_a_few_steps():
    """Each token is that of three places before. With positions much smaller than tokens the loss stays above 1."""
    ids = np.random.default_rng(1).integers(1, 13, (32 * 100, 10))
    for i in range(3, 10):
        ids[:, i] = ids[:, i - 3]
    positions = {"position_encoding": "learned", "max_length": 11}
    model = CausalLM(13, num_layers=1, hidden_dim=64, num_heads=2, dropout=0.0, embedding_options=positions)
    model.compile(keras.optimizers.Adam(2e-3), PaddedCrossentropy())
    model.fit(ids[:, :-1], ids[:, 1:], batch_size=32, verbose=0)
    labels = np.where(np.arange(9) < 2, 0, ids[:, 1:])  # those before cannot be known
    assert model.evaluate(ids[:320, :-1], labels[:320], verbose=0) < 0.3


def test_no_token_sees_a_later_one():
    model, ids = made(), np.array([SECOND, SECOND], "int32")
    ids[1, 2:] = 8
    logits = to_numpy(model(ids))
    assert logits.shape == (2, 4, V)
    assert_close(logits[1, :2], logits[0, :2], atol=0)
    assert np.abs(logits[1, 2:] - logits[0, 2:]).max() > 1e-2


def test_tied_logits_are_products_with_the_table():
    model = made()
    hidden = to_numpy(model.decoder(model.embedding(APART))).astype("float64")
    assert_close(model(APART), hidden @ to_numpy(model.embedding.tokens.embeddings).T, atol=1e-5)


def test_attention_scores_are_those_that_the_model_computes_with():
    model = made()
    scores = to_numpy(model.attention_scores(APART))
    assert scores.shape == (2, L, N, 4, 4)
    assert not scores[..., ~np.tril(np.ones((4, 4), bool))].any() and not scores[0, ..., 3:].any()
    assert_close(scores[1].sum(-1), np.ones((L, N, 4)))
    assert_close(model.attention_scores({"token_ids": APART, "other": APART}), scores, atol=0)
    _, expected = model.decoder(model.embedding(APART), return_attention_scores=True)
    assert_close(scores, expected, atol=0)


@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_documents_give_what_they_give_apart(positions):
    packed, plain = pair(**POSITIONS[positions])
    together, apart = to_numpy(packed(PACKED)), to_numpy(plain(APART))
    assert_close(together[0, :3], apart[0, :3], atol=1e-5)
    assert_close(together[0, 3:7], apart[1], atol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS)
def test_attention_scores_of_packed_documents_are_those_apart(positions):
    packed, plain = pair(**POSITIONS[positions])
    together, apart = to_numpy(packed.attention_scores(PACKED)), to_numpy(plain.attention_scores(APART))
    assert_close(together[0, ..., :3, :3], apart[0, ..., :3, :3], atol=1e-5)
    assert_close(together[0, ..., 3:7, 3:7], apart[1], atol=1e-5)
    assert not together[0, ..., 3:7, :3].any()
    assert_close(packed.attention_scores(APART), apart, atol=1e-5)  # ids alone are one document


@pytest.mark.tensorflow
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_packing_changes_neither_the_loss_nor_its_gradients(positions):
    import tensorflow as tf

    from keras_tx.data import pack_sequences

    models, loss = pair(**POSITIONS[positions], dropout=0.0), PaddedCrossentropy()
    ((features, labels),) = pack_sequences([FIRST, SECOND], 9).batch(2)
    for name, array in PACKED.items():
        assert np.array_equal(features[name], array)
    shifted = np.array([FIRST[1:] + [0, 0], SECOND[1:] + [0]], "int32")
    found = []
    for model, inputs, targets in zip(models, (features, APART), (labels, shifted), strict=True):
        with tf.GradientTape() as tape:
            value = loss(targets, model(inputs, training=True))
        gradients = tape.gradient(value, [weight.value for weight in model.trainable_weights])
        found.append([value, *[tf.convert_to_tensor(gradient) for gradient in gradients]])
    for together, apart in zip(*found, strict=True):
        assert_close(together, apart, atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_a_packed_model_generates_what_a_plain_one_does():
    packed, plain = pair()
    options = {"max_new_tokens": 3, "jit_compile": False}
    assert packed.generate([FIRST], **options) == plain.generate([FIRST], **options)


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"tie_embeddings": False}])
def test_a_bias_of_logits_and_a_zero_padding_row_count_in_generation_too(options, request):
    if options:  # one kind in a graph, whose bias changes afterwards
        request.getfixturevalue("eager")
    model = made(use_output_bias=True, embedding_options={"zero_padding": True}, **options)
    bias = model.head_bias.bias if model.head is None else model.head.bias
    assert bias.shape == (V,) and made(**options).head_bias is None
    ids, documents = np.array([SECOND], "int32"), np.ones((1, 4), "int32")
    inputs = {"token_ids": ids, "document_ids": documents, "positions": np.arange(4, dtype="int32")[None]}
    inputs = inputs if model.packed else ids
    before = to_numpy(model(inputs))
    assert model.tie_embeddings is False or np.abs(before[..., 0] - to_numpy(bias)[0]).max() < 1e-6
    generated = model.generate(ids, max_new_tokens=2, jit_compile=False)
    assert generated[0, 4] == before[0, -1].argmax()
    wanted = np.zeros(V, "float32")
    wanted[17] = 100
    bias.assign(bias + wanted)
    assert_close(model(inputs), before + wanted, atol=2e-5)
    assert model.generate(ids, max_new_tokens=2, jit_compile=False)[0, 4:].tolist() == [17, 17]
    with pytest.raises(TypeError, match=r"`use_output_bias` must be True or False. Received: use_output_bias='yes'"):
        made(use_output_bias="yes", **options)

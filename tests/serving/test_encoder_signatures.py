"""Exported encoder models answer as they do live: masked language models, and users' own functional models."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_tx import pretrained
from keras_tx.models import MaskedLM
from keras_tx.serving import export
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.encoder_signatures import encoder_signatures
from keras_tx.serving.parity import FILE as PARITY
from keras_tx.serving.text_encoder import TextEncoder
from keras_tx.serving.warmup import serialized
from keras_tx.text import load_tokenizer
from tests.pretrained import tiny
from tests.serving.conftest import LABELS, VOCABULARY
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.tensorflow

SIZE = len(VOCABULARY)
TEXTS = ["", "the cat sat", "not [MASK] but dull, café 🎬", "[MASK] cat [MASK]!", "one two three " * 40]


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def exported(folder, model, **options):
    import tensorflow as tf

    path = export(model, folder, **options)
    return SimpleNamespace(model=model, path=path, signatures=tf.saved_model.load(str(path)).signatures)


def ask(served, name, *texts):
    import tensorflow as tf

    inputs = {"inputs": [serialized(text) for text in texts]} if name == "classify" else {"text": list(texts)}
    answer = served.signatures[name](**{key: tf.constant(value, tf.string) for key, value in inputs.items()})
    return {key: to_numpy(value) for key, value in answer.items()}


# A masked language model, with more rows in its table than there are tokens


@pytest.fixture(scope="module")
def masked(tokenizer, tmp_path_factory):
    model = MaskedLM(SIZE + 5, num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=7)
    folder = tmp_path_factory.mktemp("saved_models") / "masked"
    return exported(folder, randomize(model, seed=2), tokenizer=tokenizer, warmup=TEXTS[2:3])


def expected_words(model, tokenizer, text):
    """By NumPy, of the text alone: tokens and probabilities of each mask, and the text with the best in its place."""
    ids = to_numpy(tokenizer(text)["token_ids"])
    logits = to_numpy(model(ids[None], training=False))[0].astype("float64")[:, :SIZE]
    (places,) = np.nonzero(ids == tokenizer.mask_id)
    probabilities = softmax(logits[places])
    best = np.argsort(-probabilities)[:, :5]
    filled = ids.copy()
    filled[places] = best[:, 0]
    words = [[VOCABULARY[i] for i in row] for row in best]
    return words, np.take_along_axis(probabilities, best, axis=1), tokenizer.decode(filled)


def test_masks_are_filled_with_the_likeliest_words(masked, tokenizer):
    together = ask(masked, "serving_default", *TEXTS)
    for row, text in enumerate(TEXTS):
        words, probabilities, filled = expected_words(masked.model, tokenizer, text)
        for answer, i in ((together, row), (ask(masked, "serving_default", text), 0)):
            count = len(words)
            assert [[word.decode() for word in one] for one in answer["words"][i, :count]] == words
            assert not any(answer["words"][i, count:].ravel()) and not answer["probabilities"][i, count:].any()
            assert_close(answer["probabilities"][i, :count], probabilities)
            assert answer["text"][i].decode() == filled
    assert together["words"].shape == (5, 2, 5)


def test_of_ids_all_places_get_their_likeliest_tokens(masked):
    import tensorflow as tf

    ids = np.array([[2, 8, 4, 3, 1], [2, 3, 75, 75, 75]], "int32")
    lengths = np.array([5, 2], "int32")
    answer = masked.signatures["tokens"](token_ids=tf.constant(ids), lengths=tf.constant(lengths))
    for row, length in enumerate(lengths):
        probabilities = softmax(to_numpy(masked.model(ids[row : row + 1, :length]))[0].astype("float64"))
        best = np.argsort(-probabilities)[:, :5]
        assert to_numpy(answer["top_ids"])[row, :length].tolist() == best.tolist()
        assert_close(answer["probabilities"][row, :length], np.take_along_axis(probabilities, best, axis=1))


def test_a_masked_model_embeds_texts_as_the_mean_over_their_tokens(masked, tokenizer):
    together = ask(masked, "embed", *TEXTS)["embedding"]
    for row, text in enumerate(TEXTS):
        ids = to_numpy(tokenizer(text)["token_ids"])[None]
        hidden = to_numpy(masked.model.encoder(masked.model.embedding(ids))).astype("float64")
        assert_close(together[row], hidden[0].mean(0))


def test_a_masked_model_explains_itself(masked, tokenizer):
    answer = ask(masked, "explain", *TEXTS[1:3])
    ids = to_numpy(tokenizer(TEXTS[1:3])["token_ids"])
    assert [[token.decode() for token in row] for row in answer["tokens"]] == [[VOCABULARY[i] for i in r] for r in ids]
    assert_close(answer["scores"], masked.model.attention_scores(ids))
    assert answer["text"][1] == ask(masked, "serving_default", TEXTS[2])["text"][0]


def test_a_masked_model_without_a_tokenizer_answers_ids(masked):
    import tensorflow as tf

    signatures = encoder_signatures(TextEncoder(masked.model), None, None, 0, fills_masks=True)
    assert set(signatures) == {"serving_default", "tokens"}
    given = {"token_ids": tf.constant([[2, 4, 3]]), "lengths": tf.constant([3])}
    answer = signatures["serving_default"](**given)
    assert_close(answer["probabilities"], masked.signatures["tokens"](**given)["probabilities"])


# A user's encoder: a dict of inputs and outputs, a mask among them, in half precision


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory):
    ids = keras.Input((None,), dtype="int32", name="input_ids")
    segments = keras.Input((None,), dtype="int32", name="token_type_ids")
    mask = keras.Input((None,), dtype="int32", name="attention_mask")
    x = keras.layers.Embedding(SIZE, 6)(ids) + keras.layers.Embedding(2, 6)(segments)
    x = keras.layers.MultiHeadAttention(3, 5)(x, x, attention_mask=keras.ops.cast(mask, "bool")[:, None, :])
    first = keras.layers.Dense(4, dtype="mixed_float16", name="pooler")(x[:, 0])
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
    model = randomize(keras.Model(inputs, {"last_hidden_state": x, "first": first}))
    return exported(tmp_path_factory.mktemp("saved_models") / "encoder", model, tokenizer=tokenizer, warmup=["cat"])


def test_outputs_keep_their_names_and_come_with_the_tokens_of_their_rows(encoder, tokenizer):
    together = ask(encoder, "serving_default", *TEXTS)
    assert set(together) == {"last_hidden_state", "first", "tokens"} and together["first"].dtype == "float32"
    for row, text in enumerate(TEXTS):
        ids = to_numpy(tokenizer(text)["token_ids"])[None]
        live = encoder.model({"input_ids": ids, "attention_mask": ids != 0, "token_type_ids": 0 * ids})
        length = ids.shape[1]
        for answer, i in ((together, row), (ask(encoder, "serving_default", text), 0)):
            assert_close(answer["last_hidden_state"][i, :length], live["last_hidden_state"][0], atol=1e-5)
            assert_close(answer["first"][i], live["first"][0], atol=1e-2)
            assert [token.decode() for token in answer["tokens"][i, :length]] == [VOCABULARY[k] for k in ids[0]]
        hidden = to_numpy(live["last_hidden_state"])[0].mean(0)
        assert_close(ask(encoder, "embed", text)["embedding"][0], hidden, atol=1e-5)


def test_the_inputs_of_a_server_have_the_names_that_all_models_have(encoder):
    import tensorflow as tf

    specs = encoder.signatures["tokens"].structured_input_signature[1]
    assert {name: (spec.dtype.name, spec.shape.as_list()) for name, spec in specs.items()} == {
        "token_ids": ("int32", [None, None]),
        "lengths": ("int32", [None]),
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"token_ids must be in \[0, {SIZE}\)"):
        encoder.signatures["tokens"](token_ids=tf.constant([[SIZE]]), lengths=tf.constant([1]))


def test_every_input_and_output_has_the_batch_first_and_no_half_precision(masked, encoder, narrow):
    for served in (masked, encoder, narrow):
        for signature in served.signatures.values():
            specs = [*signature.structured_input_signature[1].values(), *signature.structured_outputs.values()]
            assert all(spec.shape.rank >= 1 and spec.shape[0] is None for spec in specs)
            assert {spec.dtype.name for spec in specs} <= {"string", "int32", "float32"}


def test_an_empty_batch_has_an_empty_answer(masked, encoder, narrow):
    for served in (masked, encoder, narrow):
        for name in set(served.signatures) - {"tokens"}:
            assert {len(value) for value in ask(served, name).values()} == {0}


def test_the_card_has_how_far_the_answers_are_from_the_live_ones(masked, encoder, narrow):
    for served, half in ((masked, False), (encoder, True), (narrow, False)):
        figures = json.loads((served.path / CARD).read_text())["parity"]
        rows = json.loads((served.path / PARITY).read_text())["signatures"]
        assert set(figures) == set(rows) == set(served.signatures)
        for name, figure in figures.items():
            assert figure["examples"] == len(rows[name]) >= 2 and figure["others_equal"]
            assert 0 <= figure["largest_difference"] <= figure["tolerance"]
            assert figure["tolerance"] == max(row["tolerance"] for row in rows[name])
            assert (figure["tolerance"] > 1e-3) == half


def test_the_parity_file_has_what_the_live_model_answers(masked, tokenizer):
    row, *_ = [
        row
        for row in json.loads((masked.path / PARITY).read_text())["signatures"]["serving_default"]
        if "[MASK]" in row["inputs"]["text"][0]
    ]
    words, probabilities, filled = expected_words(masked.model, tokenizer, row["inputs"]["text"][0])
    # The last of the words may be as likely as the next, which is not among the outputs.
    assert [one[:4] for one in row["outputs"]["words"][0]] == [one[:4] for one in words]
    assert row["outputs"]["text"] == [filled]
    assert_close(row["outputs"]["probabilities"][0], probabilities)


# A user's classifier as in Keras' own examples: a fixed width, no mask, one sigmoid


@pytest.fixture(scope="module")
def narrow(tokenizer, tmp_path_factory):
    layers = [
        keras.Input((7,)),
        keras.layers.Embedding(SIZE, 3),
        keras.layers.Flatten(),
        keras.layers.Dense(5, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    model = randomize(keras.Sequential(layers), seed=4)
    model.compile("adam", "binary_crossentropy", jit_compile=True)
    folder = tmp_path_factory.mktemp("saved_models") / "narrow"
    return exported(folder, model, tokenizer=tokenizer, labels=["no", "yes"], warmup=["cat"])


def test_rows_have_the_width_that_the_model_was_built_for(narrow, tokenizer):
    import tensorflow as tf

    ids = np.stack([to_numpy(tokenizer(text, max_length=7, padding="max_length")["token_ids"]) for text in TEXTS])
    yes = to_numpy(narrow.model(ids))
    for name, key in (("serving_default", "probabilities"), ("classify", "scores")):
        assert_close(ask(narrow, name, *TEXTS)[key], np.concatenate([1 - yes, yes], axis=1))
    assert [one.decode() for one in ask(narrow, "serving_default", *TEXTS)["label"]] == [
        "yes" if one > 0.5 else "no" for one in yes[:, 0]
    ]
    for width in (3, 7, 11):
        given = np.full((5, width), 9, "int32")
        given[:, :7] = ids[:, :width]
        lengths = np.minimum((ids != 0).sum(1), width).astype("int32")
        cut = np.where(np.arange(7) < lengths[:, None], ids, 0)
        answer = narrow.signatures["tokens"](token_ids=tf.constant(given), lengths=tf.constant(lengths))
        assert_close(answer["probabilities"][:, 1:], narrow.model(cut))
    with pytest.raises(tf.errors.InvalidArgumentError, match="lengths must be at most 7, the positions of the model"):
        narrow.signatures["tokens"](token_ids=tf.ones([1, 8], tf.int32), lengths=tf.constant([8]))


def test_embed_goes_up_to_the_last_layer_with_weights(narrow):
    kernel, bias = (to_numpy(weight) for weight in narrow.model.layers[-1].weights)
    yes = 1 / (1 + np.exp(-(ask(narrow, "embed", *TEXTS)["embedding"] @ kernel + bias)))
    assert_close(yes, ask(narrow, "serving_default", *TEXTS)["probabilities"][:, 1:])


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("length", [7, None])
def test_ids_are_not_offered_as_vectors(tokenizer, length, dtype):
    """The last layer with weights is the embedding, whose inputs are the ids."""
    layers = [keras.Input((length,), dtype=dtype), keras.layers.Embedding(SIZE, 3)]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling1D(), keras.layers.Softmax()])
    signatures = encoder_signatures(TextEncoder(model), tokenizer, LABELS, 0)
    assert set(signatures) == {"serving_default", "tokens", "classify"}


def test_hidden_states_of_another_length_than_the_texts_are_not_averaged(tokenizer):
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(SIZE, 3)(ids)
    for hidden, is_offered in ((x, True), (keras.ops.repeat(x, 2, axis=1), False)):
        encoder = TextEncoder(keras.Model(ids, {"last_hidden_state": hidden}))
        assert ("embed" in encoder_signatures(encoder, tokenizer, None, 0)) == is_offered


def test_labels_of_tokens_come_with_the_tokens(tokenizer):
    ids = keras.Input((None,), dtype="int32")
    head = keras.layers.Dense(3)(keras.layers.Embedding(SIZE, 4, mask_zero=True)(ids))
    model = randomize(keras.Model(ids, keras.layers.Activation("softmax", dtype="float32")(head)))
    served = SimpleNamespace(signatures=encoder_signatures(TextEncoder(model), tokenizer, ["O", "B", "I"], 0))
    assert set(served.signatures) == {"serving_default", "tokens", "embed"}
    answer = ask(served, "serving_default", "the cat sat")
    live = to_numpy(model(to_numpy(tokenizer("the cat sat")["token_ids"])[None]))
    assert_close(answer["probabilities"], live)
    assert [one.decode() for one in answer["label"][0]] == [["O", "B", "I"][i] for i in live[0].argmax(-1)]
    assert [one.decode() for one in answer["tokens"][0]] == ["[CLS]", "the", "cat", "sat", "[SEP]"]


def test_the_live_model_is_asked_once_for_what_several_signatures_need(make, tokenizer, monkeypatch):
    import tensorflow as tf

    signatures = encoder_signatures(TextEncoder(make()), tokenizer, LABELS, 0)
    asked, run = [], TextEncoder.__call__

    def counted(self, *args, **kwargs):
        asked.append(args)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(TextEncoder, "__call__", counted)
    found = []
    for text in ("the cat", "not", "the cat"):
        for name in ("serving_default", "explain"):
            found.append(signatures[name].python_function(text=tf.constant([text]))["probabilities"].numpy())
    assert len(asked) == 3  # once for each text; only the last is kept
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[5])
    assert abs(found[0] - found[2]).max() > 1e-3


@pytest.mark.parametrize("family", ["bert", "modernbert", "roberta"])
def test_a_checkpoint_that_fills_masks_embeds_by_its_hidden_states(family, tokenizer):
    """Those of the same checkpoint without a head, whichever outputs the model has besides."""
    import tensorflow as tf

    path = tiny.checkpoint(family)
    base = pretrained.from_pretrained(path, task="base")
    if family != "modernbert":  # whose checkpoint has no tokenizer; its vocabulary is larger than that of the tests
        tokenizer = load_tokenizer(path, max_length=17)
    model = pretrained.from_pretrained(path, task="masked_lm", output_hidden_states=family == "bert")
    embed = encoder_signatures(TextEncoder(model), tokenizer, None, tokenizer.pad_id, fills_masks=True)["embed"]
    texts = ["the cat sat", "not wonderful but dull", ""]
    found = to_numpy(embed(text=tf.constant(texts))["embedding"])
    for row, text in zip(found, texts, strict=True):
        hidden = to_numpy(base(tokenizer([text])["token_ids"])["last_hidden_state"])[0]
        assert_close(row, hidden.mean(axis=0), atol=1e-5)

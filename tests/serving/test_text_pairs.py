"""Exported models of pairs of texts answer as the Keras models do of `tokenizer(text, text_pair)`."""

import json

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM, MaskedLM, TextClassifier
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving import export, parity
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.exporters import exporter_for
from keras_tx.serving.rest import ServedModel
from keras_tx.serving.rest_json import RestError
from keras_tx.serving.warmup import check_warmup, serialized
from keras_tx.text import WordLevelTokenizer
from tests.serving.conftest import LABELS, VOCABULARY
from tests.serving.test_warmup import requests
from tests.serving.user_models import TableTokenizer, bag
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.tensorflow
SIZES = dict(num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5)
LONG = "one two three " * 20
PAIRS = [
    ("the cat sat", "dull"),
    ("dull", "the cat sat"),
    ("", ""),
    ("the cat sat", ""),
    ("", "the cat sat"),
    (LONG, "not dull"),
    ("not dull", LONG),
    (LONG, "wonderful , but " * 20),
    ("Cafés 🎬 [SEP]", "電影 !"),
]


def columns(pairs):
    import tensorflow as tf

    sides = {"text": [first for first, _ in pairs], "text_pair": [second for _, second in pairs]}
    return {name: tf.constant(side, tf.string) for name, side in sides.items()}


def softmax(logits):
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def logits_of(model, tokenizer, first, second):
    """The logits of a pair alone, by Keras, from what the tokenizer returns for it."""
    features = tokenizer([first], [second])
    inputs = {name: features[name] for name in ("token_ids", "segment_ids") if name in features}
    inputs = inputs if len(model.inputs) > 1 else inputs["token_ids"]
    return to_numpy(model(inputs, training=False))[0].astype("float64")


@pytest.fixture(scope="module")
def expected(pairs, tokenizer):
    rows = [softmax(logits_of(pairs.model, tokenizer, *pair)) for pair in PAIRS]
    assert abs(rows[0] - rows[1]).max() > 1e-3  # the order matters
    return np.stack(rows)


def test_every_signature_over_texts_takes_both(pairs):
    specs = {name: one.structured_input_signature[1] for name, one in pairs.signatures.items()}
    both = {"text", "text_pair"}
    assert {name: set(one) for name, one in specs.items()} == {
        "serving_default": both,
        "explain": both,
        "embed": both,
        "classify": {"inputs"},
        "tokens": {"token_ids", "lengths", "segment_ids"},
    }


def test_pairs_are_answered_as_by_the_live_model_in_batches_of_any_size(pairs, tokenizer, expected):
    import tensorflow as tf

    for size in (1, 2, len(PAIRS)):
        for start in range(0, len(PAIRS), size):
            batch, wanted = PAIRS[start : start + size], expected[start : start + size]
            answer = pairs.signatures["serving_default"](**columns(batch))
            assert_close(answer["probabilities"], wanted)
            assert [label.decode() for label in answer["label"].numpy()] == [LABELS[i] for i in wanted.argmax(-1)]
    examples = tf.constant([serialized(*pair) for pair in PAIRS])
    assert_close(pairs.signatures["classify"](inputs=examples)["scores"], expected)
    explained = pairs.signatures["explain"](**columns(PAIRS[:1]))
    tokens = [token.decode() for token in explained["tokens"].numpy()[0]]
    assert tokens == ["[CLS]", "the", "cat", "sat", "[SEP]", "dull", "[SEP]"]
    features = tokenizer(*zip(*PAIRS[:1], strict=True))
    assert_close(explained["scores"], pairs.model.attention_scores(features))
    empty = pairs.signatures["serving_default"](**columns([]))
    assert empty["probabilities"].shape == (0, 3)


def test_ids_of_pairs_come_with_their_segments(pairs, tokenizer, expected):
    import tensorflow as tf

    features = tokenizer(*[list(side) for side in zip(*PAIRS, strict=True)])
    ids, segments = features["token_ids"], features["segment_ids"]
    lengths = tf.math.count_nonzero(ids, 1, dtype="int32")
    run = pairs.signatures["tokens"]
    assert_close(run(token_ids=ids, lengths=lengths, segment_ids=segments)["probabilities"], expected)
    # What a server pads with, the first value, does not count.
    behind = ~tf.sequence_mask(lengths, ids.shape[1])
    padded = {"token_ids": tf.where(behind, 2, ids), "segment_ids": tf.where(behind, 1, segments), "lengths": lengths}
    assert_close(run(**padded)["probabilities"], expected)
    others = run(token_ids=ids, lengths=lengths, segment_ids=tf.zeros_like(ids))["probabilities"]
    assert abs(to_numpy(others)[0] - expected[0]).max() > 1e-3  # zeros, as for single texts, would be wrong


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([[0, 2]], r"segment_ids must be in \[0, 2\). Received:.*2"),
        ([[0, -1]], r"segment_ids must be in \[0, 2\). Received:.*-1"),
        ([[0]], "segment_ids must have the shape of token_ids. Received:"),
    ],
)
def test_segments_that_cannot_be_are_refused_by_the_graph(pairs, segments, message):
    import tensorflow as tf

    given = {"token_ids": tf.constant([[2, 3]]), "lengths": tf.constant([2]), "segment_ids": tf.constant(segments)}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        pairs.signatures["tokens"](**given)


def test_as_many_second_texts_as_first_ones_are_needed(pairs):
    import tensorflow as tf

    for name in ("serving_default", "embed"):
        with pytest.raises(tf.errors.InvalidArgumentError, match="text_pair must be one for each text. Received:"):
            pairs.signatures[name](text=tf.constant(["the", "cat"]), text_pair=tf.constant(["dull"]))


def test_pairs_are_asked_over_http(pairs, expected):
    served = ServedModel(pairs.path.parent)

    def ask(method, **body):
        return served.answer("POST", f"/v1/models/pairs:{method}", json.dumps(body).encode())

    rows = [{"text": first, "text_pair": second} for first, second in PAIRS]
    found = [row["probabilities"] for row in ask("predict", instances=rows)["predictions"]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    results = ask("classify", signature_name="classify", examples=rows)["results"]
    np.testing.assert_allclose([[score for _, score in row] for row in results], expected, atol=1e-6)
    with pytest.raises(RestError, match="text_pair"):
        ask("classify", signature_name="classify", examples=[{"text": "the cat"}])
    with pytest.raises(RestError, match="expecting list of objects as multiple input tensors"):
        ask("predict", instances=["the cat"])


def test_the_files_of_a_version_have_pairs(pairs):
    card = json.loads((pairs.path / CARD).read_text())
    assert card["signatures"]["embed"]["inputs"]["text_pair"] == {"dtype": "string", "shape": [None]}
    assert card["parity"]["tokens"]["examples"] == len(parity.PAIRS) + 2 and card["warmup_requests"] == 15
    assert all(figures["largest_difference"] <= 1e-5 for name, figures in card["parity"].items() if name != "embed")
    content = json.loads((pairs.path / parity.FILE).read_text())
    assert list(zip(content["text"], content["text_pair"], strict=True)) == [tuple(pair) for pair in parity.PAIRS]
    asked = [inputs for _, name, inputs in requests(pairs.path) if name == "embed"]
    assert [one["text_pair"].tolist() for one in asked] == [[b"sat"], [b"dull"], [b"sat", b"dull", b"sat"]]
    segments = next(inputs for _, name, inputs in requests(pairs.path) if name == "tokens")["segment_ids"]
    assert segments.tolist() == [[0, 0, 0, 0, 1, 1]]


# Other models, whose signatures are not written to disk


def signatures_of(model, tokenizer, **options):
    exporter = exporter_for(model, {"tokenizer": tokenizer, "source_tokenizer": None}, None, None, True, **options)
    return exporter.signatures()


def checkpoint(kind, tokens, **config):
    sizes = dict(hidden_size=6, num_hidden_layers=1, num_attention_heads=2, intermediate_size=5, vocab_size=tokens)
    architecture = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[kind]
    given = {"model_type": kind, "architectures": [f"{architecture}ForSequenceClassification"], **sizes}
    return randomize(
        PretrainedModel({**given, "max_position_embeddings": 20, "id2label": {0: "no", 1: "yes"}, **config}), seed=2
    )


def test_a_bert_checkpoint_gets_the_segments_of_its_tokenizer(tokenizer):
    model = checkpoint("bert", len(VOCABULARY))
    answer = signatures_of(model, tokenizer)["serving_default"](**columns(PAIRS))
    for row, (first, second) in zip(answer["probabilities"].numpy(), PAIRS, strict=True):
        features = tokenizer([first], [second])
        inputs = {"input_ids": features["token_ids"], "token_type_ids": features["segment_ids"]}
        assert_close(row, softmax(to_numpy(model(inputs)["logits"])[0]))


def test_a_model_without_segments_gets_pairs_with_separators():
    tokenizer = WordLevelTokenizer.train(["the cat sat", "not dull"], 30, max_length=16)
    options = {"type_vocab_size": 1, "pad_token_id": tokenizer.pad_id}
    model = checkpoint("roberta", tokenizer.vocabulary_size, **options)
    signatures = signatures_of(model, tokenizer)
    answer = signatures["serving_default"](**columns(PAIRS))
    for row, (first, second) in zip(answer["probabilities"].numpy(), PAIRS, strict=True):
        ids = tokenizer([first], [second])["token_ids"]
        assert_close(row, softmax(to_numpy(model({"input_ids": ids})["logits"])[0]))
    plain = TextClassifier(tokenizer.vocabulary_size, 2, **SIZES)
    assert [spec.name for spec in signatures_of(plain, tokenizer)["tokens"].input_signature] == ["token_ids", "lengths"]


def test_a_model_of_a_fixed_length_gets_pairs_of_that_length(tokenizer):
    ids = keras.Input((9,), dtype="int32", name="token_ids")
    segments = keras.Input((9,), dtype="int32", name="segment_ids")
    x = keras.layers.Embedding(len(VOCABULARY), 3)(ids) + keras.layers.Embedding(2, 3)(segments)
    model = randomize(keras.Model([ids, segments], keras.layers.Dense(2, name="head")(keras.layers.Flatten()(x))))
    signatures = signatures_of(model, tokenizer)
    features = tokenizer(*[list(side) for side in zip(*PAIRS, strict=True)], max_length=9, padding="max_length")
    expected = model([features["token_ids"], features["segment_ids"]])
    assert_close(signatures["serving_default"](**columns(PAIRS))["head"], expected)
    lengths = to_numpy(features["token_ids"] != 0).sum(1).astype("int32")
    width = lengths.max()
    given = {name: features[name][:, :width] for name in ("token_ids", "segment_ids")}
    assert_close(signatures["tokens"](**given, lengths=lengths)["head"], expected)


def classifier(**options):
    return TextClassifier(len(VOCABULARY), 3, **SIZES, embedding_options=options)


def test_what_has_no_pairs_is_refused(tokenizer, tmp_path, monkeypatch):
    def refused(model, message, **options):
        with pytest.raises(ValueError, match=message):
            export(model, tmp_path / "pairs", text_pairs=True, **options)

    language_model = CausalLM(len(VOCABULARY), **SIZES)
    rule = "`text_pairs` is for models that classify or encode. Received: text_pairs=True for a model "
    refused(language_model, rule + "of type CausalLM that generates", tokenizer=tokenizer)
    refused(MaskedLM(len(VOCABULARY), **SIZES), rule + "that fills masks", tokenizer=tokenizer)
    refused(classifier(), "`tokenizer` must be given for `text_pairs=True`. Received: tokenizer=None")
    table = TableTokenizer(VOCABULARY)
    rule = "must take pairs of texts for `text_pairs=True`. Received: .* TableTokenizer: .*'pairs'"
    refused(bag(), rule, tokenizer=table)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")  # there the process that exports says so
    exporter_for(bag(), {"tokenizer": table, "source_tokenizer": None}, None, None, True)


def test_segments_that_tokenizer_and_model_do_not_share_are_refused(tokenizer):
    words = WordLevelTokenizer.train(["the cat sat"], 30, max_length=16)
    with pytest.raises(
        ValueError, match=r"must return 'segment_ids' for .* of type WordLevelTokenizer, which returns \['token_ids'\]"
    ):
        signatures_of(classifier(num_segments=2), words)
    with pytest.raises(ValueError, match="`model` must have a segment for each text .* Received: 1 segments, and the"):
        signatures_of(classifier(num_segments=1), tokenizer)
    signatures_of(classifier(num_segments=1), words)  # all of its segment ids are 0


def test_texts_of_warmup_are_pairs_then(tokenizer, tmp_path):
    rule = r"`warmup` must be a list of pairs \(text, text_pair\), or of requests .*Received: "
    for entry in ("the cat", ("the", "cat", "sat"), ("the", 3)):
        with pytest.raises(ValueError, match=rule + r".*, text_pairs=True"):
            check_warmup([entry], tokenizer, text_pairs=True)
    with pytest.raises(ValueError, match="`warmup` must be a list of texts, or of requests .*Received: .'the', 'cat'"):
        check_warmup([("the", "cat")], tokenizer)
    assert check_warmup([("a", b"b"), {"inputs": {}}], tokenizer, True) == [["a", b"b"], {"inputs": {}}]
    with pytest.raises(ValueError, match="`text_pairs` must be one of .*Received: text_pairs='yes'"):
        export(classifier(), tmp_path, tokenizer=tokenizer, text_pairs="yes")

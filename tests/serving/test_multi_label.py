"""A head that answers yes or no for each class is found out, and exported with all labels of a text."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_tx.serving import other_backends, parity
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.class_labels import check_labels, classifier_outputs, multi_label_kind
from keras_tx.serving.encoder_signatures import encoder_signatures
from keras_tx.serving.rest import ServedModel
from keras_tx.serving.text_encoder import TextEncoder
from tests.serving.conftest import LABELS, VOCABULARY
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.tensorflow
TEXTS = ["", "the cat sat", "not wonderful but dull , one two", "café !", "three one two " * 20]
LOGITS = keras.losses.BinaryCrossentropy(from_logits=True)
FOCAL = keras.losses.BinaryFocalCrossentropy(from_logits=True)
CATEGORICAL = keras.losses.CategoricalCrossentropy(from_logits=True)


def sigmoid(logits):
    return 1 / (1 + np.exp(-to_numpy(logits).astype("float64")))


def names_of(rows):
    return [[label.decode() for label in row] for row in rows]


def chosen(probabilities):
    """The labels by Python, "" where the probability is under one half."""
    return [[label if p >= 0.5 else "" for label, p in zip(LABELS, row, strict=True)] for row in probabilities]


@pytest.fixture(scope="module")
def expected(multi_label, tokenizer):
    """The probabilities of each text alone, by Keras and NumPy."""
    rows = [multi_label.model(tokenizer([text])["token_ids"], training=False) for text in TEXTS]
    probabilities = sigmoid(np.concatenate([to_numpy(row) for row in rows]))
    counts = {sum(map(bool, row)) for row in chosen(probabilities)}
    assert counts - {1}  # some text has no label, or several: a softmax would have other answers
    return probabilities


def test_each_class_of_the_export_is_a_question_by_itself(multi_label, tokenizer, expected):
    import tensorflow as tf

    features = tokenizer(TEXTS)["token_ids"]
    lengths = tf.math.count_nonzero(features, 1, dtype="int32")
    answers = [
        multi_label.signatures["serving_default"](text=tf.constant(TEXTS)),
        multi_label.signatures["explain"](text=tf.constant(TEXTS)),
        multi_label.signatures["tokens"](token_ids=features, lengths=lengths),
    ]
    for answer in answers:
        assert "label" not in answer
        assert_close(answer["probabilities"], expected)
        assert names_of(answer["labels"].numpy()) == chosen(expected)
    for i, text in enumerate(TEXTS):
        alone = multi_label.signatures["serving_default"](text=tf.constant([text]))
        assert_close(alone["probabilities"][0], expected[i])


def test_all_classes_have_their_scores_over_http(multi_label, expected):
    served = ServedModel(multi_label.path.parent)
    body = json.dumps({"signature_name": "classify", "examples": [{"text": text} for text in TEXTS]}).encode()
    results = served.answer("POST", "/v1/models/topics:classify", body)["results"]
    assert [[name for name, _ in row] for row in results] == [LABELS] * len(TEXTS)
    np.testing.assert_allclose([[score for _, score in row] for row in results], expected, atol=1e-6)
    body = json.dumps({"instances": TEXTS}).encode()
    predictions = served.answer("POST", "/v1/models/topics:predict", body)["predictions"]
    assert [row["labels"] for row in predictions] == chosen(expected)


def test_the_files_of_a_version_say_that_a_text_may_have_several_labels(multi_label):
    card = json.loads((multi_label.path / CARD).read_text())
    assert card["labels"] == LABELS and card["multi_label"] is True
    assert all(figures["others_equal"] for figures in card["parity"].values())
    content = json.loads((multi_label.path / parity.FILE).read_text())
    assert "label" not in content and content["labels"] == chosen(content["probabilities"])
    row = content["signatures"]["serving_default"][0]
    assert row["outputs"]["labels"] == content["labels"][:1]


@pytest.mark.parametrize("near", [True, False])
def test_labels_that_rounding_may_change_are_not_compared(near):
    answer = {"labels": np.array([[b"a", b""]]), "probabilities": np.array([[0.9, 0.5 - (1e-6 if near else 1e-3)]])}
    found = parity.example("serving_default", {}, answer, None)
    assert found["outputs"]["labels"] == [["a", None if near else ""]] and "probabilities" in found["outputs"]


def head(activation=None, loss=None, last=None, tokens=False, names=False):
    """A compiled model over ids with three classes."""
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(len(VOCABULARY), 5, mask_zero=True)(ids)
    y = x if tokens else keras.layers.GlobalAveragePooling1D()(x)
    y = keras.layers.Dense(3, activation=activation, name="head")(y)
    y = y if last is None else last(y)
    model = keras.Model(ids, {"hidden": x, "logits": y} if names else y)
    if loss is not None:
        model.compile(loss=loss)
    return randomize(model, scale=2.0)


def test_a_label_is_not_the_sign_for_none():
    encoder = TextEncoder(head("sigmoid"))
    with pytest.raises(ValueError, match="`labels` must not have '' for .* Received: labels=\\['', 'x', 'y'\\]"):
        check_labels(encoder, ["", "x", "y"], "probabilities")
    assert check_labels(TextEncoder(head("softmax")), ["", "x", "y"]) == ["", "x", "y"]


def kind(model):
    return multi_label_kind(TextEncoder(model), model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"activation": "sigmoid"}, "probabilities"),
        ({"activation": "sigmoid", "loss": "bce"}, "probabilities"),
        ({"last": keras.ops.sigmoid}, "probabilities"),
        ({"activation": keras.ops.sigmoid}, "probabilities"),
        ({"loss": LOGITS}, "logits"),
        ({"loss": FOCAL}, "logits"),
        ({"loss": {"logits": LOGITS, "hidden": None}, "names": True}, "logits"),
        ({"loss": {"head": LOGITS}, "names": True}, "logits"),
        ({"loss": {"hidden": LOGITS, "logits": CATEGORICAL}, "names": True}, None),
        ({"loss": [None, LOGITS], "names": True}, "logits"),
        ({"loss": [LOGITS], "names": True}, None),
        ({"last": lambda x: keras.layers.Average()([x, x]), "loss": LOGITS}, "logits"),
        ({"last": lambda x: keras.layers.Average()([x, x]), "loss": "binary_focal_crossentropy"}, "probabilities"),
        ({"last": lambda x: keras.layers.Average()([x, x]), "loss": keras.losses.binary_crossentropy}, "probabilities"),
        ({"last": lambda x: keras.layers.Average()([x, x])}, None),
        ({"activation": "softmax", "loss": "binary_crossentropy"}, None),
        ({"loss": CATEGORICAL}, None),
        ({}, None),
    ],
)
def test_the_activation_or_the_loss_tells_a_multi_label_head(options, expected):
    assert kind(head(**options)) == expected


def test_a_loaded_model_still_has_its_loss(tmp_path):
    model = head(loss=LOGITS)
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    assert kind(keras.saving.load_model(tmp_path / "model.keras")) == "logits"


@pytest.mark.parametrize("loss", ["binary_crossentropy", keras.losses.BinaryCrossentropy()])
def test_logits_with_a_loss_over_probabilities_are_refused(loss):
    with pytest.raises(
        ValueError,
        match=r"must take logits: .*from_logits=True.*Received: loss=binary_crossentropy .*output 'head'",
    ):
        kind(head(loss=loss))


def test_numbers_that_may_be_either_are_refused():
    model = head("sigmoid", last=lambda x: keras.layers.Average()([x, x]))
    with pytest.raises(ValueError, match="compiled with a binary cross-entropy if .*all of whose numbers are between"):
        classifier_outputs(TextEncoder(model), LABELS)
    model.compile(loss="bce")
    ids = np.array([[3, 7, 2]], "int32")
    answer = classifier_outputs(TextEncoder(model), LABELS, kind(model))(ids)
    assert_close(answer["probabilities"], model(ids))


def test_an_output_named_labels_is_refused():
    ids = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(13, 3, mask_zero=True)(ids)
    encoder = TextEncoder(keras.Model(ids, {"logits": keras.layers.Dense(3)(x), "labels": x}))
    with pytest.raises(
        ValueError, match=r"must not have the names .*, which `labels` adds. Received: outputs \['labels'\]"
    ):
        check_labels(encoder, LABELS, "logits")
    assert check_labels(encoder, LABELS) == LABELS


@pytest.mark.parametrize("options", [{"activation": "sigmoid"}, {"loss": LOGITS}])
def test_tokens_have_several_labels_too(options, tokenizer):
    import tensorflow as tf

    model = head(tokens=True, **options)
    encoder = TextEncoder(model)
    signatures = encoder_signatures(encoder, tokenizer, LABELS, 0, multi_label=kind(model))
    assert set(signatures) == {"serving_default", "tokens", "embed"}
    answer = signatures["serving_default"](text=tf.constant(TEXTS[1:3]))
    for i, text in enumerate(TEXTS[1:3]):
        ids = to_numpy(tokenizer([text])["token_ids"])
        live = to_numpy(model(ids))[0]
        live = live if "activation" in options else sigmoid(live)
        length = ids.shape[1]
        assert_close(answer["probabilities"][i, :length], live)
        assert names_of(answer["labels"][i, :length].numpy()) == chosen(live)
        assert [token.decode() for token in answer["tokens"][i, :length].numpy()] == [VOCABULARY[k] for k in ids[0]]


@pytest.mark.parametrize(("options", "expected"), [({"loss": LOGITS}, "logits"), ({}, None)])
def test_the_process_of_another_backend_knows_what_the_loss_said(options, expected, tmp_path, monkeypatch):
    found = {}

    def export(model, path, **arguments):
        found.update(arguments, multi_label=kind(model))
        return path

    def run(command, **_):
        other_backends.main(command[-1], export)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(other_backends, "subprocess", SimpleNamespace(run=run))
    model = head(**options)
    arguments = dict(tokenizers={}, generation=None, labels=LABELS, warmup=[["a", b"\xff"]], max_batch=1)
    arguments |= dict(precision="float32", constant_weights=None, text_pairs=True, multi_label=kind(model))
    other_backends.export_in_subprocess(model, tmp_path / "topics", **arguments)
    assert found["multi_label"] == expected and found["text_pairs"] is True
    assert [[x if isinstance(x, bytes) else x.encode() for x in pair] for pair in found["warmup"]] == [[b"a", b"\xff"]]

"""Warm-up requests are what TensorFlow Serving reads, and every one of them is answered."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

from keras_tx.serving import export, warmup
from keras_tx.serving.warmup import FILE, prediction_log
from tests.serving.conftest import LABELS, WARMUP
from tests.serving.protos import message

pytestmark = pytest.mark.tensorflow


def requests(path):
    """The records of a version as (model, signature, inputs), by the messages of TensorFlow Serving."""
    import tensorflow as tf
    from tensorflow.core.framework.tensor_pb2 import TensorProto

    log = message("PredictionLog")
    for record in tf.data.TFRecordDataset(str(path / FILE)):
        request = log.FromString(record.numpy()).predict_log.request
        inputs = {entry.key: tf.make_ndarray(TensorProto.FromString(entry.value)) for entry in request.inputs}
        yield request.model_spec.name, request.model_spec.signature_name, inputs


def test_every_text_goes_to_every_signature_alone_and_all_go_together(exported):
    found = list(requests(exported.path))
    assert {name for name, _, _ in found} == {"reviews"}
    batches = {}
    for _, signature, inputs in found:
        batches.setdefault(signature, []).append(sorted({len(value) for value in inputs.values()}))
    assert batches == {name: [[1], [1], [5]] for name in ("serving_default", "classify", "explain", "embed")} | {
        "tokens": [[1], [1], [5], [1]]
    }
    together = [inputs["text"] for _, name, inputs in found if name == "embed"][-1]
    assert together.tolist() == [WARMUP[i % 2].encode() for i in range(5)]


def test_the_requests_that_are_written_are_answered(exported, tokenizer):
    import tensorflow as tf

    answers = {}
    for _, name, inputs in requests(exported.path):
        answer = exported.signatures[name](**{key: tf.constant(value) for key, value in inputs.items()})
        answers.setdefault(name, []).append(answer["scores" if name == "classify" else next(iter(answer))].numpy())
    probabilities = exported.signatures["serving_default"](text=tf.constant(["the cat sat"]))["probabilities"]
    np.testing.assert_allclose(answers["classify"][0], probabilities, atol=1e-6)
    given = list(requests(exported.path))[-1]
    assert given[1] == "tokens" and given[2]["token_ids"].tolist() == [[2, 6, 3]] and given[2]["lengths"] == [3]
    made = next(inputs for _, name, inputs in requests(exported.path) if name == "tokens")
    assert made["token_ids"].tolist() == tokenizer(["the cat sat"])["token_ids"].numpy().tolist()
    assert made["lengths"].tolist() == [5]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 2**14, 2**21 + 5])
def test_fields_of_any_length_are_read_back(size):
    import tensorflow as tf

    record = prediction_log("name", "serving_default", {"text": tf.constant(["x" * size])})
    request = message("PredictionLog").FromString(record).predict_log.request
    (entry,) = request.inputs
    assert entry.key == "text" and ("x" * size).encode() in entry.value


@pytest.mark.parametrize(
    "entries, message",
    [
        ("a text", r"must be a list of texts, or of requests .*Received: warmup='a text'"),
        ([3], "must be a list of texts.*Received: 3"),
        ([{"text": ["a"]}], "must be a list of texts.*Received: {'text': \\['a'\\]}"),
        ([{"inputs": {"texts": ["a"]}}], "must name a signature and all its inputs.*Received: {'inputs': {'texts'"),
        ([{"signature_name": "no", "inputs": {}}], "must name a signature and all its inputs.*'no'"),
        (
            [{"inputs": {"text": [5]}}],
            "must give inputs of the dtypes {'text': 'string'}. Received: {'inputs'",
        ),
        (
            [{"inputs": {"text": "abc"}}],
            r"must give the input 'text' of 'serving_default' a shape \[None\]. Received: .*'abc'.* the shape \[\]",
        ),
        ([{"inputs": {"text": [["a"]]}}], r"must give the input 'text' .*, whose 'text' has the shape \[1, 1\]"),
        (
            [{"signature_name": "tokens", "inputs": {"token_ids": [[1]], "lengths": 1}}],
            r"must give the input 'lengths' of 'tokens' a shape \[None\]",
        ),
        (["a", "b\ud800"], r"must have texts .* UTF-8, which has no lone surrogates. Received: 'b\\ud800'"),
        (
            [{"inputs": {"text": ["a", "b"]}}],
            "must have requests of at most `max_batch` rows. Received: max_batch=1, .*has 2 rows",
        ),
        (
            [{"signature_name": "tokens", "inputs": {"token_ids": [[99]], "lengths": [1]}}],
            r"must be answered.*\[\[99\]\].*the signature 'tokens' fails: .*token_ids must be in \[0, 71\)",
        ),
    ],
)
def test_a_request_that_fails_is_named_and_nothing_is_written(make, tokenizer, tmp_path, loaded, entries, message):
    with pytest.raises(ValueError, match="`warmup` " + message):
        checked = warmup.check_warmup(entries, tokenizer)
        warmup.write_warmup(tmp_path, "reviews", loaded, checked, source=None, max_batch=1)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def loaded(exported):
    return dict(exported.signatures)


def test_too_many_requests_are_refused(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "MAX_REQUESTS", 14)
    source = SimpleNamespace(
        id_inputs=lambda texts: {"token_ids": np.ones((len(texts), 3)), "lengths": np.ones(len(texts))},
        request_defaults={},
    )
    with pytest.raises(ValueError, match="at most 14 requests.*Received: 2 entries, which make 15"):
        warmup.write_warmup(tmp_path, "name", loaded, ["a", "b"], source, max_batch=2)


def test_no_text_of_a_pair_has_a_lone_surrogate(tokenizer):
    with pytest.raises(ValueError, match="`warmup` must have texts .* no lone surrogates. Received: .'a', "):
        warmup.check_warmup([("a", "\ud800")], tokenizer, text_pairs=True)


@pytest.mark.parametrize("pairs", [False, True])
def test_arrays_are_given_like_lists(make, tmp_path, tokenizer, monkeypatch, pairs):
    entries = [["the cat", "sat"], ["not", "dull"]] if pairs else ["the cat", "sat"]
    given = []
    module = importlib.import_module("keras_tx.serving.export")
    monkeypatch.setattr(module, "export_on_tensorflow", lambda *args, **options: given.append(options))
    model = make(embedding_options={"num_segments": 2})
    for kind in (list, np.array):
        export(model, tmp_path, tokenizer=tokenizer, labels=kind(LABELS), warmup=kind(entries), text_pairs=pairs)
    assert given[0] == given[1] and given[0]["warmup"] == entries and given[0]["labels"] == LABELS


def test_texts_need_a_tokenizer(make, tmp_path):
    with pytest.raises(ValueError, match="`tokenizer` must be given for the texts of `warmup`.*None, 'a text'"):
        export(make(), tmp_path, warmup=["a text"])

"""`check` reads the warm-up requests of a version as a server does, runs them, and names the first that is wrong."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from keras_tx.serving.warmup import FILE, prediction_log
from tests.serving.protos import message
from tests.serving.test_warmup import requests

pytestmark = pytest.mark.tensorflow


class Signature:
    """Stands for one of `session.Session`, and keeps what it was called with."""

    def __init__(self, called, name, **dtypes):
        self.called, self.name, self.inputs = called, name, {key: (dtype, None) for key, dtype in dtypes.items()}

    def __call__(self, **inputs):
        self.called.append((self.name, inputs))
        if np.any(np.asarray(inputs.get("token_ids", 0)) == 99):
            raise RuntimeError("assertion failed:\n99")


@pytest.fixture
def signatures():
    import tensorflow as tf

    text, ids, called = {"text": tf.string}, {"token_ids": tf.int32, "lengths": tf.int32}, []
    all_of_them = {
        **{name: Signature(called, name, **text) for name in ("serving_default", "embed", "explain")},
        "classify": Signature(called, "classify", inputs=tf.string),
        "tokens": Signature(called, "tokens", **ids),
    }
    return SimpleNamespace(called=called, all_of_them=all_of_them)


def problems(folder, signatures):
    from keras_tx.serving.check import warmup_requests

    return warmup_requests.problems_of_warmup(str(folder), signatures.all_of_them)


def written(folder, *records):
    import tensorflow as tf

    (folder / FILE).parent.mkdir()
    with tf.io.TFRecordWriter(str(folder / FILE)) as file:
        for record in records:
            file.write(record)
    return folder


def log(name, **inputs):
    import tensorflow as tf

    return prediction_log("reviews", name, {key: tf.constant(value) for key, value in inputs.items()})


def test_the_requests_of_an_export_are_run_as_the_messages_of_a_server_have_them(exported, signatures):
    assert problems(exported.path, signatures) == []
    expected = list(requests(exported.path))
    assert len(signatures.called) == len(expected)
    for (name, inputs), (_, wanted, given) in zip(signatures.called, expected, strict=True):
        assert name == wanted and set(inputs) == set(given)
        for key, value in given.items():
            np.testing.assert_array_equal(inputs[key], value)


def test_a_version_without_requests_has_no_problem_with_them(signatures, tmp_path):
    assert problems(tmp_path, signatures) == []
    assert problems(written(tmp_path), signatures) == []


def test_fields_that_are_not_needed_are_left_out(signatures, tmp_path):
    """A number, numbers of four and eight bytes, a request of another kind, and a request without a signature."""
    made = message("PredictionLog")()
    made.predict_log.request.model_spec.name = "reviews"
    record = b"\x08\x96\x01" + b"\x15abcd" + b"\x19abcdefgh" + b"\x0a\x02ab" + made.SerializeToString()
    assert problems(written(tmp_path, record), signatures) == []
    assert signatures.called == [("serving_default", {})]


def test_a_file_that_is_cut_short_has_an_error_in_its_last_request(exported, signatures, tmp_path):
    shutil.copytree(exported.path / "assets.extra", tmp_path / "assets.extra")
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-3])
    (found,) = problems(tmp_path, signatures)
    last = len(list(requests(exported.path)))
    assert found.startswith(f"{FILE} has an error from request {last} on, with which no server loads it: DataLossError")


@pytest.mark.parametrize(
    "record, problem",
    [
        (lambda: b'{"inputs": ["a"]}', "ValueError: a field .*"),
        (lambda: log("embed", text=["a"])[:-2], "ValueError: a field is longer than its message"),
        (lambda: b"\x32\x80", "ValueError: a number has no end"),
        (lambda: b"\x33", "ValueError: a field of the unknown type 3"),
        (lambda: log("no", text=["a"]), "KeyError: 'no'"),
        (lambda: log("embed", texts=["a"]), "KeyError: 'texts'"),
        (lambda: log("tokens", token_ids=[[99]], lengths=[1]), "RuntimeError: assertion failed: 99"),
        (
            lambda: log("tokens", token_ids=[[1.0]], lengths=[1]),
            "TypeError: the input 'token_ids' has the dtype float32, not int32",
        ),
    ],
)
def test_the_first_request_that_fails_is_named(signatures, tmp_path, record, problem):
    written(tmp_path, log("embed", text=["a"]), record(), log("no"))
    (found,) = problems(tmp_path, signatures)
    assert re.fullmatch(f"{FILE} has an error in request 2, with which no server loads it: {problem}", found)


def test_a_server_takes_at_most_a_thousand_requests(signatures, tmp_path):
    (found,) = problems(written(tmp_path, *[b""] * 1001), signatures)
    assert found == f"{FILE} has more than 1000 requests, with which no server loads it"


def test_after_a_minute_requests_are_only_read(signatures, tmp_path, monkeypatch):
    from keras_tx.serving.check import warmup_requests

    monkeypatch.setattr(warmup_requests, "SECONDS", -1)
    written(tmp_path, log("no", text=["a"]), b"\x33")
    (found,) = problems(tmp_path, signatures)
    assert "in request 2" in found and not signatures.called

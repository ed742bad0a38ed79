"""The local server answers over HTTP as TensorFlow Serving's documentation of its REST interface says."""

import base64
import contextlib
import http.client
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow_text")  # brings the ops of the graph
from keras_tx.serving import rest, rest_json, serve
from keras_tx.serving.rest_json import RestError
from tests import forked
from tests.serving.conftest import LABELS

pytestmark = pytest.mark.tensorflow
TEXTS = ["the cat sat", "not wonderful", ""]


@pytest.fixture(scope="module")
def server(exported):
    with serve.Server(exported.path.parent, largest_body=100_000) as server:
        server.load()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def ask(server):
    """Sends a request; returns the status and the JSON value of the answer."""

    def ask(method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path, content, headers or {})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        assert response.getheader("Content-Type") == "application/json"
        return response.status, json.loads(answer)

    return ask


def expected(exported, texts):
    import tensorflow as tf

    answer = exported.signatures["serving_default"](text=tf.constant(texts))
    return [label.decode() for label in answer["label"].numpy()], answer["probabilities"].numpy()


# Payloads


def test_rows_get_rows_and_columns_get_columns(ask, exported):
    labels, probabilities = expected(exported, TEXTS)
    status, rows = ask("POST", "/v1/models/reviews:predict", {"instances": TEXTS})
    assert status == 200
    assert [row["label"] for row in rows["predictions"]] == labels
    found = np.array([row["probabilities"] for row in rows["predictions"]], "float32")
    np.testing.assert_allclose(found, probabilities, atol=1e-6)
    for inputs in (TEXTS, {"text": TEXTS}):
        status, columns = ask("POST", "/v1/models/reviews/versions/1:predict", {"inputs": inputs})
        assert status == 200 and columns["outputs"]["label"] == labels
        assert columns["outputs"]["probabilities"] == [row["probabilities"] for row in rows["predictions"]]


def test_named_rows_are_the_ids_of_their_columns(ask):
    body = {"signature_name": "tokens", "instances": [{"token_ids": [2, 6, 3], "lengths": 3}] * 2}
    columns = {"signature_name": "tokens", "inputs": {"token_ids": [[2, 6, 3]] * 2, "lengths": [3, 3]}}
    rows = ask("POST", "/v1/models/reviews:predict", body)[1]["predictions"]
    outputs = ask("POST", "/v1/models/reviews:predict", columns)[1]["outputs"]
    assert [row["label"] for row in rows] == outputs["label"] and len(rows) == 2


def test_bytes_in_base64_are_the_text(ask):
    b64 = {"b64": base64.b64encode("café".encode()).decode()}
    assert (
        ask("POST", "/v1/models/reviews:predict", {"instances": [b64, "the"]})[1]["predictions"][0]
        == ask("POST", "/v1/models/reviews:predict", {"instances": ["café", "the"]})[1]["predictions"][0]
    )


def test_a_single_output_has_no_name(ask, exported):
    body = {"signature_name": "embed", "inputs": ["the cat"]}
    embedding = ask("POST", "/v1/models/reviews:predict", body)[1]["outputs"]
    assert np.shape(embedding) == (1, 8)
    rows = ask("POST", "/v1/models/reviews:predict", {"signature_name": "embed", "instances": ["the cat"]})[1]
    assert rows == {"predictions": embedding}


def test_classify_takes_examples_and_their_context(ask, exported):
    probabilities = expected(exported, TEXTS[:2])[1]
    body = {"signature_name": "classify", "examples": [{"text": TEXTS[0]}, {"text": [TEXTS[1]]}]}
    status, answer = ask("POST", "/v1/models/reviews:classify", body)
    assert status == 200 and [[label for label, _ in row] for row in answer["results"]] == [LABELS] * 2
    np.testing.assert_allclose([[score for _, score in row] for row in answer["results"]], probabilities, atol=1e-6)
    shared = {"signature_name": "classify", "context": {"text": TEXTS[0]}, "examples": [{}]}
    assert ask("POST", "/v1/models/reviews:classify", shared)[1]["results"] == answer["results"][:1]


def test_explain_gives_nested_lists(ask):
    body = {"signature_name": "explain", "inputs": ["the cat"]}
    outputs = ask("POST", "/v1/models/reviews:predict", body)[1]["outputs"]
    assert outputs["tokens"] == [["[CLS]", "the", "cat", "[SEP]"]]
    assert np.shape(outputs["scores"]) == (1, 2, 2, 4, 4)
    np.testing.assert_allclose(np.sum(outputs["scores"], axis=-1), 1, atol=1e-6)


def test_status_and_metadata_name_the_version(ask):
    status = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/reviews", "/v1/models/reviews/versions/1"):
        assert ask("GET", path) == (200, {"model_version_status": [status]})
    answer = ask("GET", "/v1/models/reviews/metadata")[1]
    assert answer["model_spec"] == {"name": "reviews", "signature_name": "", "version": "1"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["tokens"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    ids = signature["inputs"]["token_ids"]
    assert ids["dtype"] == "DT_INT32" and [size["size"] for size in ids["tensor_shape"]["dim"]] == ["-1", "-1"]


# Errors

PREDICT = "/v1/models/reviews:predict"
TOKENS = {"signature_name": "tokens"}
ROW = "Failed to process element: 0"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (PREDICT, b"", 400, "JSON Parse error: The document is empty"),
        (PREDICT, b'{"instances": [', 400, "JSON Parse error: Expecting value at offset: 15"),
        (PREDICT, b"\xff", 400, "JSON Parse error: 'utf-8' codec"),
        (PREDICT, b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}", 400, "nested more than 100 levels"),
        (PREDICT, ["a"], 400, "Is not object"),
        (PREDICT, {}, 400, "Missing 'inputs' or 'instances' key"),
        (PREDICT, {"instances": ["a"], "inputs": ["a"]}, 400, "expecting only one of 'inputs' or 'instances'"),
        (PREDICT, {"instances": "a"}, 400, "Excepting 'instances' to be an list/array"),
        (PREDICT, {"instances": []}, 400, "No values in 'instances' array"),
        (PREDICT, {"signature_name": 1, "instances": ["a"]}, 400, "'signature_name' key must be a string value"),
        (PREDICT, {"signature_name": "no", "instances": ["a"]}, 400, 'name: "no" not found in signature def'),
        (PREDICT, {"instances": [5]}, 400, "JSON Value: 5 Type: Number is not of expected type: string"),
        (PREDICT, {"instances": [None]}, 400, "JSON Value: null Type: Null is not of expected type: string"),
        (PREDICT, {"instances": ["a", {"text": "a"}]}, 400, "Expecting value/list but got object at item 1"),
        (PREDICT, {"instances": [{"text": "a"}, "a"]}, 400, "Expecting object but got list at item 1"),
        (PREDICT, {"instances": [{"words": "a"}]}, 400, f"{ROW} key: words of 'instances' list. Error: INVALID_ARG"),
        (PREDICT, {"instances": [{}]}, 400, "keys must be equal to: text"),
        (PREDICT, {"instances": ["a", ["a"]]}, 400, "Expecting shape [] but got: [1]"),
        (PREDICT, {"instances": ["a", ["a", "b"]]}, 400, "Expecting tensor size: 1 but got: 2"),
        (PREDICT, {"instances": [{"b64": "?"}]}, 400, "Unable to base64 decode"),
        (PREDICT, {"inputs": {"text": [{"b": 1}]}}, 400, "not formatted correctly for base64 data"),
        (PREDICT, {"inputs": {}}, 400, "Missing named input: text in 'inputs' object."),
        (PREDICT, {"inputs": ["a", ["b"]]}, 400, "Encountered list at unexpected level: 1 expected < 1"),
        (PREDICT, {"inputs": [["a"], "b"]}, 400, "found at incorrect level: 2 in the JSON DOM. Expected at level: 2"),
        (PREDICT, TOKENS | {"inputs": [[1], [2, 3]]}, 400, "inputs is a plain value/list, but expecting an object"),
        (PREDICT, TOKENS | {"instances": [[1]]}, 400, "instances is a plain list, but expecting list of objects"),
        (PREDICT, TOKENS | {"instances": [{"b64": "YQ=="}]}, 400, "instances is a plain list, but expecting list of"),
        (PREDICT, {"instances": json.loads("[" * 40 + "1" + "]" * 40)}, 400, "must have at most 31 levels of lists"),
        (PREDICT, TOKENS | {"inputs": {"token_ids": [[1], [2, 3]], "lengths": [1, 2]}}, 400, "at unexpected size: 2"),
        (PREDICT, TOKENS | {"inputs": {"token_ids": [[1.5]], "lengths": [1]}}, 400, "1.5 Type: Number is not of"),
        (PREDICT, TOKENS | {"inputs": {"token_ids": [[True]], "lengths": [1]}}, 400, "true Type: True is not of"),
        (PREDICT, TOKENS | {"inputs": {"token_ids": [[2**31]], "lengths": [1]}}, 400, "not of expected type: int32"),
        (PREDICT, TOKENS | {"inputs": {"token_ids": [[999]], "lengths": [1]}}, 400, "token_ids must be in [0, 71)"),
        (PREDICT, {"inputs": [["a"]]}, 400, "The input text must have the shape [None]. Received: shape [1, 1]"),
        (PREDICT, {"inputs": "a"}, 400, "The input text must have the shape [None]. Received: shape []"),
        (PREDICT, TOKENS | {"inputs": {"token_ids": [1], "lengths": [1]}}, 400, "input token_ids must have the shape"),
        ("/v1/models/reviews:classify", {"examples": [{}]}, 400, "No classification inputs found"),
        ("/v1/models/reviews:regress", {"examples": [{}]}, 400, "No regression inputs found"),
        ("/v1/models/reviews:classify", {"signature_name": "no", "examples": [{}]}, 400, "No signature was found with"),
        ("/v1/models/reviews:regress", {"signature_name": "classify", "examples": [{}]}, 400, "Expected regress sig"),
        ("/v1/models/reviews:classify", {}, 400, "key 'examples' is expected and was not found"),
        ("/v1/models/reviews:classify", {"examples": {}}, 400, "Expecting 'examples' value to be an list/array"),
        ("/v1/models/reviews:classify", {"examples": []}, 400, "'examples' value is an empty array"),
        ("/v1/models/reviews:classify", {"examples": ["a"]}, 400, "Example must be JSON object but got JSON String"),
        ("/v1/models/reviews:classify", {"examples": [{"text": [None]}]}, 400, "Feature: text has element with"),
        ("/v1/models/reviews:classify", {"examples": [{"text": ["a", 1]}]}, 400, "Unexpected element type in feature"),
        ("/v1/models/reviews:classify", {"examples": [{"text": 2**64}]}, 400, "Only int64 is supported"),
        ("/v1/models/films:predict", {"instances": ["a"]}, 404, "Servable not found for request: Latest(films)"),
        ("/v1/models/reviews/versions/7:predict", {"instances": ["a"]}, 404, "Specific(reviews, 7)"),
        ("/v1/models/reviews/labels/stable:predict", {}, 400, "Unrecognized servable version label: stable"),
        (f"/v1/models/reviews/versions/{2**63}:predict", {}, 400, "to numeric"),
        ("/v1/models/reviews:ask", {"instances": ["a"]}, 400, "Malformed request: POST /v1/models/reviews:ask"),
        ("/predict", {"instances": ["a"]}, 404, "Not Found"),
        (PREDICT, b" " * 100_001, 413, "The request must have at most 100000 bytes. Received: 100001 bytes"),
    ],
)
def test_a_request_that_is_wrong_gets_the_status_and_the_reason(ask, path, body, status, message):
    found, answer = ask("POST", path, body)
    assert found == status and list(answer) == ["error"]
    assert message in answer["error"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/v1/models/films", 404, "Could not find any versions of model films"),
        ("/v1/models/reviews/versions/2", 404, "Could not find version 2 of model reviews"),
        ("/v1/models/films/metadata", 404, "Servable not found for request: Latest(films)"),
        ("/v1/models/reviews:predict", 400, "Malformed request: GET /v1/models/reviews:predict"),
        ("/v2", 404, "Not Found"),
    ],
)
def test_a_wrong_address_gets_the_status_and_the_reason(ask, path, status, message):
    assert ask("GET", path) == (status, {"error": message})


def test_errors_of_http_itself_are_json_too(ask):
    assert ask("PUT", PREDICT, {}) == (501, {"error": "Unsupported method ('PUT')"})
    assert ask("POST", PREDICT, b"", {"Content-Length": "many"})[0] == 411
    status, answer = ask("POST", PREDICT, b"", {"Content-Length": "9" * 5000})
    assert status == 413 and answer["error"].endswith("Received: a Content-Length of 5000 digits")


def test_a_connection_with_an_unread_body_ends(server):
    for method, path in (("PUT", PREDICT), ("GET", PREDICT.removesuffix(":predict"))):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        with contextlib.closing(connection):
            connection.request(method, path, b"GET /injected HTTP/1.1\r\n\r\n")
            answer = connection.getresponse()
            answer.read()
            assert answer.getheader("Connection") == "close"


def test_a_version_of_thousands_of_digits_and_a_feature_that_is_no_text_are_refused(ask):
    assert ask("GET", f"{PREDICT.removesuffix(':predict')}/versions/{'0' * 5000}1")[0] == 200
    status, answer = ask("GET", f"{PREDICT.removesuffix(':predict')}/versions/{'9' * 5000}")
    assert status == 400 and answer["error"].startswith("Failed to convert version: 999")
    body = {"signature_name": "classify", "examples": [{"\ud800": "a"}]}
    status, answer = ask("POST", PREDICT.replace(":predict", ":classify"), body)
    assert status == 400 and answer["error"].startswith("Feature names must be Unicode texts")


def test_connections_wait_while_the_server_is_busy(exported):
    with serve.Server(exported.path.parent) as server, contextlib.ExitStack() as open_ones:
        server.server_activate()
        for _ in range(60):  # none of them is accepted yet
            address = "127.0.0.1", server.server_port
            open_ones.enter_context(socket.create_connection(address, timeout=5))


def test_numbers_of_other_dtypes_convert_or_fail():
    def convert(value, dtype):
        return rest_json.tensors_of({"inputs": [value]}, {"x": dtype})[0]["x"]

    assert convert(0.1, "float32") == np.float32(0.1) and convert(3, "float64") == 3 and convert(True, "bool")
    assert np.isnan(convert(float("nan"), "float32")) and convert(float("inf"), "float32") == np.inf
    for value, dtype in ((2**24, "float32"), (1e39, "float32"), (10**400, "float64")):
        with pytest.raises(RestError, match="without loss of precision"):
            convert(value, dtype)


def test_outputs_become_json_with_the_fewest_digits():
    arrays = {"a_bytes": np.array([b"\xff"], object), "b": np.array([[0.1]], "float32"), "c": np.zeros((1, 2, 0))}
    expected = {"a_bytes": [{"b64": "/w=="}], "b": [[0.1]], "c": [[[], []]]}
    assert rest_json.predictions(arrays, by_row=False) == {"outputs": expected}
    row = {name: value[0] for name, value in expected.items()}
    assert rest_json.predictions(arrays, by_row=True) == {"predictions": [row]}
    for shape in ((), (0, 3), (2, 0), (2, 3, 4), (3, 0, 2)):
        numbers = np.arange(np.prod(shape), dtype="float32").reshape(shape)
        assert rest_json.to_json(numbers) == numbers.tolist()
    with pytest.raises(RestError, match="c has inconsistent batch size: 2 expecting: 1"):
        rest_json.predictions({"b": np.zeros(1), "c": np.zeros(2)}, by_row=True)
    with pytest.raises(RestError, match="b has no shape information"):
        rest_json.predictions({"b": np.zeros(())}, by_row=True)


# The server


def test_threads_get_the_answers_to_their_own_requests(ask):
    alone = {text: ask("POST", PREDICT, {"instances": [text]}) for text in TEXTS}
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: (text, ask("POST", PREDICT, {"instances": [text]})), TEXTS * 8))
    assert all(answer == alone[text] for text, answer in together)


def test_a_connection_serves_several_requests(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    for body in ('{"instances": ["the"]}', "no", '{"instances": ["cat"]}'):
        connection.request("POST", PREDICT, body)
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (400 if body == "no" else 200, True)
    connection.close()


def test_the_page_names_the_model_and_needs_nothing_from_elsewhere(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", "/?text=dull")
    response = connection.getresponse()
    page = response.read().decode()
    connection.close()
    assert response.status == 200 and response.getheader("Content-Type") == "text/html; charset=utf-8"
    assert (
        '<body data-name="reviews" data-generation="{}">' in page
        and "Version 1." in page
        and "not for production" in page
    )
    assert '<div id="pair" hidden>' in page and '<textarea id="text_pair"' in page
    assert "{{" not in page and "://" not in page and "innerHTML" not in page


def test_a_name_is_escaped_on_the_page(exported, server, monkeypatch):
    monkeypatch.setattr(server.model, "name", '"><script>')
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", "/")
    assert b'data-name="&quot;&gt;&lt;script&gt;"' in connection.getresponse().read()
    connection.close()


def test_the_page_has_the_options_with_which_a_model_writes(exported, generator, server, monkeypatch):
    generation = rest.ServedModel(generator.path.parent).generation
    assert generation == json.loads((generator.path / "MODEL_CARD.json").read_text())["generation"]
    assert generation["strategy"]["kind"] == "Beam" and server.model.generation == {}
    monkeypatch.setattr(server.model, "generation", {"strategy": '">'})
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", "/")
    assert b'data-generation="{&quot;strategy&quot;: &quot;\\&quot;&gt;&quot;}"' in connection.getresponse().read()
    connection.close()


def test_the_page_is_in_the_wheel():
    root = Path(__file__).resolve().parents[2]
    assert "keras_tx.serving = page.html" in (root / "setup.cfg").read_text().splitlines()


def test_the_newest_version_is_served(tmp_path):
    for name in ("2", "10", "incomplete-a", "30"):
        (tmp_path / name).mkdir()
    for name in ("2", "10", "incomplete-a"):
        (tmp_path / name / "saved_model.pb").touch()
    assert rest.latest_version(tmp_path).name == "10"


def test_a_folder_without_a_version_ends_the_command(exported, tmp_path, capsys):
    for folder, hint in (
        (tmp_path, "Received"),
        (tmp_path / "none", "Received"),
        (exported.path, "the model's folder is"),
    ):
        with pytest.raises(SystemExit, match="2"):
            serve.main([str(folder)])
        printed = " ".join(capsys.readouterr().err.split())
        assert "`folder` must be a folder that `keras_tx.serving.export` wrote" in printed and hint in printed
    with pytest.raises(SystemExit, match="2"):
        serve.main(["gs://bucket/reviews"])
    assert "must be a local path, and not a URL. Received: folder='gs://bucket/reviews'" in capsys.readouterr().err


def test_a_port_that_is_taken_ends_the_command(exported, server, capsys):
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(exported.path.parent), "--port", str(server.server_port)])
    assert f"Received: 127.0.0.1, {server.server_port}: Address already in use" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(exported.path.parent), "--port", "99999"])
    assert "--port must be a number from 0 to 65535. Received: 99999" in capsys.readouterr().err


def test_the_command_says_where_it_answers(exported, monkeypatch, capsys):
    def stop(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve.Server, "serve_forever", stop)
    assert serve.main([str(exported.path.parent), "--port", "0", "--model-name", "films"]) == 0
    printed = capsys.readouterr().out
    assert "films, version 1: http://127.0.0.1:" in printed and "/v1/models/films:predict" in printed


def test_a_version_with_a_tokenizer_names_the_package_that_is_missing(exported):
    """In a process that has not loaded its ops."""
    code = """import sys
sys.modules["tensorflow_text"] = None
from keras_tx.serving import rest, serve
try:
    rest.ServedModel(sys.argv[1])
except ImportError as error:
    print(error)
serve.main(sys.argv[1:])"""
    arguments = ("-c", code, exported.path.parent, "--port", "0")
    process = forked.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process.stdout as file:
        printed = " ".join(file.read().split())
    assert process.wait(30) == 2
    reason = f"`{exported.path}` holds a tokenizer, which needs tensorflow_text. "
    reason += "Install it: pip install 'keras-tx[text]'"
    assert printed.count(reason) == 2 and printed.endswith(f"serve: error: {reason}")


def test_a_version_with_an_op_of_no_package_keeps_the_error_of_the_loader(exported, tmp_path):
    graph = (exported.path / "saved_model.pb").read_bytes()
    assert b"NormalizeUTF8" in graph
    shutil.copytree(exported.path, tmp_path / "7")
    (tmp_path / "7" / "saved_model.pb").write_bytes(graph.replace(b"NormalizeUTF8", b"NormalizeUTF9"))
    with pytest.raises((RuntimeError, FileNotFoundError), match="Op type not registered 'NormalizeUTF9'"):
        rest.ServedModel(tmp_path)


def test_a_server_answers_only_after_load(exported):
    with serve.Server(exported.path.parent) as server:
        handler = object.__new__(serve.Handler)
        handler.server = server
        with pytest.raises(RuntimeError, match="`Server.load` must be called"):
            handler._model()


def test_only_the_program_says_that_weights_do_not_change(tmp_path, monkeypatch, capsys):
    name = "TF_ONEDNN_ASSUME_FROZEN_WEIGHTS"
    monkeypatch.setenv(name, "0")  # so that it is put back at the end
    monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["serve", str(tmp_path / "missing")])
    with pytest.raises(SystemExit):
        serve.main([str(tmp_path / "missing")])
    assert name not in os.environ
    with pytest.raises(SystemExit):
        runpy.run_path(serve.__file__, run_name="__main__")
    assert os.environ[name] == "1"

"""Models on the JAX and PyTorch backends are exported by a TensorFlow process, and answer as on their own backend."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from keras_tx.generation import Beam, Greedy, Sample, Speculative
from keras_tx.generation.strategy import Strategy
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving import other_backends
from keras_tx.serving.card import FILE as CARD
from keras_tx.serving.export import export_on_tensorflow
from tests.serving.conftest import LABELS
from tests.serving.other_backend import IDS
from tests.serving.test_warmup import requests
from tests.serving.user_models import bag
from tests.tools import to_numpy

ROOT = Path(__file__).resolve().parents[2]


# Stands for the Python that `export` starts: it gives the job to this process, which has imported TensorFlow already.
PYTHON = """#!/bin/sh
echo "$3" > "$0.folder"
mv "$0.folder" "$0.job"
while [ -e "$0.job" ]; do sleep 0.05; done
"""


def answers(backend, folder, *what):
    """What a process on another backend exported, how it was refused, and what the Keras models answer there."""
    pytest.importorskip(backend)
    python, job = folder / "python", folder / "python.job"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.serving.other_backend", str(folder), *what]
    with open(folder / "errors", "w") as errors:
        process = subprocess.Popen(command, stderr=errors, env=environment, cwd=ROOT)
        while process.poll() is None:
            if job.exists():
                other_backends.main(job.read_text().strip(), export_on_tensorflow)
                job.unlink()
            time.sleep(0.05)
    assert process.returncode == 0, (folder / "errors").read_text()[-4000:]
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.tensorflow
def test_torch_exports_what_it_answers(tmp_path):
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  # has the operations of the graph

    found = answers("torch", tmp_path, "classifier", "refused")
    path = Path(found["classifier"]["path"])
    served = tf.saved_model.load(str(path)).signatures
    assert set(served) == {"serving_default", "tokens", "classify", "explain", "embed"}
    answer = served["tokens"](token_ids=tf.constant(IDS), lengths=tf.constant([4, 3]))
    exponentials = np.exp(found["classifier"]["logits"])
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=1e-6)
    assert [label.decode() for label in answer["label"].numpy()] == [LABELS[i] for i in probabilities.argmax(-1)]
    card = json.loads((path / CARD).read_text())
    assert card["model"]["backend"] == "torch" and card["labels"] == LABELS
    asked = list(requests(path))
    assert [inputs["token_ids"].tolist() for _, name, inputs in asked if name == "tokens"][-1] == IDS
    assert b"\xff" in [text for _, _, inputs in asked for text in inputs.get("text", [])]
    # An error in the TensorFlow process is raised in the process that exports.
    (kind, message), (other, missing) = found["refused"]
    assert kind == "ValueError" and "`model` must ignore padding, the id 0" in message
    assert other == "ValueError" and "can import. Received: ['Mine'] of __main__" in missing
    assert not (tmp_path / "refused").exists() or not list((tmp_path / "refused").iterdir())


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.tensorflow
def test_jax_exports_what_it_generates(tmp_path):
    import tensorflow as tf

    found = answers("jax", tmp_path, "language_model")["language_model"]
    served = tf.saved_model.load(found["path"]).signatures["serving_default"]
    answer = served(token_ids=tf.constant([IDS[0][:3]]), lengths=tf.constant([3]))
    generated = answer["token_ids"][0, : answer["lengths"][0]].numpy().tolist()
    assert IDS[0][:3] + generated == found["ids"]


def test_options_survive_json():
    options = {
        "strategy": Beam(3, length_penalty=0.5, num_return_sequences=2),
        "max_new_tokens": np.int64(5),
        "stop_tokens": (3, 5),
        "start_token": False,
        "forced_tokens": {0: 7, -1: 9},
        "forbidden_tokens": [[1, 2], [3]],
        "target": None,
    }
    opened = other_backends.options_from_json(json.loads(json.dumps(other_backends.options_to_json(options))))
    assert opened == {**options, "max_new_tokens": 5, "stop_tokens": [3, 5]}
    sets = {"stop_tokens": range(3, 5), "forbidden_tokens": {7, (1, np.int64(2))}}
    assert json.loads(json.dumps(other_backends.options_to_json(sets))) == {
        "stop_tokens": [3, 4],
        "forbidden_tokens": [7, [1, 2]],
    }
    sample = Sample(0.7, top_k=5, seed=3)
    for strategy in (Greedy(), sample, Speculative(sample, num_draft_tokens=4, max_ngram_size=2)):
        saved = json.loads(json.dumps(other_backends.options_to_json({"strategy": strategy})))
        assert other_backends.options_from_json(saved) == {"strategy": strategy}


class Another(Strategy):
    pass


def test_only_strategies_of_the_package_can_be_exported():
    with pytest.raises(
        ValueError, match="`generation` must have a strategy of keras_tx.*Received: strategy of type Another"
    ):
        other_backends.options_to_json({"strategy": Another()})
    model = keras.Sequential([keras.layers.Dense(2)], name="small")
    with pytest.raises(
        ValueError, match="strategy without a `draft_model`.*Received: draft_model=<Sequential name=small"
    ):
        other_backends.options_to_json({"strategy": Speculative(draft_model=model)})


def test_a_tokenizer_without_a_config_cannot_be_exported():
    with pytest.raises(ValueError, match="`source_tokenizer` must have `get_config`.*source_tokenizer of type object"):
        other_backends.tokenizer_to_json("source_tokenizer", object())


def test_a_model_that_answers_otherwise_there_is_refused():
    one = [np.array([[1.0, 200.0]]), np.zeros((0, 3))]
    other_backends.check_same_outputs("torch", one, [one[0] + 1e-3, one[1]])
    with pytest.raises(ValueError, match=r"of shape \(1, 2\) on torch, and \(1, 1\) on TensorFlow"):
        other_backends.check_same_outputs("torch", one, [one[0][:, :1], one[1]])
    for other in ([one[0] + 11, one[1]], [one[0] * np.nan, one[1]]):
        with pytest.raises(
            ValueError, match="`model` must answer on TensorFlow as it does on torch. Received: .*differ by"
        ):
            other_backends.check_same_outputs("torch", one, other)


@pytest.mark.process
@pytest.mark.parametrize(
    "commands, message", [("echo last >&2; exit 139", "exit code 139: last"), ("exit 1", "no message")]
)
def test_a_process_that_ends_without_a_word_is_an_error(make, tmp_path, monkeypatch, commands, message):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{commands}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(other_backends.sys, "executable", str(interpreter))
    arguments = dict(tokenizers={}, generation=None, labels=None, warmup=[], max_batch=1)
    arguments |= dict(precision="float32", constant_weights=None)
    with pytest.raises(RuntimeError, match=f"TensorFlow in a process of its own, which ended. Received: .*{message}"):
        other_backends.export_in_subprocess(make(), tmp_path / "reviews", **arguments)


@pytest.mark.process
def test_the_path_of_the_version_is_relative_if_that_of_the_export_is(make, tmp_path, monkeypatch):
    """As on TensorFlow; the process, which may run in another folder, gets the whole path."""
    interpreter = tmp_path / "python"
    interpreter.write_text(
        "#!/bin/sh\n"
        + sys.executable
        + """ - "$3" <<'END'
import json, pathlib, sys
job = pathlib.Path(sys.argv[1])
path = json.loads((job / "job.json").read_text())["path"]
(job / "result.json").write_text(json.dumps({"path": path + "/3"}))
(job.parent / "seen").write_text(path)
END
"""
    )
    interpreter.chmod(0o755)
    monkeypatch.setattr(other_backends.sys, "executable", str(interpreter))
    monkeypatch.setattr(other_backends.tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    arguments = dict(tokenizers={}, generation=None, labels=None, warmup=[], max_batch=1)
    arguments |= dict(precision="float32", constant_weights=None)
    for path, expected in (("reviews", "reviews/3"), (tmp_path / "reviews", tmp_path / "reviews" / "3")):
        assert other_backends.export_in_subprocess(make(), path, **arguments) == Path(expected)
        assert (tmp_path / "seen").read_text() == str(tmp_path / "reviews")


ACTIVATIONS = """
import keras

@keras.saving.register_keras_serializable("of_a_user")
def squared(x):
    return keras.ops.square(x)
"""


@pytest.fixture
def activations(tmp_path, monkeypatch):
    """A module of a user with a function that is registered with Keras."""
    (tmp_path / "activations_of_a_user.py").write_text(ACTIVATIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("activations_of_a_user")
    forget()


def forget():
    sys.modules.pop("activations_of_a_user", None)
    keras.saving.get_custom_objects().pop("of_a_user>squared", None)


@pytest.fixture
def export_there(tmp_path, monkeypatch):
    """Exports in this process, which forgets the user's module before, and returns what the loaded model answers."""
    answers = []

    def keep(model, path, **options):
        answers.append(to_numpy(model(np.array(IDS))))
        return Path(path) / "1"

    def run(command, **options):
        forget()
        other_backends.main(command[3], keep)

    def export_there(model):
        arguments = dict(tokenizers={}, generation=None, labels=None, warmup=[], max_batch=1)
        arguments |= dict(precision="float32", constant_weights=None)
        other_backends.export_in_subprocess(model, tmp_path / "reviews", **arguments)
        return answers[-1]

    monkeypatch.setattr(other_backends.subprocess, "run", run)
    return export_there


def test_functions_of_modules_are_found_there(activations, export_there):
    model = bag(layer=keras.layers.Dense(3, activation=activations.squared))
    expected = to_numpy(model(np.array(IDS)))
    np.testing.assert_allclose(export_there(model), expected, atol=1e-6)


def test_what_a_model_was_compiled_with_need_not_be_found_there(activations, export_there, monkeypatch):
    model = bag()
    monkeypatch.setattr(activations.squared, "__module__", "__main__")
    model.compile("adam", "mse", metrics=[activations.squared])
    assert export_there(model) is not None


def test_texts_that_are_compared_have_the_end_at_which_they_are_classified():
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 14, "num_heads": 3, "num_layers": 1, "eos_token_id": 2}
    model = PretrainedModel({"model_type": "t5", "vocab_size": 23, **sizes}, "sequence_classification")
    assert all(np.isfinite(one).all() for one in other_backends._outputs_of_probe(model))


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_texts_that_are_compared_fit_into_the_positions(make, count):
    model = make(embedding_options={"position_encoding": "learned", "max_length": count})
    (found,) = other_backends._outputs_of_probe(model)
    length = min(count, 5)
    rows = np.resize([1, 0, 1, 1, 0, 1, 1], 2 * length).reshape(2, length)
    np.testing.assert_array_equal(found, to_numpy(model(rows, training=False)))


def test_functions_that_cannot_be_found_there_are_named(activations, export_there, monkeypatch):
    model = bag(layer=keras.layers.Dense(3, activation=activations.squared))
    with monkeypatch.context() as patch:
        patch.setattr(activations.squared, "__module__", "__main__")
        with pytest.raises(ValueError, match=r"classes and functions in .* Received: \['squared'\] of __main__"):
            export_there(model)
    monkeypatch.setattr(activations.squared, "__module__", "tests")
    rule = "`model` must be one that a process of TensorFlow can load: .*registered with Keras.* Received: .*squared"
    with pytest.raises(ValueError, match=rule):
        export_there(model)


def test_code_of_lambda_layers_is_run_there_if_it_may_be_here(export_there, monkeypatch):
    model = bag(layer=keras.layers.Lambda(lambda x: 2 * x, output_shape=(2,), name="doubled"))
    with pytest.raises(ValueError, match="must not have a Lambda layer .* Received: the layer 'doubled'"):
        export_there(model)
    expected = to_numpy(model(np.array(IDS)))
    monkeypatch.setattr(other_backends, "is_unsafe_deserialization_enabled", lambda: True)
    np.testing.assert_allclose(export_there(model), expected, atol=1e-6)


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (ValueError("this"), ValueError, "this"),
        (PermissionError("there"), OSError, "PermissionError: there"),
        (KeyError("key"), RuntimeError, "KeyError: 'key'"),
    ],
)
def test_an_error_there_is_the_error_here(tmp_path, error, kind, message):
    def fail(*args, **kwargs):
        raise error

    (tmp_path / "job.json").write_text("{")  # is read first, and fails by itself
    other_backends.main(tmp_path, fail)
    assert json.loads((tmp_path / "result.json").read_text())["error"] == "ValueError"
    with pytest.raises(kind, match=message):
        other_backends.raise_again(other_backends.error_to_json(error))

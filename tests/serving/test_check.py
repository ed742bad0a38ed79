"""`check` finds what would keep a version from answering on a stock server."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_tx
from keras_tx.serving import check
from keras_tx.serving.check import audit
from keras_tx.serving.check.__main__ import main
from keras_tx.serving.parity import FILE as PARITY
from keras_tx.serving.warmup import FILE as WARMUP
from tests.serving.conftest import only_signatures
from tests.tools import assert_close, randomize

pytestmark = pytest.mark.tensorflow


def off_by_a_thousandth(answers):
    answers["probabilities"][2][1] += 1e-3


def not_a_number(answers):
    answers["probabilities"][0][0] = float("nan")
    answers["label"][1] = "another"


def tampered(tamper):
    def make(folder):
        answers = json.loads((folder / PARITY).read_text())
        tamper(answers)
        (folder / PARITY).write_text(json.dumps(answers))

    return make


def another_label(answers):
    answers["labels"][0][0] = "another"


def without_variables(folder):
    shutil.rmtree(folder / "variables")


def unservable(folder):
    """What TensorFlow and tensorflow_text can do here and a stock server cannot, a signature each."""
    import keras
    import tensorflow as tf
    import tensorflow_text as tf_text

    numbers = tf.TensorSpec([None], tf.float32, "numbers")
    text = tf.TensorSpec([None], tf.string, "text")
    several = [text, tf.TensorSpec([None, 3], tf.int64, "ids"), tf.TensorSpec(None, tf.float16, "any_rank")]
    doubled = tf.function(lambda numbers: 2 * numbers, jit_compile=True)
    trimmer = tf_text.RoundRobinTrimmer(2)

    def function(function, *signature):
        return tf.function(function, input_signature=signature).get_concrete_function()

    signatures = {
        "serving_default": function(lambda numbers: {"y": keras.ops.slice_update(numbers, [0], numbers[:1])}, numbers),
        "python": function(lambda numbers: {"y": tf.py_function(lambda x: x, [numbers], tf.float32)}, numbers),
        "compiled": function(lambda numbers: {"y": doubled(numbers)}, numbers),
        "trimmer": function(
            lambda text: {"y": trimmer.trim([tf.RaggedTensor.from_tensor(text[:, None])])[0].values}, text
        ),
        "in_order": function(lambda text, ids, any_rank: {"text": text, "ids": ids, "any_rank": any_rank}, *several),
    }
    shutil.rmtree(folder)
    tf.saved_model.save(tf.Module(), str(folder), signatures=signatures)
    (folder / PARITY).parent.mkdir()
    (folder / PARITY).write_text("{}")


def cut_short(folder):
    whole = (folder / "saved_model.pb").read_bytes()
    (folder / "saved_model.pb").write_bytes(whole[: len(whole) // 2])


def damaged_warmup(folder):
    (folder / WARMUP).write_bytes(b"garbage" * 20)


def off_in_one_number(wrong):
    """Changes the first number of the first answer that has one."""

    def tamper(answers):
        (row, *_) = next(rows for rows in answers["signatures"].values() if rows)
        key = next(key for key, value in row["outputs"].items() if isinstance(np.ravel(value)[0], float))
        whole = np.array(row["outputs"][key])
        row["outputs"][key] = (whole + np.where(np.arange(whole.size) == 0, wrong, 0.0).reshape(whole.shape)).tolist()

    return tamper


def another_word(answers):
    """Changes a best word that is compared."""
    rows = answers["signatures"]["serving_default"]
    place = next(place for row in rows for place in row["outputs"]["words"][0] if place[0] is not None)
    place[0] = "another"


def off_by_thrice_and_by_a_hundred_times_the_tolerance(answers):
    answers["tolerance"] = 1.0
    answers["probabilities"][0][0] += 3.0
    first, second, *_ = answers["signatures"]["serving_default"]
    first["tolerance"] = 1.0
    first["outputs"]["probabilities"][0][0] -= 3.0
    second["outputs"]["probabilities"][0][0] -= 1e-3


@pytest.fixture(scope="module")
def copies(exported, multi_label, pairs, tokenizer, tmp_path_factory):
    """Versions in order, and copies of them that each have something wrong."""
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    encoder = keras.Model(ids, keras_tx.layers.Encoder(1, 8, 2)(keras_tx.layers.TokenEmbedding(7, 6)(ids)))
    words = keras_tx.text.BertTokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "runs"])
    folder = tmp_path_factory.mktemp("saved_models")
    folders = {
        "classifier": exported.path,
        "encoder": keras_tx.serving.export(encoder, folder / "encoder", tokenizer=words),
        "multi_label": multi_label.path,
        "pairs": pairs.path,
        **masked_models(folder, tokenizer),
    }
    makers = {
        "off_by_a_thousandth": ("classifier", tampered(off_by_a_thousandth)),
        "off_by_times": ("classifier", tampered(off_by_thrice_and_by_a_hundred_times_the_tolerance)),
        "not_a_number": ("classifier", tampered(not_a_number)),
        "masked_another": ("masked_bfloat16", tampered(another_word)),
        "multi_label_another": ("multi_label", tampered(another_label)),
        "pairs_off_by_a_thousandth": ("pairs", tampered(off_by_a_thousandth)),
        "without_variables": ("classifier", without_variables),
        "unservable": ("classifier", unservable),
        "cut_short": ("classifier", cut_short),
        "damaged_warmup": ("classifier", damaged_warmup),
        "encoder_off_by_half": ("encoder", tampered(off_in_one_number(0.5))),
        "encoder_not_a_number": ("encoder", tampered(off_in_one_number(float("nan")))),
    }
    for name, (original, make) in makers.items():
        folders[name] = folder / name / "1"
        shutil.copytree(folders[original], folders[name])
        make(folders[name])
    return folders


def masked_models(folder, tokenizer):
    """Versions of masked language models in a lower precision, with near ties and with a clear best word."""
    sizes, found = dict(num_layers=1, hidden_dim=24, num_heads=3, intermediate_dim=17), {}
    with only_signatures("serving_default", "tokens"):
        for name, policy, precision in (
            ("masked_bfloat16", "float32", "bfloat16"),
            ("masked_mixed", "mixed_bfloat16", "float32"),
        ):
            keras.utils.set_random_seed(3)
            model = randomize(keras_tx.models.MaskedLM(tokenizer.vocabulary_size, dtype=policy, **sizes), scale=0.5)
            options = {"tokenizer": tokenizer, "precision": precision, "constant_weights": False}
            found[name] = keras_tx.serving.export(model, folder / name, **options)
    return found


@pytest.fixture(scope="module")
def command(copies):
    """What the command does with a version that cannot be read."""
    arguments = [sys.executable, "-m", "keras_tx.serving.check", str(copies["cut_short"])]
    return subprocess.run(arguments, capture_output=True, text=True)


@pytest.fixture(scope="module")
def reports(copies, generator):
    """What `check` says of each: one clean process for all, where `check` itself starts one for each."""
    folders = {**copies, "generator": generator.path}
    script = Path(audit.__file__).with_name("clean_process.py")
    arguments = [sys.executable, "-P", str(script), *map(str, folders.values())]
    run = subprocess.run(arguments, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()[-len(folders) :]
    return {name: audit.report_of(path, line) for (name, path), line in zip(folders.items(), lines, strict=True)}


@pytest.mark.process
def test_a_version_in_order_is_reported_with_what_it_answers(reports, copies, monkeypatch, capsys):
    monkeypatch.setitem(main.__globals__, "check", lambda path: reports["classifier"])
    assert main([str(copies["classifier"])]) == 0
    first, *signatures, saved, parity = capsys.readouterr().out.splitlines()
    assert first == f"{copies['classifier']}: ok"
    assert all(re.search(r"; \d+\.\d ms$", line) for line in signatures)
    assert sorted(line.rpartition(";")[0] for line in signatures) == [
        "  classify: inputs string[-1] -> classes string[-1, 3], scores float32[-1, 3]",
        "  embed: text string[-1] -> embedding float32[-1, 8]",
        "  explain: text string[-1] -> label string[-1], probabilities float32[-1, 3], "
        "scores float32[-1, 2, 2, -1, -1], tokens string[-1, -1]",
        "  serving_default: text string[-1] -> label string[-1], probabilities float32[-1, 3]",
        "  tokens: lengths int32[-1], token_ids int32[-1, -1] -> label string[-1], probabilities float32[-1, 3]",
    ]
    assert saved == f"  saved by TensorFlow {version('tensorflow')}; an older server may not read it"
    assert parity.startswith("  clean process, XLA off: 40 requests, largest difference to the Keras model ")
    assert reports["classifier"].parity["difference"] <= 1e-6


@pytest.mark.process
@pytest.mark.slow
def test_the_command_prints_the_report_of_a_version_that_cannot_be_read_and_exits_with_1(command, reports, copies):
    first, problem = command.stdout.splitlines()
    assert command.returncode == 1 and "RuntimeWarning" not in command.stderr
    assert first == f"{copies['cut_short']}: NOT SERVABLE"
    assert problem.startswith("  problem: it does not load: DecodeError")
    assert str(reports["cut_short"]).splitlines() == [first, problem]  # `check` and the fixture see the same


def test_the_command_does_not_take_the_name_of_the_function():
    import keras_tx.serving.check.__main__

    assert keras_tx.serving.check is check and callable(check)


def test_no_version_at_all_is_exit_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path / "1")])
    assert error.value.code == 2
    assert f"`path` must be a version's folder, with a saved_model.pb. Received: path='{tmp_path}/1'" in (
        capsys.readouterr().err
    )
    with pytest.raises(FileNotFoundError, match="must be a version's folder.*Received: path='.*/1'"):
        check(tmp_path / "1")
    with pytest.raises(SystemExit, match="2"):
        main(["gs://bucket/reviews/1"])
    assert "must be a local path, and not a URL. Received: path='gs://bucket/reviews/1'" in capsys.readouterr().err
    for number in (7, 10):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}/saved_model.pb").touch()
    with pytest.raises(FileNotFoundError, match="version's folder.* The newest version there is '.*/10'$"):
        check(tmp_path)


@pytest.mark.process
def test_probabilities_that_are_not_the_live_models_are_a_problem(reports):
    report = reports["off_by_a_thousandth"]
    assert not report.ok
    assert report.problems == ["numbers differ from the Keras model's by 1.0e-03, over 1.0e-05"]


@pytest.mark.process
def test_the_difference_that_exceeds_its_tolerance_most_is_reported(reports):
    assert reports["off_by_times"].problems == ["numbers differ from the Keras model's by 1.0e-03, over 1.0e-05"]


@pytest.mark.process
def test_if_no_difference_exceeds_its_tolerance_the_largest_is_reported_with_its_own(reports, copies):
    """That of TensorFlow's Python loader and NumPy."""
    import tensorflow as tf

    signatures, found = tf.saved_model.load(str(copies["masked_bfloat16"])).signatures, []
    for name, rows in json.loads((copies["masked_bfloat16"] / PARITY).read_text())["signatures"].items():
        specs = signatures[name].structured_input_signature[1]
        for row in rows:
            inputs = {key: tf.constant(row["inputs"][key], spec.dtype) for key, spec in specs.items()}
            gaps = np.ravel(signatures[name](**inputs)["probabilities"]) - np.ravel(row["outputs"]["probabilities"])
            found.append((np.abs(gaps).max(initial=0), row["tolerance"]))
    difference, tolerance = max(found)
    report = reports["masked_bfloat16"]
    assert report.ok and 1e-3 < difference < tolerance
    assert report.parity["difference"] == pytest.approx(difference, rel=0.1)
    assert report.parity["tolerance"] == tolerance


@pytest.mark.process
def test_versions_with_several_labels_and_of_pairs_of_texts_are_in_order(reports):
    assert reports["multi_label"].ok and reports["multi_label"].parity["texts"] == 6 * 5
    assert reports["pairs"].ok and reports["pairs"].parity["texts"] == (7 + 2) * 5
    assert reports["multi_label_another"].problems == ["labels or texts differ from the Keras model's"]
    assert reports["pairs_off_by_a_thousandth"].problems == reports["off_by_a_thousandth"].problems


@pytest.mark.process
@pytest.mark.parametrize("name", ["masked_bfloat16", "masked_mixed"])
def test_words_that_rounding_may_change_are_no_problem(reports, copies, name):
    assert reports[name].ok, reports[name]
    rows = json.loads((copies[name] / PARITY).read_text())["signatures"]["tokens"]
    ids = [one for row in rows for place in row["outputs"]["top_ids"][0] for one in place]
    assert None in ids and any(one is not None for one in ids)  # some are compared, and some are not


@pytest.mark.process
def test_another_word_where_one_is_clearly_the_best_is_a_problem(reports):
    assert reports["masked_another"].problems == ["labels or texts differ from the Keras model's"]


@pytest.mark.process
def test_a_difference_that_is_no_number_and_another_label_are_problems(reports):
    assert reports["not_a_number"].problems == [
        "numbers differ from the Keras model's by nan, over 1.0e-05",
        "labels or texts differ from the Keras model's",
    ]


@pytest.mark.process
def test_missing_weights_are_a_problem(reports):
    (problem,) = reports["without_variables"].problems
    assert problem.startswith("it does not load: ") and "variables/variables" in problem


@pytest.mark.process
def test_warmup_requests_that_a_server_cannot_read_are_a_problem(reports):
    (problem,) = reports["damaged_warmup"].problems
    assert problem.startswith(f"{WARMUP} has an error from request 1 on, with which no server loads it: DataLossError")


@pytest.mark.process
def test_what_needs_xla_python_or_other_text_ops_is_named(reports):
    report = reports["unservable"]
    ops, runs = report.problems[:3], report.problems[3:]
    assert ops == [
        "the op EagerPyFunc cannot run on a stock server",
        "the op XlaDynamicUpdateSlice cannot run on a stock server",
        "the op TFText>RoundRobinTrim is not in a stock server",
    ]
    by_name = {problem.split()[0]: problem for problem in runs[:-1]}
    assert set(by_name) == {"serving_default", "python", "compiled"}
    assert all("fails on made-up inputs: " in problem for problem in by_name.values())
    assert "XLA compilation disabled" in by_name["compiled"]  # no Xla op tells of it: only running does
    assert runs[-1] == "it cannot answer what the Keras model did: KeyError: 'text'"
    assert report.signatures["python"]["outputs"] == {"y": ["float32", None]}
    assert "  python: numbers float32[-1] -> y float32[...]" in str(report).splitlines()


@pytest.mark.process
@pytest.mark.parametrize(
    "commands, problem",
    [
        ("echo 'a last line' >&2; exit 139", "it does not load and answer (exit code 139): a last line"),
        ("exit 1", "it does not load and answer (exit code 1): no message"),
        ("""echo '{"signatures": {}, "problems": []}'""", "it has no signatures, so nothing to answer"),
    ],
)
def test_a_server_that_dies_or_has_nothing_to_answer_is_a_problem(exported, tmp_path, monkeypatch, commands, problem):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{commands}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(audit.sys, "executable", str(interpreter))
    assert check(exported.path).problems == [problem]


@pytest.mark.process
def test_a_version_with_a_tokenizer_is_not_judged_without_tensorflow_text(exported, tmp_path, monkeypatch, capsys):
    (tmp_path / "sitecustomize.py").write_text('import sys\n\nsys.modules["tensorflow_text"] = None\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the separate process
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    with pytest.raises(SystemExit, match="^2$"):
        main([str(exported.path)])
    reason = f"`{exported.path}` holds a tokenizer, which needs tensorflow_text. "
    reason += "Install it: pip install 'keras-tx[text]'"
    assert capsys.readouterr().err.endswith(f"error: {reason}\n")


@pytest.mark.process
def test_a_server_that_takes_too_long_is_a_problem(exported, monkeypatch):
    monkeypatch.setattr(audit, "SECONDS", 0.01)
    assert check(exported.path).problems == ["it did not load and answer in 0.01 seconds"]


@pytest.mark.process
def test_answers_of_models_without_labels_are_compared_too(reports):
    assert reports["encoder"].ok and reports["encoder"].parity["texts"] > 1
    assert "numbers differ from the Keras model's by 5.0e-01" in reports["encoder_off_by_half"].problems[0]
    assert "numbers differ from the Keras model's by nan" in reports["encoder_not_a_number"].problems[0]


@pytest.mark.process
def test_a_generative_model_is_asked_what_it_takes(reports, generator):
    report = reports["generator"]
    assert report.ok, report
    rows = json.loads((generator.path / PARITY).read_text())["signatures"]
    assert set(rows) == set(report.signatures) == set(report.milliseconds) and all(rows.values())


def test_the_answers_that_check_compares_with_are_those_of_keras(exported, tokenizer, live):
    """So a report that is in order says that TensorFlow's C API, without Keras, answers as the Keras model."""
    answers = json.loads((exported.path / PARITY).read_text())
    rows = [(row["inputs"]["text"][0], row["outputs"]) for row in answers["signatures"]["serving_default"]]
    assert answers["text"] == [text for text, _ in rows][: len(answers["text"])]
    for index, (text, outputs) in enumerate(rows):
        expected = live(exported.model, token_ids=tokenizer(text)["token_ids"])
        assert_close(outputs["probabilities"][0], expected, atol=1e-6, rtol=0)
        if index < len(answers["text"]):
            assert_close(answers["probabilities"][index], expected, atol=1e-6, rtol=0)

"""The examples run as a newcomer runs them, outside the repository, on a file of a few lines."""

import csv
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import made_tables

pytestmark = [pytest.mark.tensorflow, pytest.mark.process]
REASON = re.compile(r"error: .*(cannot be read as|must have at least|must be a text)")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(tmp_path, name, *arguments, quiet=False, examples=EXAMPLES):
    """Runs an example in an empty folder and returns what it printed. A quiet one writes nothing to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # which a newcomer has not set
    command = [sys.executable, examples / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and not (quiet and done.stderr), done.stderr[-3000:]
    return done.stdout


def smaller(folder, name, *replaced):
    """A copy of the examples with (code, other code), so that one of them does less of what takes long."""
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("saved_models", "logs", "__pycache__"))
    code = (folder / name).read_text()
    for old, new in replaced:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    (folder / name).write_text(code)
    return folder


def few_signatures(*names):
    """For `smaller`: an example exports its model with these signatures alone, since tracing all takes long.

    What the others answer, and that a server can run them, is the matter of test_serve_example.py and tests/serving.
    """
    only = f"__import__('tests.serving.conftest', fromlist=['only_signatures']).only_signatures{names}"
    return "version = serving.export(", f"with {only}: version = serving.export("


def answers(folder, *texts):
    """What the first version of an export answers to texts."""
    pytest.importorskip("tensorflow_text")  # brings the ops of the graph
    import tensorflow as tf

    serve = tf.saved_model.load(str(folder / "1")).signatures["serving_default"]
    return [text.decode() for text in serve(text=tf.constant(texts))["text"].numpy()]


def attention_of(printed):
    """The sentence whose attention was drawn, and its translation."""
    lines = printed.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("-> ")]
    return lines[number - 1 : number + 1]


def test_classify_learns_a_small_table_of_one_s_own_as_well_as_a_bag_of_words(tmp_path):
    made_tables.write(tmp_path / "mine.csv", 230, 5)
    printed = run(
        tmp_path, "classify.py", "--data", "mine.csv", "--text-column", "message", "--label-column", "team", quiet=True
    )
    accuracy, of_bag = map(float, re.search(r"test accuracy (\S+); bag of words (\S+)", printed).groups())
    assert accuracy >= of_bag - 0.005 and accuracy >= 0.9 and "do not use this model" not in printed
    assert "saved_models/mine/1: ok" in printed and "film" not in printed
    texts = {row["message"] for row in csv.DictReader((tmp_path / "mine.csv").read_text().splitlines())}
    shown = [line.split(maxsplit=3)[3] for line in printed.splitlines() if re.match(r" +team \d [01]\.\d{3}  ", line)]
    assert len(shown) == 3 and all(any(line.startswith(text) for text in texts) for line in shown)
    for name in ("1/saved_model.pb", "training_curves.png", "attention.png", "confusion_matrix.png"):
        assert (tmp_path / "saved_models/mine" / name).stat().st_size > 1000


def test_classify_says_so_when_the_bag_of_words_is_better_and_its_old_name_runs_it(tmp_path):
    made_tables.write(tmp_path / "mine.csv", 230, 5)
    columns = ("--text-column", "message", "--label-column", "team")
    # What a server would say of the export is the matter of the test before.
    less = ("report = serving.check(version)", "report = __import__('types').SimpleNamespace(ok=True)")
    # With pairs of tokens, as for more rows: `export` refuses a model whose answers depend on padding.
    pairs = ('"pairs": 0, "stop_early": False', '"pairs": 97, "stop_early": False')
    examples = smaller(tmp_path / "examples", "classify.py", less, pairs)
    arguments = ("--data", "mine.csv", *columns, "--epochs", "1")
    printed = run(tmp_path, "classify_reviews.py", *arguments, examples=examples)
    assert re.search(
        r"^The bag of words is better by 0\.\d+: .* Try another number of --epochs", printed.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,label\n", "The file must hold at least one example. Received: 'mine.csv'"),
        (b"text,label\ngood,1\n", r"The file must hold at least two classes. Received: 'mine.csv' with ['1']"),
        (b"text,label\ngood,1\nbad,0\n", "must have at least two examples of some class"),
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe" * 9, "The file must be readable UTF-8 text. Received: 'mine.csv'"),
        (b"words,label\ngood,1\n", "`text_column` must name a column, one of ['words', 'label']."),
    ],
)
def test_files_that_hold_no_examples_are_refused_in_one_sentence(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_bytes(content)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["classify.py", "--data", "mine.csv"])
    with pytest.raises(SystemExit, match="^classify.py: .*" + re.escape(message)):
        runpy.run_path(str(EXAMPLES / "classify.py"))


def test_help_of_classify_says_what_a_file_looks_like(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["classify.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(EXAMPLES / "classify.py"))
    assert '    "Where is my parcel?",delivery' in capsys.readouterr().out


def test_translate_goes_from_parallel_files_to_translations_and_goes_on_where_it_stopped(tmp_path):
    english = ["a dog runs .", "two t-shirts sing .", "a cat , a dog ."] * 7
    for part in ("train", "val", "test"):
        (tmp_path / f"{part}.en").write_text("\n".join(english) + "\n")
        (tmp_path / f"{part}.de").write_text("\n".join(line.upper() for line in english) + "\n")
    arguments = ("--data", ".", "--source", "en", "--target", "de", "--epochs", "2")
    arguments += ("--num-layers", "1", "--hidden-dim", "32")
    examples = smaller(tmp_path / "examples", "translate.py", few_signatures("serving_default", "score"))
    printed = run(tmp_path, "translate.py", *arguments, quiet=True, examples=examples)
    score = float(re.search(r"test, beam 5: BLEU = (\S+)", printed)[1])
    assert "val_bleu" in printed and ("This model can't translate yet: it has learned from " in printed) == (score < 5)
    out = next((tmp_path / "saved_models").iterdir())
    request = shlex.quote(json.dumps({"instances": english[:1]}))
    assert f"curl -d {request} http://localhost:8501/v1/models/{out.name}:predict\n" in printed
    assert len((out / "test.txt").read_text().splitlines()) == 21
    for name in ("model.keras", "training_curves.png", "attention.png", "backup/backup.npz"):
        assert (out / name).stat().st_size > 1000
    assert answers(out, *english[:3]) == (out / "test.txt").read_text().splitlines()[:3]
    again = run(tmp_path, "translate.py", *arguments, "--resume", "--no-export")
    assert "Epoch 2/2" not in again and attention_of(again) == attention_of(printed)
    assert not (out / "2").exists()


def test_translate_names_a_folder_that_does_not_exist(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["translate.py", "--data", "nowhere"])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(EXAMPLES / "translate.py"))
    assert "--data must be a folder that exists. Received: nowhere" in capsys.readouterr().err


def test_write_text_streams_what_a_model_of_the_file_writes(tmp_path):
    (tmp_path / "mine.txt").write_text("the cat sat on the mat, the dog ran.\n" * 200)
    arguments = ("--data", "mine.txt", "--steps", "120", "--length", "30", "--prompt", "the c")
    sizes = "LAYERS, HEADS, WIDTH, CONTEXT, BATCH = {}, 4, {}, 64, 12"
    less = (
        (sizes.format(4, 128), sizes.format(1, 64)),
        ("LEARNING_RATE, WARM_UP = 1e-3, 100", "LEARNING_RATE, WARM_UP = 1e-2, 20"),
        few_signatures("serving_default", "score"),
    )
    examples = smaller(tmp_path / "examples", "write_text.py", *less)
    printed = run(tmp_path, "write_text.py", *arguments, quiet=True, examples=examples)
    assert "validation loss" in printed and "\nthe cat sat on the" in printed
    (answer,) = answers(tmp_path / "saved_models/write_text", "the c")
    assert answer.startswith("the cat sat on the") and len(answer) == len("the c") + 30


@pytest.mark.parametrize("content", [b"", b"one line\n", b"\x89PNG\r\n\x1a\n\xff\xfe" * 300, b"a\0b" * 1000])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("write_text.py", "--data train.en"), ("translate.py", "--data . --source en --target de")],
)
def test_a_file_that_is_no_text_to_learn_from_ends_the_example_with_the_reason(
    name, arguments, content, tmp_path, monkeypatch, capsys
):
    for part in ("train", "val", "test"):
        for language in ("en", "de"):
            (tmp_path / f"{part}.{language}").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / name))
    assert REASON.search(capsys.readouterr().err)

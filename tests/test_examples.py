"""The examples run as a newcomer runs them, outside the repository, on a file of a few lines."""

import argparse
import contextlib
import csv
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from keras_tx.internals.tensorflow_graphs import unoptimized
from keras_tx.serving.check import audit
from tests import made_tables

pytestmark = [pytest.mark.tensorflow, pytest.mark.process]
REASON = re.compile(r"error: .*(cannot be read as|must have at least|must be a text)")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ENGLISH = ["a dog runs .", "two t-shirts sing .", "a cat , a dog ."] * 7
# For `smaller`: translate.py compiles less.
TWO_BEAMS = ("BEAM = Beam(5,", "BEAM = Beam(2,")
# For `smaller`: what `serving.check` says is the matter of other tests here, of one process for several exports.
NOT_CHECKED = ("report = serving.check(version)", "report = __import__('types').SimpleNamespace(ok=True)")


def run(tmp_path, name, *arguments, quiet=False, examples=EXAMPLES):
    """Runs an example in an empty folder and returns what it printed. A quiet one writes nothing to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # which a newcomer has not set
    command = [sys.executable, examples / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and not (quiet and done.stderr), done.stderr[-3000:]
    return done.stdout


def run_here(folder, name, *arguments, examples=EXAMPLES):
    """As `run`, in this process, which has imported TensorFlow already and runs graphs as they are traced."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed), unoptimized():
        patch.chdir(folder)
        patch.syspath_prepend(examples)
        patch.setattr(os, "environ", dict(os.environ))
        patch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(examples / name), run_name="__main__")
    assert not end.value.code, printed.getvalue()[-3000:]
    return printed.getvalue()


def smaller(folder, name, *replaced):
    """A copy of the examples with (code, other code), so that one of them does less of what takes long.

    TensorFlow runs graphs as they are traced: to optimize them would take longer than they run.
    """
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("saved_models", "logs", "__pycache__"))
    with open(folder / "quiet.py", "a") as file:  # which all examples import first
        file.write('tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})\n')
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
    with unoptimized():
        return [text.decode() for text in serve(text=tf.constant(texts))["text"].numpy()]


def reports_on(*versions):
    """What `serving.check` says of versions: one clean process for all, where `check` itself starts one for each."""
    script = Path(audit.__file__).with_name("clean_process.py")
    done = subprocess.run([sys.executable, "-P", script, *versions], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()[-len(versions) :]
    return [audit.report_of(version, line) for version, line in zip(versions, lines, strict=True)]


def attention_of(printed):
    """The sentence whose attention was drawn, and its translation."""
    lines = printed.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("-> ")]
    return lines[number - 1 : number + 1]


def test_classify_learns_a_small_table_of_one_s_own_as_well_as_a_bag_of_words(tmp_path):
    made_tables.write(tmp_path / "mine.csv", 230, 5)
    arguments = ("--data", "mine.csv", "--text-column", "message", "--label-column", "team")
    printed = run(tmp_path, "classify.py", *arguments, quiet=True)
    accuracy, of_bag = map(float, re.search(r"test accuracy (\S+); bag of words (\S+)", printed).groups())
    assert accuracy >= of_bag - 0.005 and accuracy >= 0.9 and "do not use this model" not in printed
    assert "saved_models/mine/1: ok" in printed and "film" not in printed
    texts = {row["message"] for row in csv.DictReader((tmp_path / "mine.csv").read_text().splitlines())}
    shown = [line.split(maxsplit=3)[3] for line in printed.splitlines() if re.match(r" +team \d [01]\.\d{3}  ", line)]
    assert re.search(r"^training for \d+ epochs of \d+ batches, without a line for each$", printed, re.MULTILINE)
    assert len(shown) == 3 and all(any(line.startswith(text) for text in texts) for line in shown)
    for name in ("1/saved_model.pb", "training_curves.png", "attention.png", "confusion_matrix.png"):
        assert (tmp_path / "saved_models/mine" / name).stat().st_size > 1000
    assert (tmp_path / "saved_models/mine/logs/train").is_dir() and not (tmp_path / "logs").exists()


def test_classify_says_so_when_the_bag_of_words_is_better_and_its_old_name_runs_it(tmp_path):
    made_tables.write(tmp_path / "mine.csv", 230, 5)
    columns = ("--text-column", "message", "--label-column", "team")
    # With pairs of tokens, as for more rows: `export` refuses a model whose answers depend on padding.
    pairs = ('"pairs": 0, "stop_early": False', '"pairs": 97, "stop_early": False')
    # The test before trains it in a graph, whose tracing takes longer than one epoch.
    eager = ('settings["weight_decay"]), loss,', 'settings["weight_decay"]), loss, run_eagerly=True,')
    few = few_signatures("serving_default", "explain")
    examples = smaller(tmp_path / "examples", "classify.py", NOT_CHECKED, pairs, eager, few)
    arguments = ("--data", "mine.csv", *columns, "--epochs", "1")
    printed = run_here(tmp_path, "classify_reviews.py", *arguments, examples=examples)
    assert re.search(r"^training the bag of words for \d\d epochs, whatever --epochs says$", printed, re.MULTILINE)
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
        (b"text,label\n" + b",1\n,0\n" * 5, "mine.csv has nothing to learn from: `texts` must hold at least one word"),
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


def test_a_file_named_as_the_sample_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample").write_text("text,label\ngood,1\nbad,0\n" * 7)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["classify.py", "--data", "sample"])
    with pytest.raises(SystemExit, match=r"^classify.py: The file must end in one of .* Received: sample"):
        runpy.run_path(str(EXAMPLES / "classify.py"))


def test_classify_trains_for_no_more_updates_on_fewer_rows(tmp_path):
    stop = 'print([choose_settings(rows, 9, 5.0)["epochs"] for rows in (2, 3, 16, 17, 599, 601)])\nraise SystemExit\n'
    examples = smaller(tmp_path / "examples", "classify.py", ("# 1. Text\n", stop))
    assert run_here(tmp_path, "classify.py", examples=examples) == "[375, 375, 375, 352, 10, 10]\n"


def test_help_of_classify_says_what_a_file_looks_like(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["classify.py", "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(EXAMPLES / "classify.py"))
    assert '    "Where is my parcel?",delivery' in capsys.readouterr().out


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """The folder in which translate.py ran, its arguments, and what it printed."""
    folder = tmp_path_factory.mktemp("translate")
    data = folder / "my texts"  # the commands that are printed must also be right for this name
    data.mkdir()
    for part in ("train", "val", "test"):
        (data / f"{part}.en").write_text("\n".join(ENGLISH) + "\n")
        (data / f"{part}.de").write_text("\n".join(line.upper() for line in ENGLISH) + "\n")
    arguments = ("--data", "my texts", "--source", "en", "--target", "de", "--epochs", "2")
    arguments += ("--num-layers", "1", "--hidden-dim", "32")
    less = (
        TWO_BEAMS,
        ("boundaries=[*range(6, 40, 2), 48, 64, 128]", "boundaries=[32]"),  # fit compiles for one length
        few_signatures("serving_default", "score"),
        NOT_CHECKED,
    )
    examples = smaller(folder / "examples", "translate.py", *less)
    return folder, arguments, run(folder, "translate.py", *arguments, quiet=True, examples=examples)


def test_translate_goes_from_parallel_files_to_translations(translated):
    folder, _, printed = translated
    score = float(re.search(r"test, beam 5: BLEU = (\S+)", printed)[1])
    assert "val_bleu" in printed and ("This model can't translate yet: it has learned from " in printed) == (score < 5)
    out = next((folder / "saved_models").iterdir())
    request = shlex.quote(json.dumps({"instances": ENGLISH[:1]}))
    assert f"curl -d {request} http://localhost:8501/v1/models/translate_my%20texts:predict\n" in printed
    assert f"python -m keras_tx.serving.serve '{out.relative_to(folder)}'\n" in printed
    assert (out / "logs/train").is_dir() and not (folder / "logs").exists()
    assert len((out / "test.txt").read_text().splitlines()) == 21
    for name in ("model.keras", "training_curves.png", "attention.png", "backup/backup.npz"):
        assert (out / name).stat().st_size > 1000
    assert answers(out, *ENGLISH[:3]) == (out / "test.txt").read_text().splitlines()[:3]


def test_translate_goes_on_where_it_stopped(translated):
    folder, arguments, printed = translated
    only_beam = ('(("greedy", None), ("beam 5", BEAM))', '(("beam 5", BEAM),)')
    decoding = "strategy, max_new_tokens=64, start_token"  # without XLA, whose programs take seconds to compile
    in_graph = (decoding, decoding.replace("64", "64, jit_compile=False"))
    examples = smaller(folder / "again", "translate.py", TWO_BEAMS, only_beam, in_graph)
    again = run_here(folder, "translate.py", *arguments, "--resume", "--no-export", examples=examples)
    assert again.count("No export") == 1 and "No export, because of --no-export." in again
    assert "Epoch 2/2" in printed and "Epoch 2/2" not in again and attention_of(again) == attention_of(printed)
    (out,) = (folder / "saved_models").iterdir()
    assert (out / "1").exists() and not (out / "2").exists()


def test_translate_undoes_merges_between_whole_characters_alone(tmp_path):
    for part in ("train", "val", "test"):
        for language, line in (("en", "a tired man for a tired man"), ("de", "für müde größere Männer für müde")):
            (tmp_path / f"{part}.{language}").write_text((line + "\n") * 12)
    stop = """pieces = tokenizer.decode(ids[:, None], skip_special_tokens=False)
names = [tokenizer.id_to_token(int(id)) for id in ids]
print(json.dumps({names[id]: [pieces[half] for half in both] for id, both in enumerate(halves) if both[1] >= 0}))
raise SystemExit


def texts_of(part):"""
    examples = smaller(tmp_path / "examples", "translate.py", ("def texts_of(part):", stop))
    arguments = ("--data", ".", "--source", "en", "--target", "de")
    found = json.loads(run_here(tmp_path, "translate.py", *arguments, examples=examples).splitlines()[-1])
    assert len(found) > 10 and not any(
        "\N{REPLACEMENT CHARACTER}" in half for halves in found.values() for half in halves
    )
    assert "Ã¼" not in found and any("Ã¼" in token for token in found)  # "ü", and a longer token
    assert not any(token.startswith("Ġ") and len(token) == 2 for token in found)


def test_translate_names_a_folder_that_does_not_exist(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["translate.py", "--data", "nowhere"])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(EXAMPLES / "translate.py"))
    assert "--data must be a folder that exists. Received: nowhere" in capsys.readouterr().err


def test_translate_names_the_package_that_is_missing(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["translate.py"])
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    reason = r"^translate.py needs sacrebleu. Install it: pip install 'keras-tx\[metrics\]'$"
    with pytest.raises(SystemExit, match=reason):
        runpy.run_path(str(EXAMPLES / "translate.py"))


def test_a_model_is_not_exported_for_one_of_two_reasons(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    why = importlib.import_module("device_options").why_no_export
    assert "--no-export" in why(SimpleNamespace(no_export=True, backend="tensorflow"))
    assert "on the TensorFlow backend only" in why(SimpleNamespace(no_export=False, backend="jax"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "dispatcher --port 70000",
            "--port: it must be a port, from 0 to 65535, where 0 takes a free one. Received: 70000",
        ),
        ("local --workers 0", "--workers: it must be a positive integer. Received: 0"),
        (
            "worker --dispatcher a:1 --address y",
            "--address: it must be host:port, with a port from 0 to 65535. Received: y",
        ),
        (
            "worker --dispatcher a:70000 --address y:1",
            "--dispatcher: it must be host:port, with a port from 0 to 65535.",
        ),
    ],
)
def test_the_data_service_refuses_what_is_no_address(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["data_service.py", *arguments.split()])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(EXAMPLES / "cluster/data_service.py"), run_name="__main__")
    assert message in capsys.readouterr().err


def test_examples_for_two_backends_refuse_another_in_the_environment(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    backend = importlib.import_module("device_options").backend
    for given, option, expected in (("jax", "", "jax"), ("", "", "tensorflow"), ("torch", "--backend=jax", "jax")):
        monkeypatch.setenv("KERAS_BACKEND", given)
        monkeypatch.setattr(sys, "argv", ["write_text.py", *option.split()])
        assert backend() == expected
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setattr(sys, "argv", ["write_text.py"])
    with pytest.raises(SystemExit, match=r"^KERAS_BACKEND must be one of tensorflow, jax .* KERAS_BACKEND=torch$"):
        backend()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder in which write_text.py ran, and what it printed."""
    folder = tmp_path_factory.mktemp("write_text")
    (folder / "mine.txt").write_text("the cat sat on the mat, the dog ran.\n" * 200)
    arguments = ("--data", "mine.txt", "--steps", "120", "--length", "30", "--prompt", "the c")
    sizes = "LAYERS, HEADS, WIDTH, CONTEXT, BATCH = {}, 4, {}, 64, 12"
    less = (
        (sizes.format(4, 128), sizes.format(1, 64)),
        ("LEARNING_RATE, WARM_UP = 1e-3, 100", "LEARNING_RATE, WARM_UP = 1e-2, 20"),
        few_signatures("serving_default", "score"),
        NOT_CHECKED,
    )
    examples = smaller(folder / "examples", "write_text.py", *less)
    return folder, run(folder, "write_text.py", *arguments, quiet=True, examples=examples)


def test_write_text_streams_what_a_model_of_the_file_writes(written):
    folder, printed = written
    assert "validation loss" in printed and "\nthe cat sat on the" in printed
    (answer,) = answers(folder / "saved_models/write_text", "the c")
    assert answer.startswith("the cat sat on the") and len(answer) == len("the c") + 30


def refusal(folder, name, *arguments, monkeypatch, capsys, examples=EXAMPLES):
    """What an example that refuses its options prints."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(examples)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_path(str(examples / name))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("write_text.py", "--data typo.txt", "--data typo.txt cannot be read as a text"),
        ("write_text.py", "--data blank.txt", "Received: blank.txt, a file with nothing but spaces and line breaks"),
        ("write_text.py", "--temperature 0", "--temperature: it must be a positive number. Received: 0"),
        ("write_text.py", "--length 0", "--length: it must be a positive integer. Received: 0"),
        (
            "write_text.py",
            "--data mine.txt --level wordpiece --vocabulary-size 2",
            "--vocabulary-size 2 does not fit mine.txt: `vocabulary_size` must be larger than",
        ),
        ("write_text.py", "--data mine.txt --level wordpiece --prompt=", "--prompt must have a token. Received: ''"),
        ("write_text.py", "--out /dev/null/x", "--out must be a folder in which files can be written. Received: /dev"),
        ("translate.py", "--data typo", "--data must be a folder that exists. Received: typo"),
        ("translate.py", "--epochs 0", "--epochs: it must be a positive integer. Received: 0"),
        ("translate.py", "--hidden-dim 30", "--hidden-dim must be a multiple of 4. Received: 30"),
        ("translate.py", "--bleu 13", "argument --bleu: invalid choice: '13'"),
        ("translate.py", "--out mine.txt", "Received: mine.txt/translate_sample"),
        ("classify.py", "--epochs -1", "--epochs: it must be a positive integer. Received: -1"),
        ("classify.py", "--out /dev/null/x", "Received: /dev/null/x/sample"),
        ("finetune_bert.py", "--learning-rate inf", "--learning-rate: it must be a positive number. Received: inf"),
        ("finetune_bert.py", "--out mine.txt", "Received: mine.txt/finetune_bert"),
        ("bert_features.py", "--out mine.txt", "Received: mine.txt/bert_features"),
        (
            "finetune_bert.py",
            "--dataset no.csv",
            "--dataset no.csv cannot be read: `name_or_path` must name files that",
        ),
        (
            "finetune_bert.py",
            "--checkpoint .",
            "--checkpoint . cannot be loaded: `path` must have a config.json. Received",
        ),
        ("finetune_bert.py", "--max-length 2", "--max-length must be at least 3. Received: 2"),
        (
            "bert_features.py",
            "--dataset no.csv",
            "--dataset no.csv cannot be read: `name_or_path` must name files that",
        ),
        (
            "bert_features.py",
            "--checkpoint .",
            "--checkpoint . cannot be loaded: `path` must have a config.json. Received",
        ),
        ("bert_features.py", "--max-length 2", "--max-length must be at least 3. Received: 2"),
        ("serve.py", "--out mine.txt", "Received: mine.txt"),
        ("serve.py", "--hidden-dim 30", "--hidden-dim must be a multiple of 4. Received: 30"),
        ("translate.py", "--cpu-devices -1", "--cpu-devices: it must be a positive integer. Received: -1"),
        (
            "translate.py",
            "--data sample",
            "sample cannot be read as parallel texts in UTF-8: `source` and `target` must",
        ),
        ("translate.py", "--data a --dataset b", "argument --dataset: not allowed with argument --data"),
    ],
)
def test_options_are_refused_before_a_backup_is_removed(name, arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.txt").write_text("the cat sat on the mat, the dog ran.\n" * 200)
    (tmp_path / "blank.txt").write_text(" \n" * 999)
    (tmp_path / "sample").mkdir()
    for folder in ("write_text", "translate_typo", "translate_sample"):
        (tmp_path / "saved_models" / folder / "backup").mkdir(parents=True)
        (tmp_path / "saved_models" / folder / "backup" / "backup.npz").touch()
    before = sorted(tmp_path.rglob("*"))
    told = refusal(tmp_path, name, *arguments.split(), monkeypatch=monkeypatch, capsys=capsys)
    assert message in told and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["classify.py", "translate.py", "write_text.py", "bert_features.py", "finetune_bert.py"]
)
def test_examples_that_draw_need_matplotlib_before_they_train(name, tmp_path, monkeypatch, capsys):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    told = refusal(tmp_path, name, monkeypatch=monkeypatch, capsys=capsys)
    assert "the pictures need matplotlib, which cannot be imported" in told
    assert "Install it: pip install 'keras-tx[plots]'" in told and not os.listdir(tmp_path)


def test_a_new_run_removes_the_backup_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    begin = importlib.import_module("resumed_run").begin
    backup, new, resume = tmp_path / "out" / "backup", *(SimpleNamespace(resume=resume) for resume in (False, True))
    parser = argparse.ArgumentParser()
    begin(parser, tmp_path / "out", backup, new, True, ["a text"], steps=7)  # without an earlier run
    backup.mkdir()
    part = "backup.npz-0123456789abcdef.part"
    for name in ("backup.npz", part, "worker-1.txt", f"worker-13.txt{part[10:]}", "my notes.txt", "backup.npz.old"):
        (backup / name).touch()
    begin(parser, tmp_path / "out", backup, resume, False, ["a text"], steps=7)
    assert len(os.listdir(backup)) == 6
    with pytest.raises(SystemExit, match="^2$"):
        begin(parser, tmp_path / "out", backup, resume, True, ["a text"], steps=11)
    begin(parser, tmp_path / "out", backup, new, True, ["a text"], steps=11)
    assert sorted(os.listdir(backup)) == ["backup.npz.old", "my notes.txt"]
    before = (tmp_path / "out" / "run.json").read_text()
    assert json.loads(before)["steps"] == 11

    def killed(settings, file):
        file.write("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", killed)
    with pytest.raises(KeyboardInterrupt):
        begin(parser, tmp_path / "out", backup, new, True, ["a text"], steps=13)
    assert (tmp_path / "out" / "run.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "other.txt", "--resume", "--steps", "120"], "saved_models/write_text had other texts: leave"),
        (["--data", "mine.txt", "--resume", "--steps", "130"], "saved_models/write_text had other steps: leave"),
        (["--data", "mine.txt", "--level", "wordpiece", "--prompt", " "], "--prompt must have a token. Received: ' '"),
        (["--data", "short.txt", "--level", "wordpiece"], "--data must have more than 64 tokens to learn from and to"),
    ],
)
def test_write_text_refuses_other_runs_and_texts_that_are_too_short(written, arguments, message, monkeypatch, capsys):
    folder = written[0]
    (folder / "other.txt").write_text("the dog sat on the mat, the cat ran.\n" * 200)
    (folder / "short.txt").write_text("internationalization and internationalization\n" * 25)
    before = (folder / "saved_models/write_text/tokenizer.json").read_bytes()
    options = {"monkeypatch": monkeypatch, "capsys": capsys}
    out = [] if "--resume" in arguments else ["--out", "elsewhere"]
    assert message in refusal(folder, "write_text.py", *arguments, *out, **options)
    assert (folder / "saved_models/write_text/tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("jobs", "task", "is_chief"),
    [
        ({"chief": ["a:1"], "worker": ["b:1"]}, ("chief", 0), True),
        ({"chief": ["a:1"], "worker": ["b:1"]}, ("worker", 0), False),
        ({"worker": ["a:1", "b:1"]}, ("worker", 0), True),
        ({"worker": ["a:1", "b:1"]}, ("worker", 1), False),
    ],
)
def test_one_process_of_a_cluster_is_the_chief(jobs, task, is_chief, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    devices = importlib.import_module("several_devices")
    resolver = SimpleNamespace(cluster_spec=lambda: SimpleNamespace(jobs=jobs), task_type=task[0], task_id=task[1])
    strategy = SimpleNamespace(cluster_resolver=resolver, scope=lambda: None)
    monkeypatch.setattr(devices.distribution, "multi_worker_strategy", lambda: strategy)
    assert devices.start(SimpleNamespace(mesh=None, strategy="multi_worker"))[1] is is_chief


def test_a_server_can_run_what_translate_and_write_text_export(translated, written):
    (translator,) = (translated[0] / "saved_models").iterdir()
    versions = [translator / "1", written[0] / "saved_models/write_text/1"]
    for report in reports_on(*versions):
        assert report.ok and set(report.signatures) == {"serving_default", "score"}, report
    for printed in (translated[-1], written[-1]):  # where the examples print the report
        assert "namespace(ok=True)" in printed


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

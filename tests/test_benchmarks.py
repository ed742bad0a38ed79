"""What the benchmarks have in common; the benchmarks themselves are run by hand."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import all as everything
from benchmarks import alternating, parts, table

ROOT = Path(__file__).resolve().parents[1]


def test_runs_go_in_turns_and_each_second_round_backwards():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    times = alternating.in_turns(runs, 3)
    assert "".join(order) == "cbaabccba"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_report_has_rates_and_the_ratios_of_rounds(tmp_path, capsys):
    times = {"keras_tx": [1.0, 2.0, 5.0], "a peer": [3.0, 2.0, 10.0]}  # medians 2 and 3; ratios 3, 1, 2
    file = tmp_path / "lines.jsonl"
    assert alternating.report("a case", times, 10, "tokens", file=file) == {"keras_tx": 1.0, "a peer": 2.0}
    printed = capsys.readouterr().out
    assert "5.0 (2.0 to 10.0) tokens/s" in printed and "keras_tx is 2.00 (1.00 to 3.00) times as fast" in printed
    ours, peer = (json.loads(line) for line in file.read_text().splitlines())
    assert (ours["run"], ours["unit"], ours["rates"], ours["ratios"]) == ("keras_tx", "tokens/s", [10, 5, 2], [1] * 3)
    np.testing.assert_allclose(peer["rates"] + peer["ratios"], [10 / 3, 5, 1, 3, 1, 2])
    assert peer["limit"] is None and peer["command"] == alternating.command()


def test_a_table_has_each_run_with_its_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "benchmarks", "some", "--json", "a.jsonl", "--rounds", "3"])
    file = tmp_path / "a.jsonl"
    times = {"keras_tx": [1.0, 2.0, 5.0], "a peer": [3.0, 2.0, 10.0]}
    alternating.report("a case", times, 10, "tokens", file=file, limit=20.0, steps=4)
    assert "0.25 of the limit" in capsys.readouterr().out
    alternating.write(file, {"case": "attention", "run": "a peer", "GiB": 1.234, "seconds": 5.678})
    alternating.write(file, {"case": "attention", "run": "another", "error": "no memory"})
    printed = table.tables([json.loads(line) for line in file.read_text().splitlines()])
    command = "`python -m benchmarks some --rounds 3`"
    assert f"| a case | keras_tx | 5 (2 to 10) tokens/s | 500.00 ms | 0.25 |  | {command} |" in printed
    assert f"| a case | a peer | 3 (1 to 5) tokens/s | 750.00 ms | 0.17 | 2.00 (1.00 to 3.00) | {command} |" in printed
    assert f"| attention | a peer | 1.23 GiB | 5.68 s | {command} |" in printed
    assert f"| attention | another | fails |  | {command} |" in printed


def test_a_second_run_of_ours_has_ratios_of_its_own(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    times = {"keras_tx": [2.0, 2.0], "keras_tx, fast": [1.0, 2.0], "a peer": [4.0, 4.0]}
    alternating.report("a case", times, 8, "tokens", file=file, steps=2, variants=["keras_tx, fast"])
    assert "keras_tx is 2.00 (2.00 to 2.00) times as fast, keras_tx, fast 3.00" in capsys.readouterr().out
    own, fast, peer = table.tables([json.loads(line) for line in file.read_text().splitlines()]).splitlines()[2:]
    assert "| keras_tx | 4 (4 to 4) tokens/s | 1,000.00 ms |  |  |" in own
    assert "| 0.75 (0.50 to 1.00) |" in fast
    assert "| 2.00 (2.00 to 2.00); fast 3.00 (2.00 to 4.00) |" in peer


@pytest.mark.process
@pytest.mark.parametrize("name", ["", "nonsense"])
def test_without_a_known_name_the_benchmarks_are_listed(name):
    command = [sys.executable, "-m", "benchmarks", *([name] if name else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == (1 if name else 0)
    listed = {line.split()[0] for line in done.stdout.splitlines()[1:]}
    assert {"decode", "tokenizer", "import_time", "pretrained"} <= listed and "turns" not in listed


def test_an_aim_is_held_against_the_rows_of_its_part():
    row = {"unit": "tokens/s", "limit": None, "steps": [1.0], "command": "python -m it", "case": "batch 1, 48 tokens"}
    ours = row | {"part": "decode 1", "run": "keras_tx", "ours": "keras_tx", "rates": [3.0] * 3, "ratios": [1.0] * 3}
    peer = ours | {"run": "ctranslate2", "ratios": [1.2, 1.5, 1.4], "of_variants": {"keras_tx, exported": [1, 2, 1.1]}}
    other = peer | {"part": "decode 8", "ratios": [9.0]}
    aim = everything.Aim("decoding", "decode 1", "batch 1,", "ctranslate2", 1.35)
    assert aim.ratios([other, ours, peer]) == [1.2, 1.5, 1.4]
    exported = everything.Aim("it", "decode 1", "batch 1,", "ctranslate2", 1, "keras_tx, exported")
    assert exported.ratios([peer]) == [1, 2, 1.1]
    assert everything.Aim("it", "decode 1", "batch 8,", "ctranslate2", 1).ratios([ours, peer]) == []
    made = everything.aims_table([other, ours, peer])
    assert "| decoding, batch 1, keras_tx | ctranslate2 | 1.35 | 1.40 (1.20 to 1.50) | yes |" in made
    assert "| decoding, batch 1, keras_tx | keras_hub | 1.9 | not measured |  |" in made
    assert "BERT" not in made  # no row of that part
    memory = {"part": "memory", "case": "attention, 4,096 tokens", "GiB": 1.0}
    rows = [memory | {"run": "keras_tx", "seconds": 2.0}, memory | {"run": "KerasHub", "seconds": 1.0}]
    rows = [one | {"command": "python -m it"} for one in rows]
    result = parts.Result("memory", "", "ok", 61.2, "all | done", "")
    written = everything.document({"Processor": "some"}, [result], rows)
    assert "| training step, 4,096 tokens | KerasHub | 1.1 | 0.50 (0.50 to 0.50) | **no** |" in written
    assert "| memory | ok | 61 s | all \\| done |" in written and "- Processor: some" in written


def test_an_aim_may_be_held_against_our_own_run_of_another_part():
    row = {"case": "training, 16x128, 30 % padding", "run": "keras_tx", "rates": [3.0, 5.0], "part": "half"}
    rows = [row, row | {"rates": [2.0, 2.0], "part": "whole"}, row | {"rates": [9.0, 9.0], "run": "a peer"}]
    aim = everything.Aim("it", "half", "training, 16x128", "its own float32", 1.5, base="whole")
    assert aim.ratios(rows) == [1.5, 2.5]
    assert aim.ratios(rows[:1]) == []  # the other part did not run


def test_every_part_of_all_is_a_benchmark_and_every_aim_has_a_part(tmp_path):
    known, arguments = program.described(), everything.parser().parse_args(["--multi30k", "a", "--imdb", "b"])
    for name in everything.PARTS:
        (job,) = everything.part(name, arguments, tmp_path / "rows.jsonl").jobs
        assert job.command[3] in known and "N" not in job.command
        assert job.command[-2:] == ["--json", str(tmp_path / "rows.jsonl")]
    named = {part for aim in everything.AIMS for part in (aim.part, aim.base) if part}
    assert named <= set(everything.PARTS)


def names_in(path):
    """A pattern for each string of a file; what is put into an f-string may be any word."""
    made = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            made.add("".join(re.escape(one.value) if isinstance(one, ast.Constant) else r"\w+" for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            made.add(re.escape(node.value))
    return made - {r"\w+"}


@pytest.mark.parametrize("aim", everything.AIMS, ids=lambda aim: f"{aim.part}, {aim.case}, {aim.peer}, {aim.ours}")
def test_the_benchmark_of_an_aim_has_the_runs_of_these_names(aim):
    """Else the aim would stay "not measured"."""
    benchmark = everything.PARTS[aim.part][0].split()[0]
    names = names_in(ROOT / "benchmarks" / f"{benchmark}.py")
    for name in {*([] if aim.base else [aim.peer]), aim.ours} - {alternating.OURS}:
        assert any(re.fullmatch(pattern, name) for pattern in names), name


def test_the_table_of_all_names_packages_and_the_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(everything, "PACKAGES", ("numpy", "no-such-package"))
    assert everything.versions().endswith(f", numpy {np.__version__}, no no-such-package")
    monkeypatch.setattr(everything, "__file__", str(tmp_path / "all.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert everything.commit().startswith("unknown")
    if not shutil.which("git"):
        return
    git = ["git", "-C", tmp_path, "-c", "user.name=name", "-c", "user.email=name@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert everything.commit() == head.strip()


def test_rows_have_the_name_of_their_part(tmp_path, monkeypatch):
    monkeypatch.setenv("BENCHMARK_PART", "decode 1")
    alternating.write(tmp_path / "a.jsonl", {"case": "one"})
    assert json.loads((tmp_path / "a.jsonl").read_text())["part"] == "decode 1"

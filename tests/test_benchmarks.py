"""What the benchmarks have in common; the benchmarks themselves are run by hand."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import turns

ROOT = Path(__file__).resolve().parents[1]


def test_runs_go_in_turns_and_each_second_round_backwards():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    times = turns.in_turns(runs, 3)
    assert "".join(order) == "cbaabccba"
    assert {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_report_has_rates_and_the_ratios_of_rounds(tmp_path, capsys):
    times = {"keras_tx": [1.0, 2.0, 5.0], "a peer": [3.0, 2.0, 10.0]}  # medians 2 and 3; ratios 3, 1, 2
    file = tmp_path / "lines.jsonl"
    assert turns.report("a case", times, 10, "tokens", file=file) == {"keras_tx": 1.0, "a peer": 2.0}
    printed = capsys.readouterr().out
    assert "5.0 (2.0 to 10.0) tokens/s" in printed and "keras_tx is 2.00 (1.00 to 3.00) times as fast" in printed
    ours, peer = (json.loads(line) for line in file.read_text().splitlines())
    assert (ours["run"], ours["tokens/s"], ours["ratio"]) == ("keras_tx", 5.0, 1.0)
    np.testing.assert_allclose([peer["tokens/s"], peer["ratio"]], [10 / 3, 2.0])


@pytest.mark.parametrize("name", ["", "nonsense"])
def test_without_a_known_name_the_benchmarks_are_listed(name):
    command = [sys.executable, "-m", "benchmarks", *([name] if name else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == (1 if name else 0)
    listed = {line.split()[0] for line in done.stdout.splitlines()[1:]}
    assert {"decode", "tokenizer", "import_time", "pretrained"} <= listed and "turns" not in listed

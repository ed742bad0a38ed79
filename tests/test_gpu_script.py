"""`scripts/gpu`: how it runs its parts and what it writes of them; what the parts find out needs a GPU.

test_package.py runs the kernels of this machine.
"""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import parts, reports
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import report, wheels
from benchmarks.parts import Job, Part

ROOT = Path(__file__).resolve().parents[1]


def job(name, code):
    return Job(name, [sys.executable, "-S", "-c", code])


@pytest.fixture
def quick(monkeypatch):
    """No long wait for what is out of time."""
    monkeypatch.setattr(parts, "GRACE", 0.3)


@pytest.mark.process
def test_help_names_all_parts():
    done = subprocess.run([ROOT / "scripts" / "gpu", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.replace(",", " ").replace(".", " ").split()
    assert {"tests", "fit", "kernels", "benchmarks", *script.BENCHMARKS} == {*script.SHARES, "benchmarks"} <= set(words)


def test_parts_are_chosen_by_name_in_their_own_order(capsys):
    assert script.arguments_of([]).parts == list(script.SHARES)
    assert script.arguments_of(["--parts", "fused,tests"]).parts == ["tests", "fused"]
    assert script.arguments_of(["--parts", "benchmarks"]).parts == list(script.BENCHMARKS)
    with pytest.raises(SystemExit):
        script.arguments_of(["--parts", "tests,speed"])
    assert "Received: speed" in capsys.readouterr().err


@pytest.mark.parametrize("small", [True, False])
def test_every_part_has_commands_that_get_the_file_for_its_rows(small, tmp_path):
    backends = {"jax": small, "torch": small}
    made = script.parts(list(script.SHARES), {"A": "b"}, backends, tmp_path / "rows.jsonl")
    assert [part.name for part in made] == list(script.SHARES)
    for part in made:
        assert part.jobs[0].environment["KERAS_BACKEND"] == "jax" and part.jobs[0].environment["A"] == "b"
        for one in part.jobs:
            assert part.name == "tests" or str(tmp_path / "rows.jsonl") in one.command
            module = one.command[2]
            assert (
                part.name == "tests"
                or (ROOT / f"{module.replace('.', '/')}").with_suffix(".py").exists()
                or (module == "benchmarks" and (ROOT / "benchmarks" / f"{one.command[3]}.py").exists())
            )


@pytest.mark.process
def test_a_part_that_fails_or_takes_too_long_is_a_row_and_stops_no_other(tmp_path, quick):
    written = reports.Report(tmp_path / "out", {"GPU": "none"}, functools.partial(report.document, True))
    row = {"kind": "fit", "case": "CausalLM", "policy": "float32", "backend": "jax", "losses": [3, 1], "first": 2}
    code = f"open({str(written.rows)!r}, 'a').write({json.dumps(row | {'step': 0.05})!r} + chr(10) + '{{cut off')"
    made = [
        Part("first", [job("one", "print('half'); raise SystemExit('no | luck')"), Job("two", ["/no/such/program"])]),
        Part("slow", [job("one", "print('begun', flush=True); import time; time.sleep(60)")], summary=parts.last_line),
        Part("deaf", [job("one", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)")]),
        Part(
            "late", [job("one", "import sys, signal, time; signal.signal(2, lambda *_: sys.exit(0)); time.sleep(60)")]
        ),
        Part("last", [job("one", code), job("two", "print(7)")], together=True),
    ]
    started = time.monotonic()
    parts.run(made, 5.0, written.add)
    assert time.monotonic() - started < 10
    table = (tmp_path / "out" / "table.md").read_text()
    assert "- Sizes: small: there is no GPU" in table
    assert "| first | one | failed | 0 s | no \\| luck |" in table
    assert "| first | two | failed |" in table and "No such file" in table
    assert "| slow | one | out of time |" in table and "; KeyboardInterrupt |" in table
    assert "| deaf | one | out of time |" in table
    assert "| late | one | ok |" in table  # all was done when the interruption came
    assert "| last | one | ok |" in table and "| last | two | ok |" in table
    assert "| CausalLM | jax | float32 | 3.000 to 1.000 | 2.0 s | 50.0 ms |" in table
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "GPU: none" in log and "===== first, one: failed" in log and "half\nno | luck" in log
    assert log.count("=====") == 7


def test_the_table_has_the_figures_of_each_kind_and_the_tests_that_failed(tmp_path):
    rows = [
        {"kind": "kernel", "case": "causal", "backend": "jax", "dtype": "bfloat16", "kernels": ["fmhaSoftmax"]}
        | {"forward": 0.003, "backward": 0.5, "allowed": [0.01, 0.02], "ok": False},
        {"kind": "profile", "case": "encoder", "steps": [0.002, 0.004, 0.003]}
        | {"shares": {"matrix products": 0.75, "attention kernels": 0.2, "the rest": 0.05}},
        {"case": "training", "run": "keras_tx", "ours": "keras_tx", "unit": "tokens/s", "command": "python -m it"}
        | {"rates": [10.0], "ratios": [1.0], "limit": 20.0, "steps": [0.5]},
        {"case": "attention", "run": "KerasHub", "error": "no memory", "command": "python -m it"},
    ]
    output = "FAILED tests/a.py::test_b - AssertionError\n1 failed, 2 passed, 1 skipped in 3.21s\n"
    words = script.tests_summary(output)
    assert words == "1 failed, 2 passed, 1 skipped in 3.21s"
    results = [parts.Result("tests", "JAX", "failed", 12.3, words, output)]
    text = report.document(False, {"GPU": "H100"}, results, rows)
    assert f"| tests | JAX | failed | 12 s | {words} |" in text and "- `tests/a.py::test_b`" in text
    assert "| causal | jax | bfloat16 | fmhaSoftmax | 3.0e-03 | 5.0e-01 | 1e-02 and 2e-02 | **failed** |" in text
    assert "| encoder | 3.00 ms | 75% | 20% | 5% |" in text
    assert (
        "| training | keras_tx | 10 (10 to 10) tokens/s | 500.00 ms |" in text
        and "| attention | KerasHub | fails |" in text
    )


def test_what_is_missing_is_installed_from_wheels_or_named(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "PINNED", {"keras": "0.0.1"})
    monkeypatch.setattr(wheels, "OTHERS", ("numpy", "no-such-package"))
    assert wheels.missing() == ["keras==0.0.1", "no-such-package"]  # Keras is here in another version
    assert wheels.install(tmp_path, tmp_path / "site") == "no package installed; missing: keras==0.0.1, no-such-package"
    commands = []

    def pip(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands) - 1, "", "ERROR: a wheel for another Python\n")

    monkeypatch.setattr(wheels.subprocess, "run", pip)
    (tmp_path / "no_such_package-1.0-py3-none-any.whl").touch()
    words = wheels.install(tmp_path, tmp_path / "site")
    assert words == f"1 packages installed from {tmp_path.name}/; missing: keras==0.0.1"
    assert commands[0][-3:] == ["--target", str(tmp_path / "site"), "no-such-package"] and "--no-index" in commands[0]
    assert "another Python; missing: keras" in wheels.install(tmp_path, tmp_path / "site")

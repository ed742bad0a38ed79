"""`scripts/check`: what it says at its end, and when it fails."""

import importlib.machinery
import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check"
REPORT = """<testsuites><testsuite errors="{errors}" failures="0" skipped="1" tests="4">
<testcase classname="tests.layers.test_one" name="a" time="7.25"/>
<testcase classname="tests.layers.test_one" name="b" time="2.5"/>
<testcase classname="tests.test_two" name="c" time="{seconds}"/>
<testcase classname="tests.test_two" name="d" time="0"><skipped message="multi30k is not here"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def check():
    loader = importlib.machinery.SourceFileLoader("check_script", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("check_script", loader))
    loader.exec_module(module)
    return module


def reports(folder, errors=0):
    for backend, seconds in (("tensorflow", 1), ("torch", 30)):
        (folder / f"{backend}.xml").write_text(REPORT.format(errors=errors, seconds=seconds))
    return sorted(folder.glob("*.xml"))


def test_the_summary_names_the_slowest_files_and_why_tests_were_skipped(check, tmp_path, capsys):
    assert check.summary(reports(tmp_path), True, 90) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    files = [line for line in lines if "on" in line]
    assert files[0] == ["30.0", "tests/test_two.py", "on", "torch"]
    assert files[1] == ["9.8", "tests/layers/test_one.py", "on", "tensorflow"]
    assert ["2", "multi30k", "is", "not", "here"] in lines
    assert lines[-2] == "The checks passed in 1.5 minutes.".split()
    assert lines[-1] == "6 passed, 0 failed, 2 skipped".split()


def test_the_checks_fail_with_a_test_with_a_run_and_without_tests(check, tmp_path, capsys):
    assert check.summary(reports(tmp_path, errors=1), True, 90) == 1
    assert "4 passed, 2 failed, 2 skipped" in capsys.readouterr().out
    assert check.summary(reports(tmp_path), False, 90) == 1
    assert check.summary([], True, 90) == 1
    assert "The checks FAILED" in capsys.readouterr().out


def test_every_file_that_is_named_exists(check):
    for part in (*check.ON_JAX, *check.ON_TORCH, *check.NOT_FAST):
        assert (ROOT / "tests" / part).exists()


def test_parts_are_chosen_by_options(check, monkeypatch):
    runs = []

    def record(backend, report, options, environment):
        runs.append((backend, options))
        Path(report).write_text(REPORT.format(errors=0, seconds=1))
        return True

    monkeypatch.setattr(check, "pytest", record)
    monkeypatch.setattr(check, "run", lambda *command, **environment: True)
    monkeypatch.setattr("sys.argv", ["check", "--fast", "--workers", "1"])
    assert check.main() == 0
    ((backend, options),) = runs
    assert backend == "tensorflow" and options[:7] == [
        *("-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "-m", check.FAST)
    ]
    assert {f"--ignore=tests/{name}" for name in check.NOT_FAST} < set(options)
    runs.clear()
    monkeypatch.setattr("sys.argv", ["check"])
    assert check.main() == 0
    assert sorted(backend for backend, _ in runs) == ["jax", "tensorflow", "tensorflow", "torch"]
    assert all(check.OTHERS in options for backend, options in runs if backend in ("jax", "torch"))
    first, second = (options for backend, options in runs if backend == "tensorflow")
    assert "-m" not in first and "-m" not in second
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    parts = [part for part in (*first, *second) if part.startswith("tests/")]
    assert all(sum(path == part or path.startswith(f"{part}/") for part in parts) == 1 for path in found)


@pytest.mark.process
def test_help_names_the_options():
    printed = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    for option in ("--fast", "--fix", "--keras", "--tensorflow", "--workers"):
        assert option in printed

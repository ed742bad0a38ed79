"""`scripts/check`: what it says at its end, and when it fails."""

import importlib.machinery
import importlib.util
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

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
    assert lines[-2][:7] == "The checks passed in 1.5 minutes on".split()
    name = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    assert not name or name[1] in " ".join(lines[-2])
    assert lines[-1] == "6 passed, 0 failed, 2 skipped".split()


def test_the_checks_fail_with_a_test_with_a_run_and_without_tests(check, tmp_path, capsys):
    assert check.summary(reports(tmp_path, errors=1), True, 90) == 1
    assert "4 passed, 2 failed, 2 skipped" in capsys.readouterr().out
    assert check.summary(reports(tmp_path), False, 90) == 1
    assert check.summary([], True, 90) == 1
    assert "The checks FAILED" in capsys.readouterr().out


def test_every_file_that_is_named_exists(check):
    named = [part for _, parts in (*check.RUNS, *check.FAST_RUNS) for part in parts]
    for part in (*named, *check.NOT_FAST):
        assert (ROOT / "tests" / part).exists()


@pytest.fixture
def jobs(check, monkeypatch):
    """The commands that `check` would run beside each other, for some options: [(command, environment)]."""

    def jobs(*options):
        found = []

        def record(command, environment):
            found.append((command, environment))
            reports = [option.removeprefix("--junitxml=") for option in command if option.startswith("--junitxml=")]
            for report in reports:
                Path(report).write_text(REPORT.format(errors=0, seconds=1))
            return True

        monkeypatch.setattr(check, "run_quietly", record)
        monkeypatch.setattr(check, "run", lambda *command, **environment: True)
        monkeypatch.setattr("sys.argv", ["check", *options])
        assert check.main() == 0
        return found

    return jobs


def is_run_once(path, commands):
    """Whether one of the commands of pytest runs a file of tests, and no other one."""
    parts = [part for one in commands for part in one if part.startswith("tests/") and f"--ignore={path}" not in one]
    return sum(path == part or path.startswith(f"{part}/") for part in parts) == 1


def test_parts_are_chosen_by_options(check, jobs):
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    found = [(command, environment["KERAS_BACKEND"]) for command, environment in jobs("--fast") if "pytest" in command]
    assert {backend for _, backend in found} == {"tensorflow"}
    ignored = {f"--ignore=tests/{name}" for name in check.NOT_FAST}
    for command, _ in found:
        assert command[command.index("-m", 3) + 1] == check.FAST and ignored < set(command)
    quick = {file for file in files if file.removeprefix("tests/") not in check.NOT_FAST}
    assert all(is_run_once(file, [command for command, _ in found]) for file in quick)
    found = [(command, environment["KERAS_BACKEND"]) for command, environment in jobs() if "pytest" in command]
    assert {backend for _, backend in found} == {"tensorflow", "jax", "torch"}
    elsewhere = [command for command, backend in found if backend != "tensorflow"]
    assert all(command[command.index("-m", 3) + 1] == check.OTHERS for command in elsewhere)
    on_tensorflow, on_torch, on_jax = (
        [command for command, backend in found if backend == name] for name in ("tensorflow", "torch", "jax")
    )
    (marked,) = [command for command in on_tensorflow if "-m" in command[3:]]
    assert marked[marked.index("-m", 3) + 1] == "tensorflow"
    assert {part for part in marked if part.startswith("tests/")} == {f"tests/{one}" for one in check.MOSTLY_ON_TORCH}
    for file in files:
        is_elsewhere = file.removeprefix("tests/") in check.NOT_ON_TENSORFLOW
        assert is_run_once(file, on_tensorflow) is not is_elsewhere
        assert (
            not (is_elsewhere or is_run_once(file, [marked]))
            or is_run_once(file, on_torch)
            or is_run_once(file, on_jax)
        )


def test_types_and_the_site_are_checked_beside_the_tests(jobs):
    assert sum(command == ["mypy"] for command, _ in jobs("--fast")) == 1
    assert not any(command[0] == "mkdocs" for command, _ in jobs("--fast"))
    assert {"mypy", "mkdocs"} < {command[0] for command, _ in jobs()}


@pytest.mark.process
def test_what_processes_print_comes_at_their_end_and_all_must_succeed(check, capsys):
    def job(code):
        return [sys.executable, "-c", code], {"KERAS_TX_TEST_WORD": "word"}

    jobs = [job("import os; print(os.environ['KERAS_TX_TEST_WORD'] * 2)"), job("print('second'); raise SystemExit(3)")]
    assert check.run_all(jobs[:1], 2) and not check.run_all(jobs, 2)
    printed = capsys.readouterr().out
    assert printed.count("\nwordword\n") == 2 and "\nsecond\n" in printed
    assert printed.count("seconds, exit status 0\n") == 2 and printed.count("seconds, exit status 3\n") == 1


COPY = """
import os, sys
from tests import forked

is_copy = "tensorflow" in sys.modules

def test_one():
    assert is_copy and forked.SERVER in os.environ
    code = "import os, sys; sys.exit(3 * ('tensorflow' in sys.modules and {!r} not in os.environ))"
    assert forked.start("-c", code.format(forked.SERVER)).wait(60) == 3
"""


@pytest.mark.process
@pytest.mark.tensorflow
@pytest.mark.skipif(not forked.CAN_FORK, reason="this system cannot copy processes so")
def test_runs_on_tensorflow_are_copies_of_a_process_which_they_fork_too(check, tmp_path, capsys):
    (tmp_path / "test_copy.py").write_text(COPY)
    command = [*check.PYTEST, "-q", "--noconftest", "-p", "no:cacheprovider", str(tmp_path / "test_copy.py")]
    assert check.run_quietly(command, {"KERAS_BACKEND": "tensorflow"}), capsys.readouterr().out
    assert "1 passed" in capsys.readouterr().out


def test_only_a_socket_is_taken_for_a_connection_to_the_process_that_forks(tmp_path):
    """The number may be that of a file of another process."""
    with socket.socket() as ours, open(tmp_path / "file", "w") as file:
        number = ours.fileno()
        assert forked._is_socket(number) and not forked._is_socket(file.fileno())
    assert not forked._is_socket(number)


@pytest.mark.tensorflow
def test_iterators_of_tests_are_not_tuned():
    import tensorflow as tf

    iterator = iter(tf.data.Dataset.range(3).map(lambda x: 2 * x, num_parallel_calls=tf.data.AUTOTUNE))
    assert iterator._dataset.options().autotune.enabled is False
    assert [int(x) for x in iterator] == [0, 2, 4]


@pytest.mark.process
def test_help_names_the_options():
    printed = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    for option in ("--fast", "--fix", "--keras", "--tensorflow", "--workers"):
        assert option in printed


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "is_good"),
    [("pass", True), ("assert 0", False), ("loop = [open(__file__)]; loop.append(loop); loop = None", False)],
)
def test_a_process_that_leaves_at_once_fails_as_others_do(code, is_good, tmp_path):
    """With a test that fails, and with a file that only the collection of garbage closes."""
    (tmp_path / "test_one.py").write_text(f"import gc\n\n\ndef test_one():\n    gc.disable()\n    {code}\n")
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "tests.leave_at_once", "-W", "error"]
    command += ["-p", "no:cacheprovider", f"--junitxml={tmp_path}/report.xml", str(tmp_path / "test_one.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode == 0) == is_good, done.stdout + done.stderr
    assert "1 failed" in done.stdout if code == "assert 0" else "1 passed" in done.stdout
    assert (tmp_path / "report.xml").exists()

"""Runs tests once more on another backend, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

TESTS = Path(__file__).resolve().parents[1]


def run_tests(backend, *parts):
    """Runs these folders and files of tests, without the slow ones, and asserts that they pass."""
    pytest.importorskip(backend)
    if keras.backend.backend() != "tensorflow":
        pytest.skip("the run on TensorFlow runs the other backends itself")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    run = subprocess.run(
        [*command, *[TESTS / part for part in parts]], capture_output=True, text=True, env=environment, cwd=TESTS.parent
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

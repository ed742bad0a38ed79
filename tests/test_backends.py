"""The tests of layers and models once more, on the other backends, each in a process of its own.

JAX compiles every operation for every shape, so there it is the contracts, the attention function and the models;
`KERAS_BACKEND=jax pytest tests/layers tests/models` runs them all.
"""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

TESTS = Path(__file__).parent
PARTS = {
    "torch": ["layers", "models"],
    "jax": ["layers/test_contracts.py", "layers/test_attend.py", "models"],
}


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="runs the other backends itself")
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_layers_and_models_hold_on_another_backend(backend):
    pytest.importorskip(backend)
    parts = [TESTS / part for part in PARTS[backend]]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *parts]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

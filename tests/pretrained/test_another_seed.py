"""Checkpoints that shared/tools/make_tiny_hf.py makes anew: `TINY_HF_SEED=777 pytest` with this file, ten minutes."""

import os
import subprocess
import sys

import pytest

from tests.tools import SHARED

SEED = os.environ.get("TINY_HF_SEED")
TOOL = SHARED / "tools" / "make_tiny_hf.py"
MAKE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); import make_tiny_hf as m; m.SEED = int(sys.argv.pop(1)); m.main()"
)


@pytest.mark.slow
@pytest.mark.skipif(not SEED, reason="needs a seed in TINY_HF_SEED")
@pytest.mark.skipif(not TOOL.is_file(), reason="needs the tools of shared/")
def test_checkpoints_of_another_seed_are_equal_to_transformers_too(tmp_path):
    subprocess.run([sys.executable, "-c", MAKE, TOOL.parent, SEED, "--out", tmp_path], check=True, capture_output=True)
    files = [f"tests/pretrained/test_{name}.py" for name in ("parity", "round_trip", "strictness")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TINY_HF": str(tmp_path)})
    assert run.returncode == 0, run.stdout[-8000:]

"""The examples run as a newcomer runs them, outside the repository, on a file of a few lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = {"dull": "negative", "moving": "positive"}
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.tensorflow
def test_classify_reviews_goes_from_a_file_to_answers_and_pictures(tmp_path):
    rows = [{"text": f"a {word} film number {i}", "label": label} for i in range(12) for word, label in WORDS.items()]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, EXAMPLES / "classify_reviews.py", "--dataset", "mine.jsonl", "--epochs", "1"]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "saved_models/mine/1: ok" in run.stdout and "test accuracy" in run.stdout
    for name in ("1/saved_model.pb", "training_curves.png", "attention.png"):
        assert (tmp_path / "saved_models/mine" / name).stat().st_size > 1000

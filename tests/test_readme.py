"""The README's code runs, and its two commands are what the project runs."""

import re
from pathlib import Path

import pytest

import keras_tx

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:In the future `np.object`:FutureWarning")  # of Keras' patch of tf2onnx
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_code_in_the_readme_runs(index, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[index], f"README.md, block {index}", "exec"), {})
    if "serving.check" in BLOCKS[index]:
        assert "saved_models/reviews/1: ok" in capsys.readouterr().out


def test_the_readme_names_all_public_names():
    rows = dict(re.findall(r"^\| `keras_tx\.(\w+)` \| (.*) \|$", README, re.M))
    for folder, row in rows.items():
        public = getattr(keras_tx, folder).__all__
        assert set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row))) == set(public)
    assert set(rows) == set(keras_tx.__all__) - {"__version__"}


def test_ci_runs_the_test_line_of_the_readme():
    lines = re.findall(r"^    (pip install .*)$", README, re.M)
    assert len(lines) == 2 and lines[1].endswith("scripts/check")
    assert "scripts/check$' README.md" in (ROOT / ".ci" / "run").read_text()

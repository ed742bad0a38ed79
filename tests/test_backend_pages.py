"""The code of the pages for JAX and PyTorch runs there and prints what the pages say."""

import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_of_the_backend_prints_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    import blocks

    of_backends = {blocks.front_matter(page).get("backend"): page for page in blocks.pages()}
    assert {"jax", "torch"} <= of_backends.keys()
    if keras.backend.backend() == "tensorflow":
        pytest.skip("test_docs.py runs the pages for TensorFlow")
    blocks.run(of_backends[keras.backend.backend()], tmp_path)

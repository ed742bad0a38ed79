"""Checkpoints on JAX and PyTorch: hidden states and logits of all of them, and every way in which one may be stored."""

import pytest

from tests.backends.another import run_tests


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_checkpoints_equal_transformers(backend):
    run_tests(backend, "pretrained/test_parity.py")

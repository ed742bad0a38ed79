"""`generate` and losses on JAX and PyTorch: what a loop over the whole model writes, and NumPy's numbers."""

import pytest

from tests.backends.another import run_tests


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_generation_and_losses_hold(backend):
    run_tests(backend, "generation/test_generate.py", "training/test_losses.py")

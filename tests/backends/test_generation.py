"""`generate` on JAX and PyTorch writes what a loop over the whole model does; the losses on PyTorch are NumPy's."""

from tests.backends.another import run_tests


def test_generation_holds_on_jax():
    run_tests("jax", "generation/test_generate.py")


def test_generation_and_losses_hold_on_torch():
    run_tests("torch", "generation/test_generate.py", "training/test_losses.py")

"""Layers, kernels, a model, losses and a compiled search on JAX.

JAX compiles every operation for every shape, so here it is the contracts, the attention function, one model, the losses
and the strategies in a compiled loop; `KERAS_BACKEND=jax pytest tests/layers tests/models tests/generation` runs all.
"""

from tests.backends.another import run_tests


def test_contracts_and_a_model_hold_on_jax():
    run_tests(
        "jax",
        "layers/test_contracts.py",
        "layers/test_dense_attention.py",
        "layers/test_fused_attention.py",
        "models/test_text_classifier.py",
    )


def test_losses_and_strategies_hold_on_jax():
    run_tests("jax", "training/test_losses.py", "generation/test_compiled.py")

"""The layers and models on JAX.

JAX compiles every operation for every shape, so here it is the contracts, the attention function and the models;
`KERAS_BACKEND=jax pytest tests/layers tests/models` runs all.
"""

from tests.backends.another import run_tests


def test_contracts_and_models_hold_on_jax():
    run_tests("jax", "layers/test_contracts.py", "layers/test_attend.py", "models")

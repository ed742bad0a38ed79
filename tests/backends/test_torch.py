"""The layers and models on PyTorch."""

from tests.backends.another import run_tests


def test_layers_and_models_hold_on_torch():
    run_tests("torch", "layers", "models")

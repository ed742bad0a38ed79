import keras
import pytest

from keras_tx.generation import compiled_loop
from tests.generation import built


@pytest.fixture
def eager(monkeypatch):
    """Runs decoding loops without a graph on TensorFlow, where tracing one takes longer than a hundred tiny steps.

    JAX compiles all the same. A test that needs what the backend makes of the loop does not use this.
    """
    if keras.backend.backend() == "tensorflow":
        monkeypatch.setattr(compiled_loop, "_compiled", lambda function, model, jit_compile: function)


@pytest.fixture(scope="module")
def lm():
    keras.utils.set_random_seed(7)  # fixtures of modules come before that of each test
    return built.made("causal_lm")


@pytest.fixture(scope="module")
def draft_model():
    keras.utils.set_random_seed(9)
    return built.made("untied")

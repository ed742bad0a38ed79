import keras
import pytest

from keras_tx.generation import compiled_loop


@pytest.fixture
def eager(monkeypatch):
    """Runs decoding loops without a graph on TensorFlow, where tracing one takes longer than a hundred tiny steps.

    JAX compiles all the same. A test that needs what the backend makes of the loop does not use this.
    """
    if keras.backend.backend() == "tensorflow":
        monkeypatch.setattr(compiled_loop, "_compiled", lambda function, model, jit_compile: function)

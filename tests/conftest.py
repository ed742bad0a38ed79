import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest
from hypothesis import settings

# Each shape is compiled anew on JAX: there the examples show that the backends agree, the many run on TensorFlow.
EXAMPLES = 30 if keras.backend.backend() == "tensorflow" else 4

settings.register_profile("keras_tx", deadline=None, max_examples=EXAMPLES, derandomize=True)
settings.load_profile("keras_tx")


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Where `tests.pretrained.tiny` keeps checkpoints: the folder of the caller, or one of all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    os.environ.setdefault("KERAS_TX_TEST_CACHE", str(base.parent if is_worker else base))


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)


def pytest_collection_modifyitems(items):
    if keras.backend.backend() != "tensorflow":
        for item in items:
            if item.get_closest_marker("tensorflow"):
                item.add_marker(pytest.mark.skip(reason="needs the TensorFlow backend"))

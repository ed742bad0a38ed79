import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

from tests import plain_tf_data, unnamed_variables, xla_flags

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("XLA_FLAGS", xla_flags.OF_BACKEND)

import keras
import pytest
from hypothesis import settings

BACKEND = keras.backend.backend()
# JAX compiles each shape anew: there a few examples show that the backends agree, the many run on TensorFlow.
EXAMPLES = 4 if BACKEND == "jax" else 30

settings.register_profile("keras_tx", deadline=None, max_examples=EXAMPLES, derandomize=True)
settings.load_profile("keras_tx")

if BACKEND == "tensorflow":
    plain_tf_data.set_up()
    unnamed_variables.set_up()

MOST_MEMORY = 2.0  # GiB that a process may hold before it gives back what it can

peaks = pytest.StashKey[list[float]]()


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """Where `tests.pretrained.tiny` keeps checkpoints: the folder of the caller, or one of all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    os.environ.setdefault("KERAS_TX_TEST_CACHE", str(base.parent if is_worker else base))


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(7)


@pytest.fixture
def eager(monkeypatch):
    """Runs decoding loops without a graph on TensorFlow, where tracing one takes longer than a hundred tiny steps.

    JAX compiles all the same. A test that needs what the backend makes of the loop does not use this. A model keeps its
    loops: where a fixture shares it, a test of a graph must ask for what no eager test asked for.
    """
    if BACKEND == "tensorflow":
        from keras_tx.generation import compiled_loop

        monkeypatch.setattr(compiled_loop, "_compiled", lambda function, models, jit_compile: function)


@pytest.fixture(autouse=True)
def memory_given_back():
    """JAX keeps every program that it compiled, and the C library what was freed: gigabytes by the end of a run."""
    yield
    if _memory() > _limit[0]:
        if BACKEND == "jax":
            sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        _limit[0] = max(MOST_MEMORY, _memory() + 0.5)


_limit = [MOST_MEMORY]


def _memory():
    """The memory that this process holds, in GiB; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30
    except OSError:
        return 0


def pytest_collection_modifyitems(items):
    if BACKEND != "tensorflow":
        for item in items:
            if item.get_closest_marker("tensorflow"):
                item.add_marker(pytest.mark.skip(reason="needs the TensorFlow backend"))


def pytest_collection_finish():
    # What is imported by now stays: the garbage collector, which Keras also calls itself, need not look at it again.
    gc.collect()
    gc.freeze()
    # A traced graph is many thousand objects that stay: to look at all of them often takes a tenth of the time.
    gc.set_threshold(50_000, 20, 100)


def pytest_configure(config):
    config.stash[peaks] = []


def pytest_sessionfinish(session):
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist, which tells the process that prints
        session.config.workeroutput["peak"] = kilobytes / 2**20
    else:
        session.config.stash[peaks].append(kilobytes / 2**20)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    if "peak" in output:
        node.config.stash[peaks].append(output["peak"])


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[peaks]:
        terminalreporter.write_line(f"Peak memory of a process: {max(config.stash[peaks]):.1f} GiB")

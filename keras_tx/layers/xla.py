"""Whether the graph that is being traced will be compiled by XLA, and whether for CPUs.

A few steps have two forms: one that is fast under XLA but slow or impossible in TensorFlow without XLA, and one that
works everywhere. Both compute the same. Code that compiles with XLA traces its graphs inside `tracing(True)`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import keras

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_tracing: ContextVar[bool | None] = ContextVar("keras_tx_xla", default=None)


@contextmanager
def tracing(by_xla: bool) -> Iterator[None]:
    """Within this context graphs are traced for XLA, or not."""
    token = _tracing.set(by_xla)
    try:
        yield
    finally:
        _tracing.reset(token)


def is_traced() -> bool:
    """True within `tracing(True)`, and on JAX, which compiles everything with XLA."""
    return bool(_tracing.get()) or keras.backend.backend() == "jax"


def is_generating() -> bool:
    """True within `tracing`, in which graphs of generation are traced, of which nobody takes a gradient."""
    return _tracing.get() is not None


def has_only_cpus() -> bool:
    """Whether TensorFlow is the backend, and sees no other device than CPUs."""
    if keras.backend.backend() != "tensorflow":
        return False
    return all(device.device_type == "CPU" for device in tf.config.get_visible_devices())


def keeps_programs() -> bool:
    """Whether TensorFlow keeps compiled programs in a folder, for other processes."""
    return "--tf_xla_persistent_cache_directory" in os.environ.get("TF_XLA_FLAGS", "")

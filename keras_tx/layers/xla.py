"""Whether the graph that is being traced will be compiled by XLA.

A few steps have two forms: one that is fast under XLA but that TensorFlow without XLA cannot run, or runs slower, and
one for everywhere. Both compute the same. Who compiles says so while tracing.
"""

from contextlib import contextmanager
from contextvars import ContextVar

import keras

_tracing = ContextVar("keras_tx_xla", default=False)


@contextmanager
def tracing(by_xla):
    """Within, graphs are traced for XLA, or not."""
    token = _tracing.set(by_xla)
    try:
        yield
    finally:
        _tracing.reset(token)


def is_traced():
    """True within `tracing(True)`, and on JAX, where everything is compiled by XLA."""
    return _tracing.get() or keras.backend.backend() == "jax"

"""A lock for each model: what its threads share is built, traced and compiled by one of them, and not by each.

Whatever is found built is used without the lock, so that no thread waits for another that compiles something else.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def lock_of(model: Any) -> Any:
    """The reentrant lock of a model."""
    # `setdefault` of a dict is atomic. An attribute that is set directly would be tracked by Keras.
    return vars(model).setdefault("_keras_tx_lock", threading.RLock())


@contextmanager
def all_locked(models: Iterable[Any]) -> Iterator[None]:
    """Holds the locks of several models, in an order that is the same in every thread, so that none waits for ever."""
    with ExitStack() as held:
        for model in sorted(models, key=id):
            held.enter_context(lock_of(model))
        yield

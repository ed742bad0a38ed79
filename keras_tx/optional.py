"""Modules that are imported at first use, so that `import keras_tx` is fast and works without the extras.

TensorFlow is among them because layers and models also run on the JAX and PyTorch backends without it.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

_waiting: dict[str, Callable[[], Any]] = {}


def once_imported(name: str, function: Callable[[], Any]) -> None:
    """Calls `function` if the module `name` was imported already, or else at the first use of it through a `Lazy`."""
    if sys.modules.get(name):
        function()
    else:
        _waiting[name] = function


class Lazy:
    """A placeholder for the module `name`, which is imported when an attribute is first read.

    Args:
        name: the module's dotted name.
        extra: the extra of keras-tx that installs it; the error for a missing module names it.

    Raises:
        ImportError: at first use, if the module is not installed; the message says what to install.
    """

    def __init__(self, name: str, extra: str | None = None):
        self._name = name
        self._extra = extra

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ModuleNotFoundError as error:
            wanted = f"keras-tx[{self._extra}]" if self._extra else self._name
            raise ImportError(
                f"`{self._name}` is needed here and cannot be imported ({error}). Install it: pip install '{wanted}'"
            ) from error
        if self._name in _waiting:
            _waiting.pop(self._name, lambda: None)()  # another thread may have taken it
        return getattr(module, attribute)

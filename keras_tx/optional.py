"""Modules that are imported at first use: `import keras_tx` stays cheap and works without the extras.

TensorFlow is among them because layers and models also run on the JAX and PyTorch backends without it.
"""

import importlib
from typing import Any


class Lazy:
    """Stands for the module `name`; the first attribute read imports it.

    Args:
        name: the module's dotted name.
        extra: the extra of keras-tx that brings it, named in the error when it is missing.

    Raises:
        ImportError: at first use, when the module is not installed; says what to install.
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
        return getattr(module, attribute)

"""Layers that differ in their weights alone are traced once: tracing is a third of the first call of `generate`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_tx.keras_internals import get_keras_mask, layers_within, set_keras_mask, stored_value
from keras_tx.layers import xla
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


class SharedTrace:
    """Calls the layers of a stack, and in a graph for XLA makes one function of those that are alike.

    XLA puts the operations of a function in the place of each call, so the program is the same as without.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[Any, Callable[..., Any]]] = []  # with the layer that each was traced with

    def __call__(self, layer: Any, inputs: Tensor, **options: Any) -> Any:
        """`layer(inputs, **options)`, where options are tensors, nested tuples of tensors, numbers or None."""
        if not _is_possible(options.get("training")):
            return layer(inputs, **options)
        function = next((made for first, made in self._functions if are_alike(first, layer)), None)
        if function is None:
            function = _function_of(layer)
            self._functions.append((layer, function))
        weights = [tf.convert_to_tensor(stored_value(one)) for one in layer.variables]
        # With a cache, the layers after the first get none, and the first must not be traced for itself.
        mask = None if options.get("cache") is not None else get_keras_mask(inputs)
        results, mask = function(weights, inputs, mask, options)
        set_keras_mask(results[0] if isinstance(results, tuple) else results, mask)
        return results


def _is_possible(training: bool | None) -> bool:
    """Whether a graph for XLA is being traced, in which no layer changes a variable, as dropout does in training."""
    if keras.backend.backend() != "tensorflow" or training is not False:
        return False
    return xla.is_traced() and tf.inside_function() and not tf.distribute.has_strategy()


def _function_of(layer: Any) -> Callable[..., Any]:
    variables = layer.variables

    def call(weights: list[Tensor], inputs: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Any:
        set_keras_mask(inputs, mask)
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            results = layer(inputs, **options)
        return results, get_keras_mask(results[0] if isinstance(results, tuple) else results)

    return tf.function(call, autograph=False)  # type: ignore[no-any-return]


def are_alike(first: Any, second: Any) -> bool:
    """Whether two layers differ in nothing but their names and the values of their variables."""
    both = layers_within(first), layers_within(second)
    return (
        len(both[0]) == len(both[1])
        and all(_have_equal_settings(*pair) for pair in zip(*both, strict=True))
        and _shapes(first) == _shapes(second)
    )


def _have_equal_settings(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second) or first.dtype_policy.name != second.dtype_policy.name:
        return False
    try:
        configs = first.get_config(), second.get_config()
    except Exception:  # Keras cannot tell the arguments of the constructor, or a layer of a user fails
        return False
    return _are_equal(*configs)


def _are_equal(first: Any, second: Any) -> bool:
    """Whether two parts of configs are equal, apart from the names of layers."""
    if isinstance(first, dict) and isinstance(second, dict):
        ignored = {"name"} if "trainable" in first else set()  # the config of a layer
        return first.keys() == second.keys() and all(
            _are_equal(first[key], second[key]) for key in first.keys() - ignored
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    return first is second or bool(np.array_equal(first, second))


def _shapes(layer: Any) -> list[Any]:
    """The path within the layer, the shape and the dtype of each variable."""
    start = len(layer.path)
    return [(one.path[start:], tuple(one.shape), one.dtype) for one in layer.variables]

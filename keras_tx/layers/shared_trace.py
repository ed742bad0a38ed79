"""Layers that differ in their weights alone are traced once: tracing was a third of the first call of `generate`."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_tx.internals.keras_models import get_keras_mask, is_of_keras, layers_within, set_keras_mask, without_autocast
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
        if not _is_possible(options.get("training")) or not all(map(_is_known, layers_within(layer))):
            return layer(inputs, **options)
        function = next((made for first, made in self._functions if are_alike(first, layer)), None)
        if function is None:
            function = _function_of(layer)
            self._functions.append((layer, function))
        with without_autocast():
            weights = [tf.convert_to_tensor(one.value) for one in layer.variables]
        # With a cache only the first layer would get a Keras mask, and would need a trace of its own.
        mask = None if options.get("cache") is not None else get_keras_mask(inputs)
        results, mask = function(weights, inputs, mask, options)
        set_keras_mask(results[0] if isinstance(results, tuple) else results, mask)
        return results


def _is_possible(training: bool | None) -> bool:
    """Whether a graph for XLA is being traced, in inference, where the layers that are known change no variable."""
    if keras.backend.backend() != "tensorflow" or training is not False:
        return False
    return xla.is_traced() and tf.inside_function() and not tf.distribute.has_strategy()


def _is_known(layer: Any) -> bool:
    """Whether the class of a layer is of Keras or of this package, and says what the layer computes.

    What a layer of a user computes may depend on more than its config, and it may change its variables.
    """
    kind = type(layer)
    is_ours = kind.__module__.startswith("keras_tx.")
    return (is_ours or is_of_keras(kind)) and "call" not in vars(layer) and "__call__" not in vars(layer)


def _function_of(layer: Any) -> Callable[..., Any]:
    variables = layer.variables

    def call(weights: list[Tensor], inputs: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Any:
        set_keras_mask(inputs, mask)
        with without_autocast():  # otherwise the scope would cast the weights
            scope = keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True)))
        with scope:
            results = layer(inputs, **options)
        return results, get_keras_mask(results[0] if isinstance(results, tuple) else results)

    return tf.function(call, autograph=False)  # type: ignore[no-any-return]


def are_alike(first: Any, second: Any) -> bool:
    """Whether two layers, and those within them, have equal classes, configs, dtypes and shapes of variables."""
    both = layers_within(first), layers_within(second)
    return (
        len(both[0]) == len(both[1])
        and all(_have_equal_settings(*pair) for pair in zip(*both, strict=True))
        and _shapes(first) == _shapes(second)
    )


def _have_equal_settings(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second) or _dtypes(first) != _dtypes(second):
        return False
    # A config has only the name of the activation, and two functions may share a name.
    if getattr(first, "activation", None) is not getattr(second, "activation", None):
        return False
    try:
        configs = first.get_config(), second.get_config()
    except Exception:  # Keras cannot tell the arguments of the constructor, or a layer of a user fails
        return False
    for config in configs:
        config.pop("dtype", None)  # compared above; of a quantized model it has the paths of the layers within
    return _are_equal(*configs)


def _dtypes(layer: Any) -> tuple[str | None, ...]:
    return layer.dtype_policy.name, layer.compute_dtype, layer.variable_dtype, layer.quantization_mode


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
    with without_autocast():
        return [(one.path[start:], tuple(one.shape), one.dtype) for one in layer.variables]

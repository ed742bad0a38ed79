"""Checks of constructor arguments. Each error names the argument, the rule and the received value."""

import inspect
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from keras_tx.keras_internals import layers_within


def positive_int(name: str, value: Any, none: bool = False) -> Any:
    """Returns `value` if it is a positive integer (or None, where `none` allows it)."""
    if none and value is None:
        return value
    if not isinstance(value, Integral) or isinstance(value, bool) or value <= 0:
        rule = "a positive integer or None" if none else "a positive integer"
        raise ValueError(f"The argument `{name}` must be {rule}. Received: {name}={value!r}")
    return int(value)


def rate(name: str, value: Any) -> float:
    """Returns `value` if it is a probability that dropout can take: 0 <= value < 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise ValueError(f"The argument `{name}` must be a number in [0, 1). Received: {name}={value!r}")
    return _plain(value)


def positive_float(name: str, value: Any) -> float:
    """Returns `value` if it is a finite positive number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise ValueError(f"The argument `{name}` must be a positive finite number. Received: {name}={value!r}")
    return _plain(value)


def _plain(value: Any) -> float:
    """A number that JSON has; NumPy's are not all."""
    return value if isinstance(value, (int, float)) else float(value)


def unregularized(name: str, layer: Any) -> None:
    """Raises if a layer within `layer` has an activity regularizer, whose loss `name` would count falsely."""
    regularized = [one.name for one in layers_within(layer) if one.activity_regularizer is not None]
    if regularized:
        raise ValueError(
            f"`{name}` does not go with `activity_regularizer`. Received: {name}=True, layers {regularized}"
        )


def one_of(name: str, value: Any, allowed: Collection) -> Any:
    """Returns `value` if it is one of `allowed`."""
    if value not in list(allowed):  # a list compares, where a dict would hash
        raise ValueError(f"The argument `{name}` must be one of {list(allowed)}. Received: {name}={value!r}")
    return value


def parameters_of(layer: type) -> list[str]:
    """The keyword arguments of a layer: its own, and those of the bases that its `**kwargs` go to, Keras' left out."""
    names: dict[str, None] = {}
    for base in layer.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
            if not base.__module__.startswith("keras_tx."):
                break
            names |= {p.name: None for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return list(names)


def options_of(name: str, value: Any, layer: type, given: Collection[str] = ()) -> dict:
    """Returns a copy of the dict `value` if its keys are keyword arguments of `layer`, `given` ones left out."""
    allowed = [parameter for parameter in parameters_of(layer) if parameter not in given]
    options = {} if value is None else value
    if not isinstance(options, dict) or not set(options) <= set(allowed):
        raise ValueError(f"The argument `{name}` must be a dict with keys among {allowed}. Received: {name}={value!r}")
    return dict(options)

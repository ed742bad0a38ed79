"""Checks of constructor arguments. Each error names the argument, the rule and the received value.

Checks of numbers return plain Python numbers, also for NumPy's types, because configs are stored as JSON.
"""

import difflib
import inspect
import math
import os
import re
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx.internals.keras_models import layers_within

# "gs://bucket" and "gs:/bucket", which `Path` makes of it. A drive of Windows is a single letter.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:[/\\]")


def positive_int(name: str, value: Any, none: bool = False, most: float = math.inf) -> Any:
    """Returns `value` as an int if it is a positive integer, at most `most`; also accepts None if `none` is True."""
    if none and value is None:
        return value
    is_positive = isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
    if not is_positive or int(value) > most:
        rule = "a positive integer or None" if none else "a positive integer"
        rule += f", at most {most}" if is_positive else ""
        raise ValueError(f"The argument `{name}` must be {rule}. Received: {name}={value!r}")
    return int(value)


def count(name: str, value: Any) -> int:
    """Returns `value` as an int if it is an integer of at least 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ValueError(f"The argument `{name}` must be an integer of at least 0. Received: {name}={value!r}")
    return int(value)


def integer(name: str, value: Any, none: bool = False) -> Any:
    """Returns `value` as an int if it is an integer; also accepts None if `none` is True."""
    if none and value is None:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        rule = "an integer or None" if none else "an integer"
        raise ValueError(f"The argument `{name}` must be {rule}. Received: {name}={value!r}")
    return int(value)


def boolean(name: str, value: Any, none: bool = False) -> Any:
    """Returns `value` as a bool if it is a boolean, also one of NumPy; also accepts None if `none` is True."""
    if none and value is None:
        return value
    if not isinstance(value, (bool, np.bool_)):
        rule = "True, False or None" if none else "True or False"
        raise TypeError(f"`{name}` must be {rule}. Received: {name}={value!r}")
    return bool(value)


def flag(name: str, value: Any, none: bool = False) -> Any:
    """As `boolean`, and accepts 1 and 0, which files of earlier versions may have as arguments of layers and models."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool) and int(value) in (0, 1)
    return bool(value) if is_number else boolean(name, value, none)


def path(name: str, value: Any) -> None:
    """Raises unless `value` is a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"The argument `{name}` must be a path, a `str` or `Path`. Received: {name}={value!r}")


def local_path(name: str, value: Any) -> Path:
    """Returns `value` as a Path if it is a path of this machine, and not a URL, of which `Path` would make a folder."""
    path(name, value)
    given = os.fsdecode(value)
    if _URL.match(given) or "\0" in given:
        rule = "be a local path, and not a URL" if _URL.match(given) else "not contain a null character"
        raise ValueError(f"The argument `{name}` must {rule}. Received: {name}={given!r}")
    return Path(value)


def rate(name: str, value: Any) -> float:
    """Returns `value` as a float if it is a rate of dropout: 0 <= value < 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise ValueError(f"The argument `{name}` must be a number in [0, 1). Received: {name}={value!r}")
    return float(value)


def part(name: str, value: Any) -> float:
    """Returns `value` as a float if it is a part of a whole, and not nothing: 0 < value <= 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 1:
        raise ValueError(f"The argument `{name}` must be a number in (0, 1]. Received: {name}={value!r}")
    return float(value)


def positive_float(name: str, value: Any) -> float:
    """Returns `value` as a float if it is a finite positive number."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise ValueError(f"The argument `{name}` must be a positive finite number. Received: {name}={value!r}")
    return float(value)


def built(method: str, layer: Any) -> None:
    """Raises if `method` needs weights of `layer` that are not created yet."""
    if not layer.built:
        raise ValueError(
            f"`{method}` needs a layer that is built. Call the layer on its inputs before, or its `build` with their "
            f"shapes. Received: '{layer.name}' ({type(layer).__name__}), which is not built"
        )


def unregularized(name: str, layer: Any) -> None:
    """Raises if `layer` contains an activity regularizer: the option `name` would change the loss that it adds."""
    regularized = regularized_within(layer)
    if regularized:
        raise ValueError(
            f"`{name}` cannot be used with `activity_regularizer`. Received: {name}=True, layers {regularized}"
        )


def regularized_within(layer: Any) -> list[str]:
    """The names of the layers inside `layer` that have an activity regularizer."""
    return [one.name for one in layers_within(layer) if one.activity_regularizer is not None]


def one_of(name: str, value: Any, allowed: Collection[Any]) -> Any:
    """Returns `value` if it is one of `allowed`."""
    if value not in list(allowed):  # in a list: values that cannot be hashed are compared too
        raise ValueError(f"The argument `{name}` must be one of {list(allowed)}. Received: {name}={value!r}")
    return value


def parameters_of(cls: type) -> list[str]:
    """The names of the constructor arguments of a layer or model of this package, or of a subclass; not Keras' own."""
    ours = next(base for base in cls.__mro__ if base.__module__.startswith("keras_tx.") and "__init__" in vars(base))
    parameters = inspect.signature(ours).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def known_arguments(cls: type, rest: Mapping[str, Any], further: Collection[str] = ()) -> None:
    """Raises if `rest`, the `**kwargs` of a constructor, has a name that the base class does not know either.

    Keras' models ignore unknown names, and its layers do not suggest the most similar name.

    Args:
        cls: the class that is constructed.
        rest: the arguments that its signature does not name.
        further: the names of arguments of the base class.
    """
    for name, value in rest.items():
        if name not in further:
            near = difflib.get_close_matches(name, [*parameters_of(cls), *further], n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(f"`{cls.__name__}` has no argument `{name}`.{hint} Received: {name}={value!r}")


def options_of(name: str, value: Any, cls: type, given: Collection[str] = ()) -> dict[str, Any]:
    """Returns a copy of the dict `value` if its keys are constructor arguments of `cls` other than those in `given`."""
    allowed = [parameter for parameter in parameters_of(cls) if parameter not in given]
    options = {} if value is None else value
    if not isinstance(options, dict) or not set(options) <= set(allowed):
        raise ValueError(f"The argument `{name}` must be a dict with keys among {allowed}. Received: {name}={value!r}")
    return dict(options)

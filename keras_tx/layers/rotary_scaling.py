"""Frequencies of rotary positions, and how models scale them for sequences longer than in training.

R rotated features of a head. The types and keys of `scaling` are those of Hugging Face's `rope_parameters`.
YaRN: Peng et al. 2023, arXiv:2309.00071.
"""

import math
from typing import Any

import numpy as np
from keras import ops

from keras_tx import checks

# The required keys of each type, and its optional ones.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


def frequencies(
    size: int, *, base: float = 10000, scaling: dict[str, Any] | None = None, length: Any = None, dtype: str = "float32"
) -> Any:
    """The frequencies (R/2,) that `rotate` takes, in radians per position: base ** (-2i / R), changed by `scaling`.

    Args:
        size: R, the number of rotated features, even.
        base: the base of the powers. The slowest pair makes one turn in about `base` * 2 pi positions.
        scaling: None or a dict that `check_scaling` returned.
        length: the length of the sequence, an integer or a scalar tensor. Only the type "dynamic" uses it.
        dtype: of the result if `length` is a tensor.

    Returns:
        A float64 array, or for a dynamic `scaling` with a tensor as `length` a tensor.
    """
    plain = np.float64(base) ** (-2 * np.arange(size // 2) / size)
    scaling = scaling or {"rope_type": "default"}
    kind, factor, original = (
        scaling.get(key, 1) for key in ("rope_type", "factor", "original_max_position_embeddings")
    )
    if kind == "linear":
        return plain / factor
    if kind == "dynamic":
        return plain if length is None else _stretched(plain, factor, original, length, dtype)
    if kind == "yarn":
        slowed = _yarn_ramp(size, base, scaling)
    elif kind == "llama3":  # pairs that turn often enough over the original length keep their frequency
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        slowed = 1 - np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
    else:
        return plain
    return plain * (1 - slowed) + plain / factor * slowed


def attention_factor(scaling: dict[str, Any] | None) -> float:
    """The factor by which `rotate` multiplies the features: 1, except with YaRN."""
    if not scaling or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])

    def grown(mscale: float = 1.0) -> float:
        return 1 + 0.1 * mscale * math.log(scaling["factor"])

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown()  # one without the other changes nothing


def check_scaling(scaling: Any, base: float, fraction: float) -> dict[str, Any] | None:
    """Returns a copy of `scaling` without keys of None and those that repeat `base` or `fraction`; None for "default".

    Raises:
        ValueError: for keys that are unknown, missing or contradict another argument, and values out of range.
    """
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise ValueError(f"The argument `scaling` must be None or a dict. Received: scaling={scaling!r}")
    # In JSON configs null stands for an absent key; but Hugging Face takes a "truncate" of null for False.
    given = {key: value for key, value in scaling.items() if value is not None or key == "truncate"}
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given] or [None]
    if kinds[0] != kinds[-1]:
        raise ValueError(
            f"The argument `scaling` must have the same 'type' and 'rope_type'. Received: scaling={scaling}"
        )
    kind = checks.one_of("scaling['rope_type']", kinds[0], _KEYS)
    for key, name, value in (("rope_theta", "base", base), ("partial_rotary_factor", "fraction", fraction)):
        if given.pop(key, value) != value:
            raise ValueError(f"scaling['{key}'] must equal `{name}`. Received: {name}={value}, scaling={scaling}")
    required, optional = _KEYS[kind]
    if not set(required) <= set(given) <= {*required, *optional}:
        rule = f"the keys {list(required)}" + (f", may have {list(optional)}," if optional else "") + " and no others"
        rule = rule if required else "no further keys"
        raise ValueError(f"The argument `scaling` of type '{kind}' must have {rule}. Received: scaling={scaling}")
    given = {key: _check_value(f"scaling['{key}']", key, value) for key, value in given.items()}
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise ValueError(f"scaling['low_freq_factor'] must be below 'high_freq_factor'. Received: scaling={scaling}")
    if kind == "yarn" and given.get("beta_slow", 1) > given.get("beta_fast", 32):
        raise ValueError(f"scaling['beta_slow'] must not be above 'beta_fast'. Received: scaling={scaling}")
    return None if kind == "default" else {"rope_type": kind, **given}


def _check_value(name: str, key: str, value: Any) -> Any:
    """Returns the value of a key as a plain Python number, or raises."""
    if key == "truncate":
        return bool(checks.one_of(name, value, (True, False)))
    if key == "original_max_position_embeddings":
        return checks.positive_int(name, value)
    if key in ("mscale", "mscale_all_dim") and value == 0:
        return 0  # Hugging Face takes it for an absent key
    number = checks.positive_float(name, value)
    if key == "factor" and number < 1:
        raise ValueError(f"The argument `{name}` must be at least 1. Received: {name}={value}")
    return number


def _stretched(plain: Any, factor: float, original: int, length: Any, dtype: str) -> Any:
    """Dynamic NTK scaling: the base grows with the length, so that the slowest pair turns no further than in training.

    Hugging Face's base * growth ** (R / (R - 2)), raised to the power of -2i / R.
    """
    exponents = -np.arange(len(plain)) / (len(plain) - 1)
    if isinstance(length, int):
        return plain * (factor * max(length, original) / original - (factor - 1)) ** exponents
    growth = factor * ops.maximum(ops.cast(length, dtype), original) / original - (factor - 1)
    plain, exponents = (ops.convert_to_tensor(x, dtype=dtype) for x in (plain, exponents))
    return plain * ops.power(growth, exponents)


def _yarn_ramp(size: int, base: float, scaling: dict[str, Any]) -> Any:
    """(R/2,): 0 for pairs that turn `beta_fast` times or more over the original length, 1 from `beta_slow` down."""

    def pair_that_turns(times: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (times * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(base))

    low, high = pair_that_turns(scaling.get("beta_fast", 32)), pair_that_turns(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # makes the ramp a step
    return np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)

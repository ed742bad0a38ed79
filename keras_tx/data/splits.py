"""Random splits of examples into parts, and checks of their arguments."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np


def check_fraction(name: str, value: Any) -> float:
    """Returns `value` as a `float` if 0 < value < 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1:
        raise ValueError(f"`{name}` must be a number above 0 and below 1. Received: {name}={value!r}")
    return float(value)


def generator(seed: Any) -> np.random.Generator:
    """Returns the generator of random numbers for a seed."""
    return np.random.default_rng(check_seed(seed))


def check_seed(seed: Any, most: float = math.inf) -> int:
    """Returns `seed` as an `int` if it is an integer of at least 0, and at most `most`."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) <= most:
        rule = "an integer of at least 0" if most == math.inf else f"an integer from 0 to {most}"
        raise ValueError(f"`seed` must be {rule}. Received: seed={seed!r}")
    return int(seed)


def hold_out(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples in two parts at random.

    Args:
        labels: the label of each example, (N,).
        fraction: the fraction of each class for the second part: at least one example, but not the only one of a class.
        rng: the generator of random numbers.

    Returns:
        The indices of the first part in random order, and those of the second in ascending order.
    """
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held_out[rng.permutation(members)[:count]] = True
    return rng.permutation(np.flatnonzero(~held_out)), np.flatnonzero(held_out)

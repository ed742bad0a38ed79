"""Which examples go into which part: checks of the arguments that say so, and mixing by a seed."""

from typing import Any

import numpy as np


def check_fraction(name: str, value: Any) -> float:
    """Returns `value` if it is a part of a whole: 0 < value < 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise ValueError(f"`{name}` must be a number between 0 and 1. Received: {name}={value!r}")
    return value


def generator(seed: Any) -> np.random.Generator:
    """The source of chance that `seed` stands for."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"`seed` must be an integer of at least 0. Received: seed={seed!r}")
    return np.random.default_rng(seed)


def hold_out(labels, fraction, rng):
    """Indices in two parts; of each class the fraction, at least one, goes to the second. A single example stays."""
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(1, round(len(members) * fraction)), len(members) - 1)
        held_out[rng.permutation(members)[:count]] = True
    return rng.permutation(np.flatnonzero(~held_out)), np.flatnonzero(held_out)

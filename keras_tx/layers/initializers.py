"""Copies of initializers, for several weights."""

from typing import Any


def clone_initializer(initializer: Any) -> Any:
    """A copy with a new seed, unless a seed was given: one object would give all weights the same values."""
    return initializer.clone() if hasattr(initializer, "clone") else initializer

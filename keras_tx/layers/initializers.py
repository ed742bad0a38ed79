"""Initializers: one -> another of the same kind, for another weight."""

from typing import Any


def clone_initializer(initializer: Any) -> Any:
    """A copy with a seed of its own, unless one was given: the same object would fill every weight alike."""
    return initializer.clone() if hasattr(initializer, "clone") else initializer

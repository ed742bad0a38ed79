"""Initializers: one -> another of the same kind, for another weight."""


def fresh(initializer):
    """A copy with a seed of its own, if it had none given: the same object would fill every weight alike."""
    return initializer.clone() if hasattr(initializer, "clone") else initializer

"""A package rather than a module: `keras_tx.serving.check` is the function, and `python -m` finds `__main__` here."""

from keras_tx.serving.check.audit import Report, check

__all__ = ["Report", "check"]

"""The function `check`, and the command `python -m keras_tx.serving.check PATH`, for which this is a package."""

from keras_tx.serving.check.audit import Report, check

__all__ = ["Report", "check"]

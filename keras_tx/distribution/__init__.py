"""Training on several devices and machines."""

from keras_tx.distribution.strategies import mirrored_strategy, multi_worker_strategy

__all__ = ["mirrored_strategy", "multi_worker_strategy"]

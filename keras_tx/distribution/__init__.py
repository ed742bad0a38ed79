"""Training on several devices and machines: strategies of TensorFlow, and layouts for JAX."""

from keras_tx.distribution.layouts import get_layout_map
from keras_tx.distribution.strategies import mirrored_strategy, multi_worker_strategy

__all__ = ["get_layout_map", "mirrored_strategy", "multi_worker_strategy"]

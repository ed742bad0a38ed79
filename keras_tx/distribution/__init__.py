"""Training on several devices and machines."""

from keras_tx.distribution.layouts import get_layout_map

__all__ = ["get_layout_map"]

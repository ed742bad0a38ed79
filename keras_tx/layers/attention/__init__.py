"""Multi-head attention: the layer, and the ways of computing it."""

from keras_tx.layers.attention.layer import MultiHeadAttention

__all__ = ["MultiHeadAttention"]

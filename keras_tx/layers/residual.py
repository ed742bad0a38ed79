"""The residual connection and its norm, pre-norm or post-norm: (B, T, D) -> (B, T, D).

Post-norm: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745; RMSNorm: Zhang and
Sennrich 2019, arXiv:1910.07467.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_tx.types import Tensor

NORMALIZATIONS = {
    "layer_norm": keras.layers.LayerNormalization,
    "layer_norm_no_bias": functools.partial(keras.layers.LayerNormalization, center=False),
    "rms_norm": keras.layers.RMSNormalization,
}


def residual(
    inputs: Tensor,
    sublayer: Callable[[Tensor], Any],
    *,
    norm: Any,
    dropout: Any,
    normalize_first: bool,
    training: bool | None = None,
) -> tuple[Any, ...]:
    """`x + dropout(f(norm(x)))` (pre-norm), or `norm(x + dropout(f(x)))` (post-norm).

    Args:
        inputs: x, (B, T, D).
        sublayer: f, a function of one tensor that returns (B, T, D), or a tuple that starts with it.
        norm: a layer. In pre-norm it may be None for no norm.
        dropout: a layer.
        normalize_first: whether the norm comes before f (pre-norm) or after the sum (post-norm).
        training: whether dropout is on.

    Returns:
        A tuple of the output (B, T, D) and the other items of the tuple that f returned.
    """
    outputs = sublayer(norm(inputs) if normalize_first and norm is not None else inputs)
    outputs, *further = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = inputs + dropout(outputs, training=training)
    return (outputs if normalize_first else norm(outputs)), *further


def make_norm(normalization: str, epsilon: float, **kwargs: Any) -> Any:
    """A norm layer over the last axis: one of `NORMALIZATIONS`. Its statistics are float32 under any policy."""
    layer = NORMALIZATIONS[normalization](epsilon=epsilon, **kwargs)
    layer.supports_masking = True  # Keras' RMSNormalization does not set it, and warns
    return layer

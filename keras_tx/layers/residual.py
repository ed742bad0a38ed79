"""The residual connection and its norm: (B, T, D) -> (B, T, D). Pre-norm and post-norm live here alone.

Post-norm: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745; RMSNorm: Zhang and
Sennrich 2019, arXiv:1910.07467.
"""

import functools

import keras

NORMALIZATIONS = {
    "layer_norm": keras.layers.LayerNormalization,
    "layer_norm_no_bias": functools.partial(keras.layers.LayerNormalization, center=False),
    "rms_norm": keras.layers.RMSNormalization,
}


def residual(inputs, sublayer, *, norm, dropout, normalize_first, training=None):
    """`x + dropout(f(norm(x)))`, or `norm(x + dropout(f(x)))`.

    Args:
        inputs: x, (B, T, D).
        sublayer: f, a function of one tensor that returns (B, T, D), or a tuple of that and anything beside it.
        norm: a layer; None for pre-norm that leaves the norm out.
        dropout: a layer.
        normalize_first: whether the norm comes before f (pre-norm) or after the sum (post-norm).
        training: whether dropout is on.

    Returns:
        A tuple: the sum (B, T, D), and what f returned beside its output.
    """
    outputs = sublayer(norm(inputs) if normalize_first and norm is not None else inputs)
    outputs, *beside = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = inputs + dropout(outputs, training=training)
    return (outputs if normalize_first else norm(outputs)), *beside


def make_norm(normalization, epsilon, **kwargs):
    """A norm layer over the last axis: one of `NORMALIZATIONS`. Its statistics are float32 under any policy."""
    layer = NORMALIZATIONS[normalization](epsilon=epsilon, **kwargs)
    layer.supports_masking = True  # Keras' RMSNormalization forgets to say so, and warns
    return layer

"""The residual connection and its norm, pre-norm or post-norm: (B, T, D) -> (B, T, D).

Post-norm: Vaswani et al. 2017, arXiv:1706.03762; pre-norm: Xiong et al. 2020, arXiv:2002.04745; RMSNorm: Zhang and
Sennrich 2019, arXiv:1910.07467.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.layers.configs import checked_copy, copy_of, serialized
from keras_tx.layers.layer_normalization import LayerNormalization
from keras_tx.layers.rms_normalization import RMSNormalization
from keras_tx.types import Tensor

NORMALIZATIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": LayerNormalization,
    "layer_norm_no_bias": functools.partial(LayerNormalization, center=False),
    "rms_norm": RMSNormalization,
}
EPSILON = 1e-5  # the default of `layer_norm_epsilon`


def residual(
    inputs: Tensor,
    sublayer: Callable[[Tensor], Any],
    *,
    norm: Any,
    dropout: Any,
    normalize_first: bool,
    training: bool | None = None,
) -> tuple[Any, ...]:
    """`x + dropout(f(norm(x)))` (pre-norm), or `norm(x + dropout(f(x)))` (post-norm), in the dtype of x.

    A `DTypePolicyMap` may give the sublayer and the norm other dtypes.

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
    # A layer that wraps this one may call it with inputs of another dtype than its own, to which `dropout` casts.
    outputs = inputs + ops.cast(dropout(outputs, training=training), inputs.dtype)
    if not normalize_first:
        outputs = ops.cast(norm(outputs), inputs.dtype)
    return outputs, *further


def check_normalization(normalization: Any, epsilon: float, *, none: bool = False) -> Any:
    """Returns what `make_norm` takes: a name, a layer without weights, or None if `none` is True.

    Args:
        normalization: a name, a layer, a callable that makes a layer, or the config of a layer.
        epsilon: the epsilon of norms that are given by name.
        none: whether None, for no norm, is allowed.
    """
    names = [None, *NORMALIZATIONS] if none else [*NORMALIZATIONS]
    if isinstance(normalization, dict):
        given = keras.saving.deserialize_keras_object(normalization)
    elif callable(normalization) and not isinstance(normalization, keras.layers.Layer):
        given = normalization()
    else:
        given = normalization
    if not isinstance(given, keras.layers.Layer):
        if given is normalization and given in names:
            return given
        made = "" if given is normalization else f", which makes {given!r}"
        raise ValueError(
            f"The argument `normalization` must be one of {names}, a layer, or a callable that makes a layer. "
            f"Received: normalization={normalization!r}{made}"
        )
    if not math.isclose(epsilon, EPSILON, rel_tol=1e-6):  # a NumPy float32 differs in its last digits
        raise ValueError(
            "`layer_norm_epsilon` must be left out if `normalization` is a layer, which has its own epsilon. Received: "
            f"layer_norm_epsilon={epsilon}, normalization={given.name}"
        )
    return checked_copy("normalization", given)


def serialize_normalization(normalization: Any) -> Any:
    """`normalization`, as `check_normalization` returned it, for a config."""
    return serialized(normalization) if isinstance(normalization, keras.layers.Layer) else normalization


def make_norm(normalization: Any, epsilon: float, *, dtype: Any = None, name: str | None = None) -> Any:
    """A norm layer over the last axis: one of `NORMALIZATIONS`, or a copy of a layer, without its weights.

    The statistics of `NORMALIZATIONS` are float64 under a float64 policy, and float32 under any other.
    """
    if isinstance(normalization, keras.layers.Layer):
        policy = keras.dtype_policies.serialize(keras.dtype_policies.get(dtype))
        layer = copy_of(normalization, name=name, dtype=policy)
    else:
        layer = NORMALIZATIONS[normalization](epsilon=epsilon, dtype=dtype, name=name)
    layer.supports_masking = True  # Keras' RMSNormalization does not set it, and warns
    return layer

"""The projections of attention: (..., D) -> (..., N, H), and back.

N heads, H head, D model. The weights have the shapes and the order of `keras.layers.MultiHeadAttention`.
"""

import string
from typing import Any

from keras_tx.layers.initializers import clone_initializer
from keras_tx.layers.projection import HeadProjection
from keras_tx.layers.splitting import Split
from keras_tx.types import Shape


def make_projection(
    layer: Any,
    name: str,
    input_shape: Shape,
    features: Shape,
    *,
    num_axes: int = 1,
    activation: Any = None,
    use_bias: bool = True,
) -> HeadProjection:
    """A built dense layer with the initializers, regularizers and constraints of `layer`, a `MultiHeadAttention`.

    Args:
        layer: the `MultiHeadAttention`.
        name: the name of the projection.
        input_shape: the shape of its input, of which the last `num_axes` axes are contracted.
        features: the sizes of the output axes that replace them.
        num_axes: how many axes are contracted.
        activation: the activation of the projection.
        use_bias: whether it has a bias.
    """
    letters = iter(string.ascii_letters)
    free, summed, made = (
        "".join(next(letters) for _ in range(count)) for count in (len(input_shape) - num_axes, num_axes, len(features))
    )
    projection = HeadProjection(
        f"{free}{summed},{summed}{made}->{free}{made}",
        output_shape=(*[None] * (len(free) - 1), *features),
        activation=activation,
        bias_axes=made if use_bias else None,
        kernel_initializer=clone_initializer(layer.kernel_initializer),  # shared, it would repeat values
        bias_initializer=clone_initializer(layer.bias_initializer),
        kernel_regularizer=layer.kernel_regularizer,
        bias_regularizer=layer.bias_regularizer,
        activity_regularizer=layer.projection_activity_regularizer,
        kernel_constraint=layer.kernel_constraint,
        bias_constraint=layer.bias_constraint,
        dtype=layer.dtype_policy,
        name=name,
    )
    projection.split = _split(name, num_axes, len(features))
    projection.supports_masking = True  # Keras would warn of a lost mask; the attention layer passes it on
    projection.build(input_shape)
    return projection


def _split(name: str, num_axes: int, num_features: int) -> Split:
    """How model parallelism splits a projection: by its heads. Too few key heads for that stay whole."""
    if num_axes == 2:  # (N, H, *features)
        return Split("num_heads", 0, rank=2 + num_features, inputs=2)
    if name in ("key", "value"):
        return Split("num_key_value_heads", 1, rank=3, optional=True)
    return Split("num_heads", 1, rank=3)

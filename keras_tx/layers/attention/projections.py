"""The projections of attention: (..., D) -> (..., N, H), and back.

N heads, H head, D model. The weights have the shapes and the order of `keras.layers.MultiHeadAttention`.
"""

import string
from typing import Any

from keras_tx import checks
from keras_tx.layers.initializers import clone_initializer
from keras_tx.layers.projection import HeadProjection, project_together
from keras_tx.layers.splitting import Split
from keras_tx.types import Shape, Tensor


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


def project_queries(layer: Any, query: Tensor) -> Tensor:
    """Inputs (..., D) -> the queries (..., N, H) of `layer`, a `MultiHeadAttention`."""
    query = layer.query_dense(query)
    return layer.query_norm(query) if layer.qk_norm else query


def project_keys_and_values(layer: Any, value: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inputs (..., D) -> the keys (..., K, H) and the values (..., K, V) of `layer`; without `key`, both of `value`."""
    checks.built("new_memory", layer)  # `call` has built it
    key = layer.key_dense(value if key is None else key)
    return layer.key_norm(key) if layer.qk_norm else key, layer.value_dense(value)


def project_all(layer: Any, query: Tensor, value: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of `layer`; where they have the same inputs, if possible by a single product."""
    made = None
    if value is query and (key is None or key is query):
        made = project_together([layer.query_dense, layer.key_dense, layer.value_dense], query)
    if made is None:
        return project_queries(layer, query), *project_keys_and_values(layer, value, key)
    if layer.qk_norm:
        return layer.query_norm(made[0]), layer.key_norm(made[1]), made[2]
    return made[0], made[1], made[2]


def _split(name: str, num_axes: int, num_features: int) -> Split:
    """How model parallelism splits a projection: by its heads. Too few key heads for that stay whole."""
    if num_axes == 2:  # (N, H, *features)
        return Split("num_heads", 0, rank=2 + num_features, inputs=2)
    if name in ("key", "value"):
        return Split("num_key_value_heads", 1, rank=3, optional=True)
    return Split("num_heads", 1, rank=3)

"""Sublayers in configs: layer -> dict."""

from typing import Any

import keras

from keras_tx import checks
from keras_tx.keras_internals import layers_within, replace_dtype_policy

_OF_KERAS = ("activity_regularizer", "autocast", "dtype", "input_dim", "input_shape", "name", "trainable")


class StrictLayer(keras.layers.Layer):
    """A layer that refuses unknown constructor arguments and offers the nearest name. Keras only refuses them."""

    def __init__(self, **kwargs: Any) -> None:
        checks.known_arguments(type(self), kwargs, _OF_KERAS)
        super().__init__(**kwargs)


class Composite(StrictLayer):
    """A layer of sublayers that have its dtype policy, but for those that `quantize` gave another."""

    def get_config(self):
        return {**super().get_config(), "dtype": serialized_policy(self, self.dtype_policy)}


def serialized_policy(layer, policy):
    """The `dtype` in the config of `layer`: `policy`, or a map with those of the layers below that were quantized."""
    below = layers_within(layer, include_self=False)
    quantized = {one.path: one.dtype_policy for one in below if one.quantization_mode is not None}
    if quantized:
        named = {path: policy[path] for path in policy} if _is_map(policy) else {}
        default = policy.default_policy if _is_map(policy) else policy
        policy = keras.dtype_policies.DTypePolicyMap(default.name, {**named, **quantized})
    return keras.dtype_policies.serialize(policy)


def in_float32(policy):
    """float32, but what a map of policies says of layers by name."""
    policy = keras.dtype_policies.get(policy)
    if not _is_map(policy):
        return "float32"
    return keras.dtype_policies.DTypePolicyMap("float32", {path: policy[path] for path in policy})


def take_own_policy(layer):
    """For `layer` the policy that the map has at its path, if it was given a map: Keras cannot quantize it, or save it
    once it is quantized, with the map."""
    if _is_map(layer.dtype_policy):
        replace_dtype_policy(layer, layer.dtype_policy[layer.path])


def _is_map(policy):
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def serialized(value):
    """`value` (a layer, None, or what else a config holds) as Keras serializes it, whether built or not."""
    config = keras.saving.serialize_keras_object(value)
    return {key: part for key, part in config.items() if key != "build_config"} if isinstance(config, dict) else config

"""Configs of layers that have sublayers, and the dtype policies in them."""

import re
from collections.abc import Iterable
from typing import Any

import keras

from keras_tx import checks
from keras_tx.internals.keras_models import HasAfterBuild, layers_within, replace_dtype_policy
from keras_tx.layers import trainable
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.remat_scope import Rematerializable
from keras_tx.layers.shapes import check_dense

_OF_KERAS = ("activity_regularizer", "autocast", "dtype", "input_dim", "input_shape", "name", "trainable")
_ANY_PARENT = "(.*/)?"  # what keys for sublayers begin with in a `DTypePolicyMap`


class StrictLayer(Rematerializable):
    """A layer whose error for an unknown constructor argument suggests the most similar name.

    It takes dense tensors only. A subclass whose `__call__` converts arguments must call `check_dense` first.
    """

    _checks_dense = False  # whether the `__call__` of a subclass has done it

    def __init__(self, **kwargs: Any) -> None:
        checks.known_arguments(type(self), kwargs, _OF_KERAS)
        super().__init__(**kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._checks_dense:
            check_dense(self, args, kwargs)
        return super().__call__(*args, **kwargs)


class Composite(HasAfterBuild, StrictLayer):
    """A layer whose sublayers have its dtype policy, except those that `quantize` gave a policy of their own.

    Its config says which of them are trainable.
    """

    def __init__(self, **kwargs: Any) -> None:
        within = kwargs.pop(trainable.KEY, {})  # from a config
        super().__init__(**kwargs)
        set_untracked(self, "_trainable_within", dict(within))

    def after_build(self) -> None:
        trainable.restore(self, self._trainable_within)

    def get_config(self) -> dict[str, Any]:
        policy = serialized_policy(self, self.dtype_policy)
        config = {**super().get_config(), "dtype": policy}
        if self.built or (self.trainable and not self._trainable_within):
            return {**config, **trainable.config_of(self)}
        # `after_build` freezes the sublayers by this entry. Until then, those of a layer with `trainable=False` are
        # trainable.
        return {**config, trainable.KEY: dict(self._trainable_within)} if self._trainable_within else config


def serialized_policy(layer: Any, policy: Any) -> Any:
    """The `dtype` in the config of `layer`: `policy`, or a `DTypePolicyMap` that includes quantized sublayers."""
    below = layers_within(layer, include_self=False)
    quantized = {one.path: one.dtype_policy for one in below if one.quantization_mode is not None}
    if quantized:
        named = {key: policy[key] for key in policy if key not in quantized} if _is_map(policy) else {}
        default = policy.default_policy if _is_map(policy) else policy
        quantized = {_key(layer, path, named): one for path, one in quantized.items()}
        policy = keras.dtype_policies.DTypePolicyMap(default.name, {**named, **quantized})
    return keras.dtype_policies.serialize(policy)


def _key(layer: Any, path: str, named: Iterable[str]) -> str:
    """The key in a `DTypePolicyMap` for the sublayer of `layer` with this path: a pattern that fits below any parent.

    A loaded layer may be built below other parents than before; in a `Sequential` it is first built without a parent.
    If a key of `named` matches the path, too, the result is the path itself, because Keras refuses two matching
    patterns.
    """
    if not path.startswith(f"{layer.path}/"):
        return path
    pattern = f"{_ANY_PARENT}{re.escape(path[len(layer.path) - len(layer.name) :])}"
    others = [one for one in named if one != pattern]
    return path if any(re.fullmatch(one, path) for one in others) else pattern


def in_float32(policy: Any) -> Any:
    """The policy with float32 as its default, unless that is float64; the entries of a `DTypePolicyMap` stay."""
    policy = keras.dtype_policies.get(policy)
    if not _is_map(policy):
        return wide_dtype(policy.compute_dtype)
    default = wide_dtype(policy.default_policy.compute_dtype)
    return keras.dtype_policies.DTypePolicyMap(default, {path: policy[path] for path in policy})


def widened(layer: Any, compute_dtype: str) -> Any:
    """`layer`, which computes positions for a layer of this dtype; one of keras_tx takes it over if it is wider.

    Positions in float32 would make the attention of a float64 model a float32 one, and those in half precision, which a
    layer gets from Keras' global policy, that of a float32 layer one in half precision.
    """
    narrower = {"float64": ("float32", "float16", "bfloat16"), "float32": ("float16", "bfloat16")}
    if isinstance(layer, StrictLayer) and layer.compute_dtype in narrower.get(compute_dtype, ()):
        replace_dtype_policy(layer, compute_dtype)
    return layer


def take_own_policy(layer: Any) -> None:
    """Replaces a `DTypePolicyMap`, if `layer` was given one, by the policy for its path.

    Keras cannot quantize a layer that has a map, nor save such a layer once it is quantized.
    """
    if _is_map(layer.dtype_policy):
        replace_dtype_policy(layer, own_policy(layer))


def own_policy(layer: Any) -> Any:
    """The dtype policy of `layer`, once it is built: that for its path, if it was given a `DTypePolicyMap`."""
    policies, path = layer.dtype_policy, layer.path
    if not _is_map(policies):
        return policies
    fitting = [path] if path in policies else [key for key in policies if re.fullmatch(key, path)]
    if len(fitting) > 1:  # below other parents, keys that `_key` wrote can fit paths for which the user has another one
        keys = [key for key in fitting if key.startswith(_ANY_PARENT)]
    else:  # Version 0.1.0 wrote the paths at that time, also of parents below which the layer is not built yet.
        keys = [] if fitting else [key for key in policies if key.endswith(f"/{path}")]
    # All keys that this package wrote have quantized policies.
    keys = [key for key in keys if policies[key].quantization_mode is not None]
    return policies[keys[0] if len(keys) == 1 else path]


def _is_map(policy: Any) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def serialized(value: Any) -> Any:
    """`value` (a layer, or anything else in a config) as Keras serializes it, the same before and after `build`."""
    config = keras.saving.serialize_keras_object(value)
    return {key: part for key, part in config.items() if key != "build_config"} if isinstance(config, dict) else config


def set_untracked(layer: Any, name: str, value: Any) -> None:
    """Sets an attribute that is no sublayer although it may be a layer, such as one that others are copied from."""
    object.__setattr__(layer, name, value)


def copy_of(layer: Any, **changes: Any) -> Any:
    """A new layer with the config of `layer`, apart from the `changes`."""
    return type(layer).from_config({**layer.get_config(), **changes})


def checked_copy(name: str, layer: Any) -> Any:
    """`copy_of` a layer that a user gave as the argument `name`; raises if it has weights or has no complete config."""
    if layer.weights:
        raise ValueError(
            f"A layer given as `{name}` must not be built: each place gets a new layer with the same config. "
            f"Received: {name}={layer.name} with {len(layer.weights)} weights"
        )
    try:
        return copy_of(layer)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            f"A layer given as `{name}` must have a config that `from_config` makes the layer from, with `name` "
            "and `dtype`: usually its constructor passes `**kwargs` to that of `keras.layers.Layer`. Received: "
            f"{name}={layer.name} of type {type(layer).__name__}, {error}"
        ) from error

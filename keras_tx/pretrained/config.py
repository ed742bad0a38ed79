"""Reads config.json, and raises an error for every value that would change the computation and is not supported."""

import copy
from collections.abc import Collection
from typing import Any

from keras_tx.layers import activations

# Hugging Face's names of activations: the names for our layers. "gelu" is the exact one.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "linear",
    "mish": "mish",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# Keys that change what some model of transformers computes, with the values that change nothing. Any other value is
# refused unless the family has read the key. Keys that are not listed are kept and saved again: transformers ignores
# keys that the class of a `model_type` does not know.
CHANGING: dict[str, tuple[Any, ...]] = {
    "adapters": ({},),
    "add_cross_attention": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (1.0,),
    "attn_logit_softcapping": (),
    "auto_map": ({},),
    "cross_attention_hidden_size": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_decoder": (False,),
    "layer_types": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "mlp_bias": (False,),
    "multi_query": (False,),
    "num_experts": (0,),
    "num_local_experts": (0, 1),
    "parallel_attn": (False,),
    "per_layer_config": ({},),
    "partial_rotary_factor": (1.0,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({},),
    "quantization_config": ({},),
    "query_pre_attn_scalar": (),
    "relative_attention": (False,),
    "residual_multiplier": (1.0,),
    "rope_parameters": (),
    "rope_scaling": (),
    "scale_embedding": (False,),
    "sliding_window": (),
    "tie_last_hidden_states": (True,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
# Two names of one number. If a config has both, transformers uses the second.
ALIASES = {
    "d_kv": "head_dim",
    "d_model": "hidden_size",
    "dim": "hidden_size",
    "encoder_attention_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
}
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
_NEEDED: Any = object()


class Config:
    """The content of config.json, with a record of the keys that were read.

    Families read values with the methods below, which treat null like a missing key. After a family has created its
    layers and before they are built, `check` raises for values that change the computation and were not read.

    Args:
        values: the content of config.json, which is copied.
        absent: optional parts of the model that the checkpoint lacks, such as "pooler".
    """

    def __init__(self, values: dict[str, Any], absent: Collection[str] = ()) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"`config` must be a dict, that of config.json. Received: config={values!r}")
        self.values = copy.deepcopy(dict(values))
        self.absent = tuple(absent)
        self._read: set[str] = set()

    def take(self, *keys: str, default: Any = _NEEDED) -> Any:
        """The value of the first key that is present.

        Raises:
            ValueError: no key is present, and there is no default.
        """
        self._read.update(keys)
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if default is _NEEDED:
            raise ValueError(f"config.json must have `{keys[0]}`. Received: {keys[0]}=None, keys {sorted(self.values)}")
        return default

    def number(self, *keys: str, default: Any = _NEEDED, kind: type = int) -> Any:
        """`take` for a positive integer, or, with `kind=float`, a non-negative number. The default is not checked."""
        if default is not _NEEDED and all(self.values.get(key) is None for key in keys):
            return self.take(*keys, default=default)
        value = self.take(*keys)
        allowed = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or not int(kind is int) <= value < float("inf"):
            rule = "a positive integer" if kind is int else "a number, not negative"
            raise ValueError(f"`{keys[0]}` in config.json must be {rule}. Received: {keys[0]}={value!r}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """`take` for a boolean."""
        value = self.take(key, default=default)
        if not isinstance(value, bool):
            raise ValueError(f"`{key}` in config.json must be true or false. Received: {key}={value!r}")
        return value

    def token(self, key: str, *, default: Any = None) -> Any:
        """`take` for the id of a token."""
        value = self.take(key, default=default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"`{key}` in config.json must be an integer. Received: {key}={value!r}")
        return value

    def activation(self, *keys: str, default: Any = _NEEDED) -> Any:
        """The activation function that a key names."""
        return activation(self.take(*keys, default=default), keys[0])

    def refuse(self, key: str, *supported: Any) -> None:
        """Raises if the value of a key is not among `supported`."""
        value = self.take(key, default=None)
        if value is not None and value not in supported:
            rule = " or ".join(map(repr, supported)) or "null"
            raise ValueError(f"`{key}` in config.json is supported as {rule} alone. Received: {key}={value!r}")

    @property
    def num_labels(self) -> int:
        """The number of classes: the size of `id2label`, else `num_labels`, else 2."""
        labels = self.take("id2label", default={})
        if not isinstance(labels, dict):
            raise ValueError(f"`id2label` in config.json must be a dict. Received: id2label={labels!r}")
        return len(labels) if labels else self.number("num_labels", default=2)

    def check(self) -> None:
        """Raises if a value that changes the computation was not read, or if two values contradict each other."""
        for key, other in ALIASES.items():
            value, another = self.values.get(key), self.values.get(other)
            if key in self._read and None not in (value, another) and value != another:
                raise ValueError(
                    f"`{key}` and `{other}` in config.json must be equal. Received: {key}={value!r}, "
                    f"{other}={another!r}"
                )
        for key, neutral in CHANGING.items():
            value = self.values.get(key)
            if key not in self._read and value is not None and value not in neutral:
                model_type = self.values.get("model_type")
                raise ValueError(
                    f"`{key}` in config.json is not supported for model_type={model_type!r}. Received: {key}={value!r}"
                )


def check_layers(values: dict[str, Any], most: int) -> None:
    """Raises if there are more layers than tensors, before any of these layers is created."""
    for key in LAYERS:
        if isinstance(values.get(key), int) and values[key] > most:
            raise ValueError(
                f"`{key}` in config.json must be at most the number of tensors, {most}. Received: {key}={values[key]}"
            )


def activation(name: Any, key: str) -> Any:
    """The activation function that `key` of config.json names.

    Raises:
        ValueError: the name is unknown.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"`{key}` in config.json must be one of {sorted(ACTIVATIONS)}. Received: {key}={name!r}")
    return activations.get(ACTIVATIONS[name])

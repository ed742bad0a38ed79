"""Reads config.json, and raises an error for every value that would change the computation and is not supported."""

import copy
import reprlib
from collections.abc import Callable, Collection
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
    "encoder_layers": "num_hidden_layers",
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
LARGEST = 2**31 - 1  # ids, positions and windows are 32-bit integers
MOST_LABELS = 1_000_000
_TENSORS_OF_A_LAYER = 5  # at least, in every family
_LARGEST_FLOAT = 3.4e38
_NEEDED: Any = object()


class Config:
    """The content of config.json, with a record of the keys that were read.

    Families read values with the methods below, which treat null like a missing key. After a family has created its
    layers and before they are built, `check` raises for values that change the computation and were not read.

    Args:
        values: the content of config.json, which is copied.
        absent: optional parts of the model that the checkpoint lacks, such as "pooler".
        largest: the number of numbers in the largest tensor of the checkpoint. None: not known.
    """

    def __init__(self, values: dict[str, Any], absent: Collection[str] = (), *, largest: int | None = None) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"`config` must be a dict, that of config.json. Received: config={values!r:.200}")
        self.values = copy.deepcopy(dict(values))
        self.absent, self.largest = tuple(absent), largest
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
            raise ValueError(
                f"config.json must have `{keys[0]}`. Received: {keys[0]}=None, keys {sorted(self.values)!s:.600}"
            )
        return default

    def number(self, *keys: str, default: Any = _NEEDED, least: int = 1) -> Any:
        """`take` for an integer from `least` on, of at most 32 bits. The default is not checked."""
        rule = f"{'a positive' if least else 'a non-negative'} integer, at most {LARGEST}"
        return self._take_checked(
            keys, default, rule, lambda value: isinstance(value, int) and least <= value <= LARGEST
        )

    def positive(self, *keys: str, default: float) -> float:
        """`take` for a positive number."""
        return float(self._take_checked(keys, default, "a positive number", lambda value: 0 < value < _LARGEST_FLOAT))

    def not_negative(self, *keys: str, default: float) -> float:
        """`take` for a number that may be 0."""
        rule = "a number, not negative"
        return float(self._take_checked(keys, default, rule, lambda value: 0 <= value < _LARGEST_FLOAT))

    def rate(self, *keys: str, default: float) -> float:
        """`take` for a rate of dropout."""
        return float(self._take_checked(keys, default, "a number in [0, 1)", lambda value: 0 <= value < 1))

    def _take_checked(self, keys: tuple[str, ...], default: Any, rule: str, holds: Callable[[Any], bool]) -> Any:
        """`take` for a number for which `holds` is true. The default is not checked."""
        if default is not _NEEDED and all(self.values.get(key) is None for key in keys):
            return self.take(*keys, default=default)
        value = self.take(*keys)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
            raise ValueError(f"`{keys[0]}` in config.json must be {rule}. Received: {keys[0]}={_short(value)}")
        return value

    def size(self, *keys: str, default: Any = _NEEDED) -> Any:
        """`number` for an axis of a tensor, or a factor of one: at most the size of the largest tensor."""
        value = self.number(*keys, default=default)
        if self.largest is not None and any(self.values.get(key) is not None for key in keys):
            self.check_size(keys[0], value)
        return value

    def check_size(self, key: str, value: int) -> None:
        """Raises if an axis that follows from the value of `key` is larger than the largest tensor."""
        if self.largest is not None and value > self.largest:
            raise ValueError(
                f"`{key}` in config.json must fit the tensors, the largest of which has {self.largest} numbers. "
                f"Received: {key}={_short(self.values.get(key))}"
            )

    def flag(self, key: str, *, default: bool) -> bool:
        """`take` for a boolean."""
        value = self.take(key, default=default)
        if not isinstance(value, bool):
            raise ValueError(f"`{key}` in config.json must be true or false. Received: {key}={value!r:.200}")
        return value

    def token(self, key: str, *, default: Any = None) -> Any:
        """`take` for the id of a token."""
        value = self.take(key, default=default)
        if value is not None and not _is_token(value):
            raise ValueError(f"`{key}` in config.json must be an integer of 32 bits. Received: {key}={_short(value)}")
        return value

    def token_of(self, key: str, vocabulary_size: int, *, default: Any) -> int:
        """`token` for an id that must be in the vocabulary."""
        value = self.token(key, default=default)
        if not 0 <= value < vocabulary_size:
            raise ValueError(
                f"`{key}` in config.json must be an id of the vocabulary. Received: {key}={value}, "
                f"vocab_size={vocabulary_size}"
            )
        return int(value)

    def activation(self, *keys: str, default: Any = _NEEDED) -> Any:
        """The activation function that a key names."""
        return activation(self.take(*keys, default=default), keys[0])

    def refuse(self, key: str, *supported: Any) -> None:
        """Raises if the value of a key is not among `supported`."""
        value = self.take(key, default=None)
        if value is not None and value not in supported:
            rule = " or ".join(map(repr, supported)) or "null"
            raise ValueError(
                f"`{key}` in config.json must be {rule}; nothing else is supported. Received: {key}={value!r:.200}"
            )

    @property
    def num_labels(self) -> int:
        """The number of classes: the size of `id2label`, else `num_labels`, else 2."""
        return self.count_labels(default=2)

    def count_labels(self, *, default: int) -> int:
        """`num_labels` with another default."""
        labels = self.take("id2label", default={})
        if not isinstance(labels, dict):
            raise ValueError(f"`id2label` in config.json must be a dict. Received: id2label={labels!r:.200}")
        count = len(labels) if labels else self.number("num_labels", default=default)
        if count > MOST_LABELS:
            raise ValueError(f"`num_labels` in config.json must be at most {MOST_LABELS}. Received: num_labels={count}")
        return int(count)

    def check(self) -> None:
        """Raises if a value that changes the computation was not read, or if two values contradict each other."""
        for key, other in ALIASES.items():
            value, another = self.values.get(key), self.values.get(other)
            if key in self._read and None not in (value, another) and value != another:
                raise ValueError(
                    f"`{key}` and `{other}` in config.json must be equal. Received: {key}={value!r:.200}, "
                    f"{other}={another!r:.200}"
                )
        for key, value in self.values.items():
            ids = value if isinstance(value, list) and "eos_" in key else [value]
            if key.endswith("_token_id") and value is not None and not all(_is_token(one) for one in ids):
                raise ValueError(
                    f"`{key}` in config.json must be an integer of 32 bits. Received: {key}={value!r:.200}"
                )
        labels = self.values.get("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise ValueError(f"`id2label` in config.json must be a dict. Received: id2label={labels!r:.200}")
        for key, neutral in CHANGING.items():
            value = self.values.get(key)
            if key not in self._read and value is not None and value not in neutral:
                model_type = self.values.get("model_type")
                raise ValueError(
                    f"`{key}` in config.json is not supported for model_type={model_type!r:.200}. Received: "
                    f"{key}={value!r:.200}"
                )


def check_layers(values: dict[str, Any], most: int) -> None:
    """Raises if there are more layers than tensors for them, before any of these layers is created."""
    for key in LAYERS:
        if isinstance(values.get(key), int) and values[key] * _TENSORS_OF_A_LAYER > most:
            raise ValueError(
                f"`{key}` in config.json must be at most the number of tensors, {most}, by {_TENSORS_OF_A_LAYER}. "
                f"Received: {key}={_short(values[key])}"
            )


def activation(name: Any, key: str) -> Any:
    """The activation function that `key` of config.json names.

    Raises:
        ValueError: the name is unknown.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"`{key}` in config.json must be one of {sorted(ACTIVATIONS)}. Received: {key}={name!r:.200}")
    return activations.get(ACTIVATIONS[name])


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _short(value: Any) -> str:
    return reprlib.repr(value)

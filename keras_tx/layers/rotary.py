"""Rotary position embedding: (B, T, N, H) -> (B, T, N, H), each pair of features turned by an angle of its position.

B batch, T tokens, N heads, H head, R rotated features of a head.
Su et al. 2021, arXiv:2104.09864; YaRN: Peng et al. 2023, arXiv:2309.00071.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.layers import ids
from keras_tx.layers.configs import StrictLayer

LAYOUTS = ("half", "interleaved")


def rotate(x, positions, frequencies, *, layout="half", attention_factor=1.0):
    """`x` (B, T, N, H) with its first R features turned, the rest as they are; in float32, cast to the dtype of `x`.

    Args:
        x: (B, T, N, H).
        positions: integers that broadcast to (B, T).
        frequencies: (R/2,), the radians by which each pair of features turns from one position to the next.
        layout: "half" pairs feature i with feature i + R/2, "interleaved" feature 2i with 2i + 1.
        attention_factor: the length of the turned features is multiplied by this.
    """
    size = 2 * frequencies.shape[0]
    turned, rest = (x, None) if x.shape[-1] == size else ops.split(x, [size], axis=-1)
    turned = ops.cast(turned, "float32")
    # (a, b) -> (a cos - b sin, b cos + a sin): swap the two, and let the first of each pair turn backwards.
    xp = np if isinstance(frequencies, np.ndarray) else ops
    if layout == "half":
        signed = xp.concatenate([-frequencies, frequencies], axis=-1)
        swapped = ops.concatenate(ops.split(turned, 2, axis=-1)[::-1], axis=-1)
    else:
        signed = xp.reshape(xp.stack([-frequencies, frequencies], axis=-1), (size,))
        pairs = ops.reshape(turned, (*ops.shape(turned)[:-1], size // 2, 2))
        swapped = ops.reshape(ops.flip(pairs, axis=-1), ops.shape(turned))
    angles = ops.expand_dims(ops.cast(positions, "float32"), (-2, -1)) * ops.convert_to_tensor(signed, dtype="float32")
    cos, sin = ops.cos(angles), ops.sin(angles)  # (T, 1, R) or (B, T, 1, R)
    if attention_factor != 1:
        cos, sin = cos * attention_factor, sin * attention_factor
    turned = ops.cast(turned * cos + swapped * sin, x.dtype)
    return turned if rest is None else ops.concatenate([turned, rest], axis=-1)


def frequencies(size, *, base=10000, scaling=None, length=None):
    """The frequencies (R/2,) that `rotate` takes: base ** (-2i / R), changed as `scaling` says.

    Args:
        size: R, the number of rotated features, even.
        base: of the powers; the slowest pair turns once in about this times 2 pi positions.
        scaling: None or a dict as `check_scaling` returns it.
        length: the number of positions in use, an integer or a scalar tensor. Only the type "dynamic" reads it.

    Returns:
        A float64 array; where `length` is a tensor and `scaling` is dynamic, a float32 tensor.
    """
    plain = np.float64(base) ** (-2 * np.arange(size // 2) / size)
    scaling = scaling or {"rope_type": "default"}
    kind, factor, original = (scaling.get(key) for key in ("rope_type", "factor", "original_max_position_embeddings"))
    if kind == "linear":
        return plain / factor
    if kind == "dynamic":
        return plain if length is None else _stretched(plain, factor, original, length)
    if kind == "yarn":
        slowed = _yarn_ramp(size, base, scaling)
    elif kind == "llama3":  # pairs that turn often enough over the original length stay, those that do not are slowed
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        slowed = 1 - np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
    else:
        return plain
    return plain * (1 - slowed) + plain / factor * slowed


def attention_factor(scaling):
    """What `rotate` multiplies by: 1, but for YaRN."""
    if not scaling or scaling["rope_type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]

    def grown(mscale=1.0):
        return 1 + 0.1 * mscale * math.log(scaling["factor"])

    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown()  # one alone changes nothing


@keras.saving.register_keras_serializable(package="keras_tx")
class RotaryEmbedding(StrictLayer):
    """Turns each pair of features by position times frequency: products of queries and keys see only differences.

    `layer(x)` is as long as `x`, and in its compute dtype; angles, sines, cosines and products are float32 under any
    dtype policy. Only differences of positions matter to attention, so padding on the left needs no care.

    With the scaling "dynamic" the frequencies depend on the longest position of the call, over the whole batch. Keys
    that a cache holds keep the rotation of the call that wrote them, as in `transformers`.

    Args:
        base: of the frequencies base ** (-2i / R); `rope_theta` in Hugging Face's configs.
        layout: "half" pairs feature i with i + R/2 (GPT-NeoX, Llama and Hugging Face's checkpoints of it),
            "interleaved" 2i with 2i + 1 (the paper, GPT-J).
        scaling: None, or a dict in the terms of Hugging Face's `rope_parameters`. Its "rope_type" (or "type") says
            which other keys it has: "default" none; "linear" factor; "dynamic" factor,
            original_max_position_embeddings (in Hugging Face's configs that is `max_position_embeddings`); "llama3"
            these two, low_freq_factor, high_freq_factor; "yarn" the two, and if wanted beta_fast, beta_slow,
            attention_factor, mscale and mscale_all_dim (which count only together), truncate. A rope_theta or
            partial_rotary_factor in it must agree with `base` and `fraction`.
        fraction: the first R = int(H * fraction) features are rotated, the rest passes.

    Call arguments:
        inputs: (B, T, N, H), queries or keys.
        positions: (B, T) or (T,) integers; 0, 1, ... T - 1 if None.

    Raises:
        ValueError: for an argument that cannot work or keys of `scaling` that are unknown, missing or contradict
            another; for an R that is odd or 0; for positions of a wrong shape or dtype.
    """

    def __init__(self, *, base=10000, layout="half", scaling=None, fraction=1.0, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.base = checks.positive_float("base", base)
        if base <= 1:
            raise ValueError(f"The argument `base` must be above 1. Received: base={base}")
        self.layout = checks.one_of("layout", layout, LAYOUTS)
        self.fraction = checks.positive_float("fraction", fraction)
        if fraction > 1:
            raise ValueError(f"The argument `fraction` must not be above 1. Received: fraction={fraction}")
        self.scaling = check_scaling(scaling, base, fraction)
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def build(self, inputs_shape):
        features = inputs_shape[-1]
        self._size = int((features or 0) * self.fraction)
        least = 4 if self._is_dynamic else 2  # dynamic scaling divides by R - 2
        if self._size < least or self._size % 2:
            raise ValueError(
                f"`inputs` must have an even number of features to rotate, int(H * `fraction`), of at least {least}. "
                f"Received: inputs.shape={tuple(inputs_shape)}, fraction={self.fraction}, scaling={self.scaling}"
            )
        self._frequencies = frequencies(self._size, base=self.base, scaling=self.scaling)
        self._attention_factor = attention_factor(self.scaling)
        self.input_spec = keras.layers.InputSpec(ndim=4, axes={-1: features})

    def call(self, inputs, positions=None):
        if positions is None:
            length = ops.shape(inputs)[1]
            positions = ops.arange(length, dtype="float32")
        else:
            positions = ids.check_positions(positions, inputs)
            length = ops.max(positions, initial=0) + 1 if self._is_dynamic else None
        by_pair = self._frequencies
        if self._is_dynamic:
            by_pair = frequencies(self._size, base=self.base, scaling=self.scaling, length=length)
        return rotate(inputs, positions, by_pair, layout=self.layout, attention_factor=self._attention_factor)

    @property
    def _is_dynamic(self):
        return self.scaling is not None and self.scaling["rope_type"] == "dynamic"

    def compute_output_spec(self, inputs, positions=None):
        if positions is not None:
            ids.check_positions(positions, inputs)
        return keras.KerasTensor(inputs.shape, dtype=inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "base": self.base,
            "layout": self.layout,
            "scaling": None if self.scaling is None else dict(self.scaling),
            "fraction": self.fraction,
        }


# For each type the keys that it must have, and those that it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


def check_scaling(scaling, base, fraction):
    """Returns a copy of `scaling` without what says nothing or what `base` and `fraction` say; None for "default"."""
    if scaling is None:
        return None
    if not isinstance(scaling, dict):
        raise ValueError(f"The argument `scaling` must be None or a dict. Received: scaling={scaling!r}")
    # JSON configs write null for what is absent; a null "truncate" Hugging Face takes for False.
    given = {key: value for key, value in scaling.items() if value is not None or key == "truncate"}
    kinds = [given.pop(key) for key in ("rope_type", "type") if key in given] or [None]
    if kinds[0] != kinds[-1]:
        raise ValueError(f"The argument `scaling` must have one type. Received: scaling={scaling}")
    kind = checks.one_of("scaling['rope_type']", kinds[0], _KEYS)
    for key, name, value in (("rope_theta", "base", base), ("partial_rotary_factor", "fraction", fraction)):
        if given.pop(key, value) != value:
            raise ValueError(f"scaling['{key}'] must equal `{name}`. Received: {name}={value}, scaling={scaling}")
    required, optional = _KEYS[kind]
    if not set(required) <= set(given) <= {*required, *optional}:
        raise ValueError(
            f"The argument `scaling` of type '{kind}' must have the keys {list(required)}, may have {list(optional)}, "
            f"and no others. Received: scaling={scaling}"
        )
    for key, value in given.items():
        _check_value(f"scaling['{key}']", key, value)
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise ValueError(f"scaling['low_freq_factor'] must be below 'high_freq_factor'. Received: scaling={scaling}")
    if kind == "yarn" and given.get("beta_slow", 1) > given.get("beta_fast", 32):
        raise ValueError(f"scaling['beta_slow'] must not be above 'beta_fast'. Received: scaling={scaling}")
    return None if kind == "default" else {"rope_type": kind, **given}


def _check_value(name, key, value):
    if key == "truncate":
        checks.one_of(name, value, (True, False))
    elif key == "original_max_position_embeddings":
        checks.positive_int(name, value)
    elif key not in ("mscale", "mscale_all_dim") or value != 0:  # 0 counts as absent
        checks.positive_float(name, value)
        if key == "factor" and value < 1:
            raise ValueError(f"The argument `{name}` must be at least 1. Received: {name}={value}")


def _stretched(plain, factor, original, length):
    """Dynamic NTK scaling: the base grows with the length, so that the slowest pair turns no further than before.

    HF's base * growth ** (R / (R - 2)), taken to the power of -2i / R.
    """
    exponents = -np.arange(len(plain)) / (len(plain) - 1)
    if isinstance(length, int):
        return plain * (factor * max(length, original) / original - (factor - 1)) ** exponents
    growth = factor * ops.maximum(ops.cast(length, "float32"), original) / original - (factor - 1)
    plain, exponents = (ops.convert_to_tensor(x, dtype="float32") for x in (plain, exponents))
    return plain * ops.power(growth, exponents)


def _yarn_ramp(size, base, scaling):
    """(R/2,): 0 for pairs that turn `beta_fast` times or more over the original length, 1 from `beta_slow` down."""

    def pair_that_turns(times):
        turns = scaling["original_max_position_embeddings"] / (times * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(base))

    low, high = pair_that_turns(scaling.get("beta_fast", 32)), pair_that_turns(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step
    return np.clip((np.arange(size // 2) - low) / (high - low), 0, 1)

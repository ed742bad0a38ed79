"""Rotary position embedding: (B, T, N, H) -> (B, T, N, H), each pair of features rotated by its position.

B batch, T tokens, N heads, H head, R rotated features of a head.
Su et al. 2021, arXiv:2104.09864.
"""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.layers import ids
from keras_tx.layers.configs import StrictLayer
from keras_tx.layers.extremes import largest
from keras_tx.layers.masks import count_positions
from keras_tx.layers.precision import as_floats, wide_dtype
from keras_tx.layers.rotary_scaling import attention_factor, check_scaling, frequencies
from keras_tx.types import Shape, Tensor

LAYOUTS = ("half", "interleaved")


def rotate(
    x: Tensor, positions: Tensor, frequencies: Any, *, layout: str = "half", attention_factor: float = 1.0
) -> Tensor:
    """Rotates the first R features of `x` (B, T, N, H), in float32 or in float64; returns the dtype of `x`.

    Args:
        x: (B, T, N, H).
        positions: integers that broadcast to (B, T).
        frequencies: (R/2,), the rotation of each pair of features from one position to the next, in radians.
        layout: "half" pairs feature i with feature i + R/2, "interleaved" feature 2i with feature 2i + 1.
        attention_factor: the factor by which rotated features are multiplied.
    """
    size = 2 * frequencies.shape[0]
    turned, rest = (x, None) if x.shape[-1] == size else ops.split(x, [size], axis=-1)
    dtype = wide_dtype(x)
    turned = ops.cast(turned, dtype)
    # (a, b) -> (a cos - b sin, b cos + a sin): swap a and b, and give the first of each pair the negative angle.
    xp = np if isinstance(frequencies, np.ndarray) else ops
    if layout == "half":
        signed = xp.concatenate([-frequencies, frequencies], axis=-1)
        swapped = ops.concatenate(ops.split(turned, 2, axis=-1)[::-1], axis=-1)
    else:
        signed = xp.reshape(xp.stack([-frequencies, frequencies], axis=-1), (size,))
        pairs = ops.reshape(turned, (*ops.shape(turned)[:-1], size // 2, 2))
        swapped = ops.reshape(ops.flip(pairs, axis=-1), ops.shape(turned))
    angles = ops.expand_dims(ops.cast(positions, dtype), (-2, -1)) * ops.convert_to_tensor(signed, dtype=dtype)
    cos, sin = ops.cos(angles), ops.sin(angles)  # (T, 1, R) or (B, T, 1, R)
    if attention_factor != 1:
        cos, sin = cos * attention_factor, sin * attention_factor
    turned = ops.cast(turned * cos + swapped * sin, x.dtype)
    return turned if rest is None else ops.concatenate([turned, rest], axis=-1)


def rotate_heads(
    rotary: Any, query: Tensor, key: Tensor, positions: tuple[Any, Any], query_mask: Any, value_mask: Any, start: Any
) -> tuple[Tensor, Tensor]:
    """Queries and keys rotated by the layer `rotary`, at these positions. None: real tokens are counted by the masks.

    With a cache (`start`, the slot of the first query) both have the positions that `value_mask` gives to the slots.
    """
    query_positions, key_positions = positions
    if query_positions is None and start is not None:
        counted = count_positions(value_mask)
        query_positions = key_positions = ops.slice(counted, (0, start), (ops.shape(counted)[0], ops.shape(query)[1]))
    elif query_positions is None and query_mask is not None:
        query_positions = count_positions(query_mask)
    if key_positions is None and value_mask is not None:
        key_positions = count_positions(value_mask)
    return rotary(query, query_positions), rotary(key, key_positions)


@keras.saving.register_keras_serializable(package="keras_tx")
class RotaryEmbedding(StrictLayer):
    """Rotary position embedding (RoPE): rotates each pair of features by an angle that grows with the position.

    It is applied to queries and keys, whose dot products then depend only on the difference of their positions, so
    padding on the left changes nothing. `MultiHeadAttention(rotary=True)` creates and calls such a layer. The layer
    computes in float32, or in float64 under such a policy; the output has the compute dtype. There are no weights and
    no maximum length.

    With the scaling "dynamic" the frequencies depend on the largest position of the call, over the whole batch. Keys in
    a cache keep the rotation of the call that stored them, as in `transformers`. `Speculative` refuses such models.

    Args:
        base: the base of the frequencies base ** (-2i / R), above 1; `rope_theta` in Hugging Face's configs.
        layout: "half" pairs feature i with feature i + R/2 (GPT-NeoX, Llama and Hugging Face's checkpoints of it),
            "interleaved" feature 2i with feature 2i + 1 (the paper, GPT-J).
        scaling: None, or a dict with the keys of Hugging Face's `rope_parameters`, for sequences longer than in
            training. Its "rope_type" (or "type") determines the other keys. "default": none. "linear": factor.
            "dynamic": factor and original_max_position_embeddings (`max_position_embeddings` in Hugging Face's
            configs). "llama3": factor, original_max_position_embeddings, low_freq_factor and high_freq_factor. "yarn":
            factor and original_max_position_embeddings, and optionally beta_fast, beta_slow, attention_factor,
            truncate, mscale and mscale_all_dim (the last two only have an effect together). If it contains rope_theta
            or partial_rotary_factor, they must equal `base` and `fraction`.
        fraction: in (0, 1]; `partial_rotary_factor` in Hugging Face's configs. The first R = int(H * fraction) features
            of each head are rotated, the others stay unchanged.

    Call arguments:
        inputs: (B, T, N, H), queries or keys. R must be even.
        positions: (B, T) or (T,) integers; 0, 1, ... T - 1 if None.

    Returns:
        (B, T, N, H).

    Raises:
        ValueError: for an argument out of range, keys of `scaling` that are unknown, missing or contradict another, an
            R that is odd or 0, or positions of a wrong shape or dtype.

    Reference:
        Su et al. 2021, arXiv:2104.09864, section 3.2.

    Examples:
        Dot products depend only on the difference of the positions:

        >>> layer = keras_tx.layers.RotaryEmbedding()
        >>> turned = keras.ops.convert_to_numpy(layer(np.ones((1, 6, 1, 8))))[0, :, 0]
        >>> products = turned @ turned.T
        >>> np.allclose(products[0, 2], products[3, 5], atol=1e-5)
        True

        The scaling of Llama 3.1, for up to 128k tokens:

        >>> scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
        >>> scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        >>> rotary = keras_tx.layers.RotaryEmbedding(base=500000, scaling=scaling)
        >>> attention = keras_tx.layers.MultiHeadAttention(8, 64, num_key_value_heads=2, rotary=rotary)
        >>> attention.rotary.scaling["rope_type"]
        'llama3'
    """

    def __init__(
        self,
        *,
        base: float = 10000,
        layout: str = "half",
        scaling: dict[str, Any] | None = None,
        fraction: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.base = checks.positive_float("base", base)
        if base <= 1:
            raise ValueError(f"The argument `base` must be above 1. Received: base={base}")
        self.layout = checks.one_of("layout", layout, LAYOUTS)
        self.fraction = checks.part("fraction", fraction)
        self.scaling = check_scaling(scaling, self.base, self.fraction)
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def build(self, inputs_shape: Shape) -> None:
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

    def call(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        inputs = as_floats(inputs, self)
        if positions is None:
            length = ops.shape(inputs)[1]
            positions = ops.arange(length, dtype="int32")
        else:
            positions = ids.check_positions(positions, inputs, num_axes=2)
            length = largest(positions, 0) + 1 if self._is_dynamic else None
        radians = self._frequencies
        if self._is_dynamic:
            radians = frequencies(
                self._size, base=self.base, scaling=self.scaling, length=length, dtype=wide_dtype(inputs)
            )
        return rotate(inputs, positions, radians, layout=self.layout, attention_factor=self._attention_factor)

    @property
    def _is_dynamic(self) -> bool:
        return self.scaling is not None and self.scaling["rope_type"] == "dynamic"

    def compute_output_spec(self, inputs: Any, positions: Any = None) -> Any:
        if positions is not None:
            ids.check_positions(positions, inputs, num_axes=2)
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "base": self.base,
            "layout": self.layout,
            "scaling": None if self.scaling is None else dict(self.scaling),
            "fraction": self.fraction,
        }

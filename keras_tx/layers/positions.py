"""Absolute positional encodings: (..., T, D) -> (..., T, D), the input plus a vector for each position.

T tokens, D model, any leading axes. Sinusoids: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; learned: Gehring et
al. 2017, arXiv:1705.03122.
"""

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers import ids
from keras_tx.layers.masked_layer import MaskedLayer
from keras_tx.layers.masks import count_positions
from keras_tx.layers.precision import wide_dtype
from keras_tx.types import Shape, Tensor

LAYOUTS = ("interleaved", "concatenated")


def sinusoids(
    positions: Tensor,
    hidden_dim: int,
    *,
    max_wavelength: float = 10000,
    layout: str = "interleaved",
    frequencies: Sequence[float] | None = None,
    dtype: str = "float32",
) -> Tensor:
    """The sinusoidal encoding of integer `positions` (...) -> (..., D).

    Args:
        positions: integers of any shape.
        hidden_dim: D, the size of the encoding. If it is odd, the last cosine is left out.
        max_wavelength: the wavelengths grow from 2 pi positions to this number times 2 pi.
        layout: "interleaved" is sine, cosine, sine, ... as in the paper; "concatenated" all sines, then all cosines.
        frequencies: ceil(D / 2) numbers, the angles between neighbouring positions, in place of `max_wavelength`.
        dtype: of the computation and of the result.
    """
    pairs = np.arange((hidden_dim + 1) // 2)
    if frequencies is None:  # rounded once, at the end
        frequencies = (np.float64(max_wavelength) ** (-2 * pairs / hidden_dim)).tolist()
    elif len(frequencies) != len(pairs):
        raise ValueError(
            "`frequencies` must have one number for each sine, half the last axis of the inputs, rounded up. Received: "
            f"{len(frequencies)} frequencies, last axis of size {hidden_dim}"
        )
    angles = ops.expand_dims(ops.cast(positions, dtype), -1) * ops.convert_to_tensor(frequencies, dtype=dtype)
    if layout == "concatenated":
        return ops.concatenate([ops.sin(angles), ops.cos(angles)[..., : hidden_dim // 2]], axis=-1)
    both = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)  # (..., pairs, 2)
    return ops.reshape(both, (*ops.shape(angles)[:-1], 2 * len(pairs)))[..., :hidden_dim]


@keras.saving.register_keras_serializable(package="keras_tx")
class SinusoidalPositionalEncoding(MaskedLayer):
    """Adds sines and cosines of the position to the input, which may have any length.

    The encoding is computed in float32, or in float64 under such a policy, and then cast to the dtype of the input. If
    the input has a mask, positions count only real tokens, so padding on the left changes nothing. There are no
    weights.

    Args:
        max_wavelength: the wavelengths grow from 2 pi positions to this number times 2 pi. 10000 is the paper's.
        layout: "interleaved" (sine, cosine, sine, ... as in the paper) or "concatenated" (all sines, then all cosines).
        frequencies: a list of D / 2 numbers (rounded up), in radians per position: the first sine is sin(position *
            frequencies[0]). None: the paper's, which follow from `max_wavelength`. Only one of the two may be given.

    Call arguments:
        inputs: (..., T, D): any number of leading axes, such as (B, T, D).
        mask: (..., T), True at real tokens. By default the Keras mask of `inputs`.
        positions: (..., T) or (T,) integers. By default the number of real tokens before each token.

    Returns:
        (..., T, D).

    Raises:
        ValueError: for a wavelength that is not positive, frequencies that are not finite or not as many as the inputs
            need, an unknown layout, or positions of a wrong shape or dtype.

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    Examples:
        >>> layer = keras_tx.layers.SinusoidalPositionalEncoding()
        >>> encoding = layer(np.zeros((1, 2, 4)))  # sine, cosine, sine, cosine of positions 0 and 1
        >>> print(np.round(keras.ops.convert_to_numpy(encoding), 2))
        [[[0.   1.   0.   1.  ]
          [0.84 0.54 0.01 1.  ]]]
    """

    def __init__(
        self,
        *,
        max_wavelength: float = 10000,
        layout: str = "interleaved",
        frequencies: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.max_wavelength = checks.positive_float("max_wavelength", max_wavelength)
        self.layout = checks.one_of("layout", layout, LAYOUTS)
        self.frequencies = None if frequencies is None else _finite_numbers("frequencies", frequencies)
        if frequencies is not None and max_wavelength != 10000:
            raise ValueError(
                "`max_wavelength` must be left out if `frequencies` are given. Received: "
                f"max_wavelength={max_wavelength}, frequencies={frequencies}"
            )

    def call(self, inputs: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            steps = ops.arange(ops.shape(inputs)[-2], dtype="int32")
        else:
            steps = ids.check_positions(positions, inputs)
        encoding = sinusoids(
            steps,
            inputs.shape[-1],
            max_wavelength=self.max_wavelength,
            layout=self.layout,
            frequencies=self.frequencies,
            dtype=wide_dtype(inputs),
        )
        if positions is None and mask is not None:
            encoding = ops.take(encoding, count_positions(mask), axis=0)
        return inputs + ops.cast(encoding, inputs.dtype)

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "layout": self.layout,
            "frequencies": None if self.frequencies is None else list(self.frequencies),
        }


@keras.saving.register_keras_serializable(package="keras_tx")
class LearnedPositionalEncoding(MaskedLayer):
    """Adds a learned vector for each position to the input, which may have up to `max_length` tokens.

    If the input has a mask, positions count only real tokens, so padding on the left changes nothing.

    Args:
        max_length: the number of positions.
        offset: the row of the table for position 0. The rows before it are not used; some checkpoints (RoBERTa, BART)
            have such rows.
        embeddings_initializer: initializer of the table (max_length + offset, D).

    Call arguments:
        inputs: (..., T, D) with T <= max_length and any number of leading axes, such as (B, T, D).
        mask: (..., T), True at real tokens. By default the Keras mask of `inputs`.
        positions: (..., T) or (T,) integers below `max_length`. By default the number of real tokens before each token.

    Returns:
        (..., T, D).

    Raises:
        ValueError: for a `max_length` that is not positive, a negative `offset`, inputs longer than `max_length`, or
            positions outside the table. In a TensorFlow graph that does not know lengths and positions beforehand, the
            look-up raises TensorFlow's `InvalidArgumentError` instead.

    Reference:
        Gehring et al. 2017, arXiv:1705.03122, section 3.1.

    Examples:
        >>> layer = keras_tx.layers.LearnedPositionalEncoding(max_length=512)
        >>> tuple(layer(keras.ops.ones((2, 7, 16))).shape)
        (2, 7, 16)
        >>> tuple(layer.embeddings.shape)
        (512, 16)
    """

    def __init__(
        self, max_length: int, *, offset: int = 0, embeddings_initializer: Any = "uniform", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.max_length = checks.positive_int("max_length", max_length)
        self.offset = checks.count("offset", offset)
        self.embeddings_initializer = initializers.get(embeddings_initializer)

    def build(self, inputs_shape: Shape) -> None:
        self.embeddings = self.add_weight(
            shape=(self.max_length + self.offset, inputs_shape[-1]),
            initializer=self.embeddings_initializer,
            name="embeddings",
            autocast=False,  # rows are converted, so that gradients are summed in the dtype of the table
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: inputs_shape[-1]})

    def call(self, inputs: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is not None:
            positions = ids.check_positions(positions, inputs)
        elif (inputs.shape[-2] or 0) > self.max_length:
            raise ValueError(
                "`inputs` must not be longer than `max_length`. Received: "
                f"inputs.shape={tuple(inputs.shape)}, max_length={self.max_length}"
            )
        elif mask is not None:
            positions = count_positions(mask)
        else:
            positions = ops.arange(ops.shape(inputs)[-2], dtype="int32")
        return inputs + ids.look_up("positions", self.embeddings, positions, dtype=inputs.dtype, offset=self.offset)

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "max_length": self.embeddings.shape[0] - self.offset if self.built else self.max_length,  # of the table
            "offset": self.offset,
            "embeddings_initializer": initializers.serialize(self.embeddings_initializer),
        }


def _finite_numbers(name: str, values: Any) -> tuple[float, ...]:
    numbers = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else ()
    wrong = [x for x in numbers if isinstance(x, bool) or not isinstance(x, Real) or not math.isfinite(x)]
    if not numbers or wrong:
        raise ValueError(f"The argument `{name}` must be a list of finite numbers. Received: {name}={values!r}")
    return tuple(map(float, numbers))

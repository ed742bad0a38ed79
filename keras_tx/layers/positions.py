"""Positional encodings, absolute: (B, T, D) -> (B, T, D), the input plus a vector for each position.

B batch, T tokens, D model. Sinusoids: Vaswani et al. 2017, arXiv:1706.03762, section 3.5; learned: Gehring et al. 2017,
arXiv:1705.03122.
"""

import keras
import numpy as np
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers import ids
from keras_tx.layers.masked_layer import MaskedLayer
from keras_tx.layers.masks import count_positions

LAYOUTS = ("interleaved", "concatenated")


def sinusoids(positions, hidden_dim, *, max_wavelength=10000, layout="interleaved"):
    """The sinusoidal encoding of integer `positions` (...) -> (..., D), float32.

    Args:
        positions: integers of any shape.
        hidden_dim: D. If it is odd, the last cosine is left out.
        max_wavelength: the wavelengths grow from 2 pi to this times 2 pi.
        layout: "interleaved" is sine, cosine, sine, ... as in the paper; "concatenated" all sines, then all cosines.
    """
    pairs = np.arange((hidden_dim + 1) // 2)
    frequencies = np.float64(max_wavelength) ** (-2 * pairs / hidden_dim)  # rounded to float32 once, at the end
    angles = ops.expand_dims(ops.cast(positions, "float32"), -1) * ops.convert_to_tensor(frequencies, dtype="float32")
    if layout == "concatenated":
        return ops.concatenate([ops.sin(angles), ops.cos(angles)[..., : hidden_dim // 2]], axis=-1)
    both = ops.stack([ops.sin(angles), ops.cos(angles)], axis=-1)  # (..., pairs, 2)
    return ops.reshape(both, (*ops.shape(angles)[:-1], 2 * len(pairs)))[..., :hidden_dim]


@keras.saving.register_keras_serializable(package="keras_tx")
class SinusoidalPositionalEncoding(MaskedLayer):
    """Adds the sinusoidal encoding: `layer(x)` is x + encoding, of any length.

    The encoding is computed in float32 under any dtype policy, and only then cast. Where `x` has a mask, positions
    count the real tokens, so that padding on the left changes nothing.

    Args:
        max_wavelength: the wavelengths grow from 2 pi to this times 2 pi.
        layout: "interleaved" (sine, cosine, sine, ... as in the paper) or "concatenated" (all sines, then all cosines).

    Call arguments:
        inputs: (B, T, D).
        mask: (B, T), True at real tokens. Filled from the Keras mask.
        positions: (B, T) or (T,) integers, to be used instead of those counted here.

    Raises:
        ValueError: for a wavelength that is not positive, an unknown layout, or positions of a wrong shape or dtype.
    """

    def __init__(self, *, max_wavelength=10000, layout="interleaved", **kwargs):
        super().__init__(**kwargs)
        self.max_wavelength = checks.positive_float("max_wavelength", max_wavelength)
        self.layout = checks.one_of("layout", layout, LAYOUTS)

    def call(self, inputs, mask=None, positions=None):
        options = {"max_wavelength": self.max_wavelength, "layout": self.layout}
        if positions is not None:
            encoding = sinusoids(ids.check_positions(positions, inputs), inputs.shape[-1], **options)
        else:
            encoding = sinusoids(ops.arange(ops.shape(inputs)[1], dtype="int32"), inputs.shape[-1], **options)
            if mask is not None:
                encoding = ops.take(encoding, count_positions(mask), axis=0)
        return inputs + ops.cast(encoding, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {**super().get_config(), "max_wavelength": self.max_wavelength, "layout": self.layout}


@keras.saving.register_keras_serializable(package="keras_tx")
class LearnedPositionalEncoding(MaskedLayer):
    """Adds a learned vector for each position: `layer(x)` is x + encoding, up to `max_length` tokens.

    Where `x` has a mask, positions count the real tokens, so that padding on the left changes nothing.

    Args:
        max_length: the number of positions.
        offset: the row of the table that is the position 0; the rows before it are not used. Some checkpoints have it.
        embeddings_initializer: of the table (max_length + offset, D).

    Call arguments:
        inputs: (B, T, D) with T <= max_length.
        mask: (B, T), True at real tokens. Filled from the Keras mask.
        positions: (B, T) or (T,) integers below `max_length`, to be used instead of those counted here.

    Raises:
        ValueError: for a `max_length` that is not positive, a negative `offset`, longer inputs, or positions outside
            the table. Inside a compiled graph, lengths and positions that are only known at run time are TensorFlow's
            to refuse.
    """

    def __init__(self, max_length, *, offset=0, embeddings_initializer="uniform", **kwargs):
        super().__init__(**kwargs)
        self.max_length = checks.positive_int("max_length", max_length)
        self.offset = offset if offset == 0 else checks.positive_int("offset", offset)
        self.embeddings_initializer = initializers.get(embeddings_initializer)

    def build(self, inputs_shape):
        self.embeddings = self.add_weight(
            shape=(self.max_length + self.offset, inputs_shape[-1]),
            initializer=self.embeddings_initializer,
            name="embeddings",
        )
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: inputs_shape[-1]})

    def call(self, inputs, mask=None, positions=None):
        if positions is not None:
            positions = ids.check_positions(positions, inputs)
        elif (inputs.shape[1] or 0) > self.max_length:
            raise ValueError(
                "`inputs` must not be longer than `max_length`. Received: "
                f"inputs.shape={tuple(inputs.shape)}, max_length={self.max_length}"
            )
        elif mask is not None:
            positions = count_positions(mask)
        else:
            positions = ops.arange(ops.shape(inputs)[1], dtype="int32")
        return inputs + ids.look_up("positions", self.embeddings, positions, dtype=inputs.dtype, offset=self.offset)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {
            **super().get_config(),
            "max_length": self.max_length,
            "offset": self.offset,
            "embeddings_initializer": initializers.serialize(self.embeddings_initializer),
        }

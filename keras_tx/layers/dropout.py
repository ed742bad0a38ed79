"""Dropout: any shape -> the same shape. Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html."""

from typing import Any

import keras
import numpy as np

from keras_tx.layers.remat_scope import Rematerializable
from keras_tx.layers.seeds import given_seed
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_LOWEST_8_BIT_RATE = 1 / 32  # below this rate, 8 random bits are too coarse
_MIXERS = -1640531527, -2048144777, -1028477379  # 2^32 / golden ratio and other odd numbers: evenly spread multiples
HIGHEST_RATE = 1 - 2**-16


@keras.saving.register_keras_serializable(package="keras_tx")
class Dropout(Rematerializable, keras.layers.Dropout):
    """`keras.layers.Dropout` that on TensorFlow uses 8 random bits for each element instead of 32.

    Keras draws a float32 for each element, which takes more time on CPUs, and far more under XLA. With a rate of 0.1, 8
    bits can drop 25/256 or 26/256 of the elements. The layer alternates between the two, over calls and over the last
    axis, so that on average each element is dropped with the probability `rate`. Rates below 1/32 and above 31/32 use
    16 bits; rates above 1 - 2^-16 are treated as 1 - 2^-16.
    """

    def call(self, inputs: Tensor, training: bool | None = False) -> Tensor:
        if not training or not self.rate:
            return inputs
        if keras.backend.backend() != "tensorflow":
            return keras.random.dropout(inputs, self.rate, noise_shape=self.noise_shape, seed=self.seed_generator)
        static: Any = tuple(inputs.shape)
        shape = tf.shape(inputs) if None in static else static
        if self.noise_shape is not None:
            static = [static[axis] if size is None else size for axis, size in enumerate(self.noise_shape)]
            shape = tf.stack([shape[axis] if size is None else size for axis, size in enumerate(static)])
        rate = min(self.rate, HIGHEST_RATE)
        kept = tf.cast(random_keep(shape, rate, self.next_seed(), static), inputs.dtype)
        return inputs * (kept * tf.cast(1 / (1 - rate), inputs.dtype))

    def next_seed(self) -> Tensor:
        """The seed (2,) of the next call."""
        given = given_seed(self.seed_generator)
        if given is not None:
            return given
        if keras.backend.backend() != "tensorflow":
            return self.seed_generator.next()
        state = self.seed_generator.state  # `next` makes twice as many operations of this
        seed = tf.convert_to_tensor(state)
        state.assign(seed + [0, 1])
        return seed


def random_keep(shape: Any, rate: float, seed: Tensor, static_shape: Any = None) -> Tensor:
    """Booleans, each False with the probability `rate`, from a seed (2,). On TensorFlow.

    Rates above 1 - 2^-16 are treated as 1 - 2^-16.

    Args:
        shape: a tuple or list of integers and scalar tensors, or a tensor of integers.
        static_shape: the sizes that are known before a graph runs; the others are None or tensors. By default `shape`.
    """
    static_shape = shape if static_shape is None else static_shape
    last = static_shape[-1] if static_shape else 1
    last = shape[-1] if last is None else last
    seed = tf.cast(seed, "int32")
    is_8_bit = _LOWEST_8_BIT_RATE <= rate <= 1 - _LOWEST_8_BIT_RATE
    levels, dtype = (2**8, "uint8") if is_8_bit else (2**16, "uint16")
    whole, part = divmod(rate * levels, 1)
    low, high = int(whole), min(int(whole) + 1, levels - 1)  # the largest number of the dtype
    dropped = tf.where(_is_raised(last, part, seed), tf.constant(high, dtype), tf.constant(low, dtype))
    per_draw = 8 // tf.dtypes.as_dtype(dtype).size
    if static_shape and isinstance(last, int) and last % per_draw == 0:
        draws = tf.convert_to_tensor(shape) // [*[1] * (len(static_shape) - 1), per_draw]
        bits = tf.reshape(tf.bitcast(_64_bits(draws, seed), dtype), shape)
    else:
        size = tf.reduce_prod(tf.cast(shape, "int64"))  # there can be more than 2^31 scores
        bits = tf.bitcast(_64_bits(((size + per_draw - 1) // per_draw,), seed), dtype)
        bits = tf.reshape(tf.reshape(bits, (-1,))[:size], shape)
    return bits >= (dropped if static_shape else dropped[0])


def _64_bits(shape: Any, seed: Tensor) -> Tensor:
    return tf.random.stateless_uniform(shape, seed, minval=None, maxval=None, dtype="uint64")


def _is_raised(size: Any, part: float, seed: Tensor) -> Tensor:
    """True for the fraction `part` of `size` indices, and of the calls for each index.

    This is a Weyl sequence instead of random numbers, which XLA would compute again for every element of the tensor.
    """
    multiples: Any = np.arange(size) * _MIXERS[0] if isinstance(size, int) else tf.range(size) * _MIXERS[0]
    multiples = multiples.astype("int32") if isinstance(size, int) else multiples
    return multiples + tf.reduce_sum(seed * _MIXERS[1:]) < min(round(part * 2**32), 2**32 - 1) - 2**31

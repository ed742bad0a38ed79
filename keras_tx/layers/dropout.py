"""Dropout: any shape -> the same shape. Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras

from keras_tx.internals.keras_models import FixedSeed
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_LOWEST_8_BIT_RATE = 1 / 32  # below this rate, 8 random bits are too coarse
_MIXERS = -1640531527, -2048144777, -1028477379  # 2^32 / golden ratio and other odd numbers: evenly spread multiples
HIGHEST_RATE = 1 - 2**-16
_NEXT_USE = 1_000_003  # between the seeds of several calls of a dropout
_GIVEN: contextvars.ContextVar[Any] = contextvars.ContextVar("given_seeds", default=None)


@contextlib.contextmanager
def given_seeds(seeds: dict[Any, Tensor]) -> Iterator[None]:
    """Within this context the layers in `seeds`, {layer: seed (2,)}, derive their seeds from these and draw none.

    A layer that is called several times in a context uses a different mask each time; a context with the same seeds
    repeats the same masks.
    """
    token = _GIVEN.set({layer: [seed, 0] for layer, seed in seeds.items()})
    try:
        yield
    finally:
        _GIVEN.reset(token)


@keras.saving.register_keras_serializable(package="keras_tx")
class Dropout(keras.layers.Dropout):
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
            seed = FixedSeed(self.next_seed()) if self in (_GIVEN.get() or ()) else self.seed_generator
            return keras.random.dropout(inputs, self.rate, noise_shape=self.noise_shape, seed=seed)
        sizes = enumerate(self.noise_shape or inputs.shape)
        shape = [tf.shape(inputs)[axis] if size is None else size for axis, size in sizes]
        rate = min(self.rate, HIGHEST_RATE)
        kept = tf.cast(random_keep(shape, rate, self.next_seed()), inputs.dtype)
        return inputs * (kept * tf.cast(1 / (1 - rate), inputs.dtype))

    def next_seed(self) -> Tensor:
        """The seed (2,) of the next call."""
        given = (_GIVEN.get() or {}).get(self)
        if given is None:
            return self.seed_generator.next()
        seed, uses = given
        given[1] += 1
        return seed + keras.ops.convert_to_tensor([uses * _NEXT_USE, 0], dtype=seed.dtype)


def random_keep(shape: Any, rate: float, seed: Tensor) -> Tensor:
    """Booleans of this shape, each False with the probability `rate`, from a seed (2,). On TensorFlow.

    Rates above 1 - 2^-16 are treated as 1 - 2^-16.
    """
    seed = tf.cast(seed, "int32")
    is_8_bit = _LOWEST_8_BIT_RATE <= rate <= 1 - _LOWEST_8_BIT_RATE
    levels, dtype = (2**8, "uint8") if is_8_bit else (2**16, "uint16")
    whole, part = divmod(rate * levels, 1)
    raised = _raised_thresholds(shape[-1] if shape else 1, part, seed)
    dropped = tf.minimum(int(whole) + (raised if shape else raised[0]), levels - 1)  # the largest number of the dtype
    return _random_bits(shape, seed, dtype) >= tf.cast(dropped, dtype)


def _raised_thresholds(size: Any, part: float, seed: Tensor) -> Tensor:
    """1 for the fraction `part` of `size` indices, and of the calls for each index; 0 for the others.

    This is a Weyl sequence instead of random numbers, which XLA would compute again for every element of the tensor.
    """
    mixed = tf.range(size, dtype="int32") * _MIXERS[0] + (seed[0] * _MIXERS[1] + seed[1] * _MIXERS[2])
    return tf.cast(mixed < min(round(part * 2**32), 2**32 - 1) - 2**31, "int32")


def _random_bits(shape: Any, seed: Tensor, dtype: str) -> Tensor:
    """Uniform integers of this shape and dtype, several from each 64 random bits."""
    size = tf.reduce_prod(tf.cast(shape, "int64"))  # there can be more than 2^31 scores
    per_draw = 8 // tf.dtypes.as_dtype(dtype).size
    draws = (size + per_draw - 1) // per_draw
    bits = tf.random.stateless_uniform((draws,), seed, minval=None, maxval=None, dtype="uint64")
    return tf.reshape(tf.reshape(tf.bitcast(bits, dtype), (-1,))[:size], shape)

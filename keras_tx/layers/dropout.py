"""Dropout: any shape -> the same shape. Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html."""

import contextlib
import contextvars

import keras

from keras_tx.keras_internals import FixedSeed
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_FEW_DROPPED = 1 / 32  # with fewer, 8 random bits would not do: thresholds next to each other differ too much
_MIXERS = -1640531527, -2048144777, -1028477379  # 2^32 / golden ratio and other odd numbers: their multiples lie evenly
HIGHEST_RATE = 1 - 2**-16
_NEXT_USE = 1_000_003
_GIVEN: contextvars.ContextVar = contextvars.ContextVar("given_seeds", default=None)


@contextlib.contextmanager
def given_seeds(seeds):
    """Inside, the dropouts in the dict `seeds` {layer: seed} draw no seeds but make them from the one given.

    A dropout that is called several times drops other numbers each time, and the same in each such `with`.
    """
    token = _GIVEN.set({layer: [seed, 0] for layer, seed in seeds.items()})
    try:
        yield
    finally:
        _GIVEN.reset(token)


@keras.saving.register_keras_serializable(package="keras_tx")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`, on TensorFlow from 8 random bits for each number instead of 32.

    Keras' own makes a float32 for each number, which costs more time on CPUs, and far more under XLA. 8 bits drop
    the share 25/256 or 26/256 for a rate of 0.1: which of the two changes with the call and the index on the last axis,
    so that each number is dropped with the probability `rate`. Rates below 1/32 and above 31/32 take 16 bits, and
    none is above 1 - 2^-16.
    """

    def call(self, inputs, training=False):
        if not training or not self.rate:
            return inputs
        if keras.backend.backend() != "tensorflow":
            seed = FixedSeed(self.next_seed()) if self in (_GIVEN.get() or ()) else self.seed_generator
            return keras.random.dropout(inputs, self.rate, noise_shape=self.noise_shape, seed=seed)
        sizes = enumerate(self.noise_shape or inputs.shape)
        shape = [tf.shape(inputs)[axis] if size is None else size for axis, size in sizes]
        rate = min(self.rate, HIGHEST_RATE)
        kept = tf.cast(keep(shape, rate, self.next_seed()), inputs.dtype)
        return inputs * (kept * tf.cast(1 / (1 - rate), inputs.dtype))

    def next_seed(self):
        """The seed of a call, (2,)."""
        given = (_GIVEN.get() or {}).get(self)
        if given is None:
            return self.seed_generator.next()
        seed, uses = given
        given[1] += 1
        return seed + keras.ops.convert_to_tensor([uses * _NEXT_USE, 0], dtype=seed.dtype)


def keep(shape, rate, seed):
    """Booleans of this shape, each False with the probability `rate`, from a seed (2,); on TensorFlow.

    Rates above 1 - 2^-16 are taken as that.
    """
    seed = tf.cast(seed, "int32")
    is_fine = _FEW_DROPPED <= rate <= 1 - _FEW_DROPPED
    levels, dtype = (2**8, "uint8") if is_fine else (2**16, "uint16")
    whole, part = divmod(rate * levels, 1)
    more = _more(shape[-1] if shape else 1, part, seed)
    dropped = tf.minimum(int(whole) + (more if shape else more[0]), levels - 1)  # where the type ends
    return _random_bits(shape, seed, dtype) >= tf.cast(dropped, dtype)


def _more(size, part, seed):
    """1 for the share `part` of `size` indices and of the calls for each index, else 0.

    A sequence of Weyl, not random numbers: XLA would make those anew for every element that they are compared with.
    """
    mixed = tf.range(size, dtype="int32") * _MIXERS[0] + (seed[0] * _MIXERS[1] + seed[1] * _MIXERS[2])
    return tf.cast(mixed < min(round(part * 2**32), 2**32 - 1) - 2**31, "int32")


def _random_bits(shape, seed, dtype):
    """Uniform integers of this shape and type: several from each 64 random bits."""
    size = tf.reduce_prod(tf.cast(shape, "int64"))  # scores can be more than 2^31
    per_draw = 8 // tf.dtypes.as_dtype(dtype).size
    draws = (size + per_draw - 1) // per_draw
    bits = tf.random.stateless_uniform((draws,), seed, minval=None, maxval=None, dtype="uint64")
    return tf.reshape(tf.reshape(tf.bitcast(bits, dtype), (-1,))[:size], shape)

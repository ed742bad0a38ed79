"""Dropout: any shape -> the same shape. Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html."""

import contextlib
import contextvars

import keras

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_LEVELS = 2**16
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


class _Given(keras.random.SeedGenerator):
    """What `keras.random` takes for a generator, with a seed that is drawn already."""

    def __init__(self, seed):
        self.drawn = seed
        self._initial_seed = 0  # PyTorch takes its global generator where this is None

    def next(self, ordered=True):
        return self.drawn


@keras.saving.register_keras_serializable(package="keras_tx")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`, on TensorFlow from 16 random bits for each number instead of 32.

    Keras' own makes a float32 for each number, which costs more time on CPUs, and far more under XLA. The rate
    is rounded to a multiple of 2^-16, and what is kept is scaled by exactly what the rounded rate asks for.
    """

    def call(self, inputs, training=False):
        if not training or not self.rate:
            return inputs
        if keras.backend.backend() != "tensorflow":
            seed = _Given(self.next_seed()) if self in (_GIVEN.get() or ()) else self.seed_generator
            return keras.random.dropout(inputs, self.rate, noise_shape=self.noise_shape, seed=seed)
        seed = tf.cast(self.next_seed(), "int32")
        sizes = enumerate(self.noise_shape or inputs.shape)
        shape = [tf.shape(inputs)[axis] if size is None else size for axis, size in sizes]
        dropped = min(round(self.rate * _LEVELS), _LEVELS - 1)
        kept = tf.cast(_random_bits(shape, seed) >= tf.constant(dropped, "uint16"), inputs.dtype)
        return inputs * (kept * tf.cast(_LEVELS / (_LEVELS - dropped), inputs.dtype))

    def next_seed(self):
        """The seed of a call, (2,)."""
        given = (_GIVEN.get() or {}).get(self)
        if given is None:
            return self.seed_generator.next()
        seed, uses = given
        given[1] += 1
        return seed + keras.ops.convert_to_tensor([uses * _NEXT_USE, 0], dtype=seed.dtype)


def _random_bits(shape, seed):
    """Uniform uint16 of this shape: four from each 64 random bits."""
    size = tf.reduce_prod(tf.cast(shape, "int64"))  # scores can be more than 2^31
    bits = tf.random.stateless_uniform(((size + 3) // 4,), seed, minval=None, maxval=None, dtype="uint64")
    return tf.reshape(tf.reshape(tf.bitcast(bits, "uint16"), (-1,))[:size], shape)

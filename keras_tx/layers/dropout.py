"""Dropout: any shape -> the same shape. Srivastava et al. 2014, jmlr.org/papers/v15/srivastava14a.html."""

import keras

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_LEVELS = 2**16


@keras.saving.register_keras_serializable(package="keras_tx")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout`, on TensorFlow from 16 random bits for each number instead of 32.

    Keras' own makes a float32 for each number, which costs more time on CPUs, and far more under XLA. The rate
    is rounded to a multiple of 2^-16, and what is kept is scaled by exactly what the rounded rate asks for.
    """

    def call(self, inputs, training=False):
        if not training or not self.rate or keras.backend.backend() != "tensorflow":
            return super().call(inputs, training=training)
        seed = tf.cast(self.seed_generator.next(), "int32")
        sizes = enumerate(self.noise_shape or inputs.shape)
        shape = [tf.shape(inputs)[axis] if size is None else size for axis, size in sizes]
        dropped = min(round(self.rate * _LEVELS), _LEVELS - 1)
        kept = tf.cast(_random_bits(shape, seed) >= tf.constant(dropped, "uint16"), inputs.dtype)
        return inputs * (kept * tf.cast(_LEVELS / (_LEVELS - dropped), inputs.dtype))


def _random_bits(shape, seed):
    """Uniform uint16 of this shape: four from each 64 random bits."""
    size = tf.reduce_prod(shape)
    bits = tf.random.stateless_uniform(((size + 3) // 4,), seed, minval=None, maxval=None, dtype="uint64")
    return tf.reshape(tf.reshape(tf.bitcast(bits, "uint16"), (-1,))[:size], shape)

"""Seeds (B,) -> uniform numbers (N, B) in a TensorFlow graph, equal to those of NumPy's Philox and `Sample.noise`.

B rows, N numbers for each, C blocks of four 64-bit words. A row depends only on its seed. The generator is
Philox4x64-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_ROUNDS = 10
_FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW_HALF = 0xFFFFFFFF


def uniform(seeds: Tensor, count: int) -> Tensor:
    """Draws `np.random.Generator(np.random.Philox(key=[seed, 0])).random(count, "float32")` for each seed.

    Args:
        seeds: int64 (B,); a negative one is taken modulo 2**64, as `Sample` does.
        count: N, a Python integer.

    Returns:
        float32 (N, B), in [0, 1).
    """
    blocks = -(-count // 8)  # a block has four words of 64 bits, which are eight numbers of 32 bits
    batch_size = tf.size(seeds)
    counters = tf.cast(tf.range(1, blocks + 1), "uint64")  # NumPy increments the counter before it draws
    first = tf.tile(counters[None], [batch_size, 1])  # (B, C)
    zeros = tf.zeros_like(first)
    words, key = [first, zeros, zeros, zeros], [tf.bitcast(seeds, "uint64")[:, None], _uint64(0)]
    for i in range(_ROUNDS):
        if i:
            key = [part + _uint64(step) for part, step in zip(key, _KEY_STEPS, strict=True)]
        (high_0, low_0), (high_1, low_1) = _product(_FACTORS[0], words[0]), _product(_FACTORS[1], words[2])
        words = [_xor(high_1, words[1], key[0]), low_1, _xor(high_0, words[3], key[1]), low_0]
    stacked = tf.stack(words, axis=-1)  # (B, C, 4)
    halves = tf.stack([tf.bitwise.bitwise_and(stacked, _uint64(_LOW_HALF)), _shift_right(stacked, 32)], axis=-1)
    drawn = tf.reshape(halves, [batch_size, 8 * blocks])[:, :count]
    return tf.transpose(tf.cast(tf.cast(_shift_right(drawn, 8), "int32"), "float32") * 2.0**-24)


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of the product of two 64-bit numbers."""
    low, high = factor & _LOW_HALF, factor >> 32
    x_low, x_high = tf.bitwise.bitwise_and(x, _uint64(_LOW_HALF)), _shift_right(x, 32)
    ones, cross = x_low * _uint64(low), x_low * _uint64(high)
    middle = x_high * _uint64(low) + _shift_right(ones, 32)  # at most 2**64 - 1
    carry = _shift_right(tf.bitwise.bitwise_and(middle, _uint64(_LOW_HALF)) + cross, 32)
    return x_high * _uint64(high) + _shift_right(middle, 32) + carry, x * _uint64(factor)


def _xor(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(x, y), z)


def _shift_right(x: Tensor, count: int) -> Tensor:
    return tf.bitwise.right_shift(x, _uint64(count))


def _uint64(value: int) -> Tensor:
    return tf.constant(value, "uint64")

"""Seeds (B,) -> uniform numbers (N, B) in the TensorFlow graph: those of NumPy's Philox, and so of `Sample.noise`.

B rows, N numbers of each, C blocks of four. A row depends on its seed alone. The generator is Philox4x64-10: Salmon et
al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_ROUNDS = 10
_FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW_HALF = 0xFFFFFFFF


def uniform(seeds, count):
    """`np.random.Generator(np.random.Philox(key=[seed, 0])).random(count, "float32")` for each seed.

    Args:
        seeds: int64 (B,); a negative one is taken modulo 2**64, as `Sample` does.
        count: N, a Python integer.

    Returns:
        float32 (N, B), in [0, 1).
    """
    blocks = -(-count // 8)  # each makes four numbers of 64 bits, that is eight of 32
    batch = tf.size(seeds)
    counters = tf.cast(tf.range(1, blocks + 1), "uint64")  # NumPy counts up before it draws
    first = tf.tile(counters[None], [batch, 1])  # (B, C)
    zeros = tf.zeros_like(first)
    numbers, key = [first, zeros, zeros, zeros], [tf.bitcast(seeds, "uint64")[:, None], _uint64(0)]
    for turn in range(_ROUNDS):
        if turn:
            key = [part + _uint64(step) for part, step in zip(key, _KEY_STEPS, strict=True)]
        (high_0, low_0), (high_1, low_1) = _product(_FACTORS[0], numbers[0]), _product(_FACTORS[1], numbers[2])
        numbers = [_xor(high_1, numbers[1], key[0]), low_1, _xor(high_0, numbers[3], key[1]), low_0]
    words = tf.stack(numbers, axis=-1)  # (B, C, 4)
    halves = tf.stack([tf.bitwise.bitwise_and(words, _uint64(_LOW_HALF)), _right(words, 32)], axis=-1)
    drawn = tf.reshape(halves, [batch, 8 * blocks])[:, :count]
    return tf.transpose(tf.cast(tf.cast(_right(drawn, 8), "int32"), "float32") * 2.0**-24)


def _product(factor, x):
    """The upper and the lower 64 bits of a product of 64 bits each."""
    low, high = factor & _LOW_HALF, factor >> 32
    x_low, x_high = tf.bitwise.bitwise_and(x, _uint64(_LOW_HALF)), _right(x, 32)
    ones, cross = x_low * _uint64(low), x_low * _uint64(high)
    middle = x_high * _uint64(low) + _right(ones, 32)  # at most 2**64 - 1
    carry = _right(tf.bitwise.bitwise_and(middle, _uint64(_LOW_HALF)) + cross, 32)
    return x_high * _uint64(high) + _right(middle, 32) + carry, x * _uint64(factor)


def _xor(x, y, z):
    return tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(x, y), z)


def _right(x, count):
    return tf.bitwise.right_shift(x, _uint64(count))


def _uint64(value):
    return tf.constant(value, "uint64")

"""Sampling functions: logits (R, V) -> filtered logits (R, V), and tokens (R,) drawn from them.

R rows, V vocabulary, K kept tokens. Filters set the logits that they remove to minus infinity, compute in float32, and
match the logits warpers of transformers. Top-k: Fan et al. 2018, arXiv:1805.04833; top-p: Holtzman et al. 2019,
arXiv:1904.09751; min-p: Nguyen et al. 2024, arXiv:2407.01082.
"""

import math

from keras import ops

from keras_tx.generation.state import argmax, as_int32, pick, without_xla
from keras_tx.layers import loops
from keras_tx.types import Tensor

_TEMPERATURES = (1e-30, 1e30)  # numbers whose reciprocals are normal in float32: minus infinity / infinity is NaN
_LOWEST_LOGIT = -104.0  # relative to the largest; exp of less is zero in float32
_NUM_BISECTIONS = 30  # of the range from there to 0, down to 1e-7, the spacing of float32 logits
_BISECTIONS_PER_LOOP = 5  # in a TensorFlow loop


def at_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits (R, V) minus the largest of their row, divided by `temperature`, a number or (R, 1)."""
    logits = ops.cast(logits, "float32")
    logits = logits - ops.max(logits, axis=-1, keepdims=True)  # so that nothing overflows
    low, high = _TEMPERATURES
    if isinstance(temperature, (int, float)):  # TensorFlow and JAX refuse numbers that float32 does not have
        return logits / min(max(temperature, low), high)
    return logits / ops.clip(ops.cast(temperature, "float32"), low, high)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the `k` largest logits (R, V) of each row, and all that are equal to the smallest of these."""
    logits = ops.cast(logits, "float32")
    if k >= logits.shape[-1]:
        return logits
    # The last of them is also the smallest, but for `[:, -1]` XLA would sort the whole vocabulary.
    smallest = ops.min(ops.top_k(logits, k)[0], axis=-1, keepdims=True)
    return _keep(logits >= smallest, logits)


def top_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least `p`, a number or (R, 1).

    A token is kept if all more likely tokens together have a probability below `p`; equally likely tokens are all kept.
    The threshold is found by bisection, because XLA on a CPU takes longer to sort a vocabulary of 50,000.
    """
    logits = ops.cast(logits, "float32")
    relative = logits - ops.max(logits, axis=-1, keepdims=True)
    weights = ops.exp(relative)
    p = ops.cast(p, "float32")
    needed = ops.where(p < 1.0, p, 2.0) * ops.sum(weights, axis=-1, keepdims=True)  # p = 1 keeps all despite rounding
    high = ops.zeros_like(relative[:, :1])  # no token lies above the largest logit
    low = high + _LOWEST_LOGIT

    def bisected(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(_BISECTIONS_PER_LOOP if without_xla() else _NUM_BISECTIONS):
            middle = (low + high) / 2
            is_enough = ops.sum(ops.where(relative > middle, weights, 0.0), axis=-1, keepdims=True) >= needed
            low, high = ops.where(is_enough, middle, low), ops.where(is_enough, high, middle)
        return low, high

    if without_xla():  # a loop, since a file has each of its operations, and TensorFlow prepares each before it runs
        rounds = _NUM_BISECTIONS // _BISECTIONS_PER_LOOP
        low, high = loops.repeat(0, rounds, lambda _, bounds: bisected(*bounds), (low, high))
    else:
        low, high = bisected(low, high)
    return _keep(ops.logical_or(relative > low, p >= 1.0), logits)


def min_p(logits: Tensor, p: Tensor) -> Tensor:
    """Keeps the tokens whose probability is at least `p`, a number or (R, 1), times the highest of their row."""
    logits = ops.cast(logits, "float32")
    relative = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    return _keep(relative >= ops.cast(p, "float32"), logits)


def scattered(probabilities: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Probabilities (R, K) of `tokens` (R, K) -> those of all tokens, (R, V), V = `size`."""
    tokens = as_int32(tokens)
    rows = ops.broadcast_to(ops.arange(ops.shape(tokens)[0], dtype="int32")[:, None], ops.shape(tokens))
    places = ops.reshape(ops.stack([rows, tokens], axis=-1), (-1, 2))
    return ops.scatter(places, ops.reshape(probabilities, (-1,)), (ops.shape(tokens)[0], size))


def draw(logits: Tensor, noise: Tensor) -> Tensor:
    """Draws a token for each row: the inverse of the cumulative distribution at `noise`.

    Probabilities are summed over blocks of the vocabulary, then over the tokens of one block, which is faster and more
    exact than a running sum over the whole vocabulary.

    Args:
        logits: (R, V).
        noise: (R,), uniform numbers in [0, 1).

    Returns:
        Tokens, (R,) integers.
    """
    logits = ops.cast(logits, "float32")
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    block_size = math.isqrt(logits.shape[-1] - 1) + 1
    num_blocks = -(-logits.shape[-1] // block_size)
    weights = ops.pad(weights, ((0, 0), (0, num_blocks * block_size - logits.shape[-1])))
    blocks = ops.reshape(weights, (-1, num_blocks, block_size))
    block_sums = ops.sum(blocks, axis=-1)
    cumulative = ops.cumsum(block_sums, axis=-1)
    target = ops.cast(noise, "float32") * cumulative[:, -1]
    block = _first_above(block_sums, cumulative, target)
    target = target - pick(cumulative, block) + pick(block_sums, block)
    in_block = ops.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # (R, block_size)
    return block * block_size + _first_above(in_block, ops.cumsum(in_block, axis=-1), target)


def draw_from_few(logits: Tensor, noise: Tensor) -> Tensor:
    """The same as `draw`, without blocks: for few tokens, whose number may be unknown while a graph is traced."""
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    cumulative = ops.cumsum(weights, axis=-1)
    return _first_above(weights, cumulative, ops.cast(noise, "float32") * cumulative[:, -1])


def _first_above(weights: Tensor, cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index with a weight > 0 and a cumulative sum > `target`; the largest weight if rounding leaves none."""
    above = ops.logical_and(cumulative > target[:, None], weights > 0)
    return as_int32(argmax(ops.where(above, float("inf"), weights)))


def _keep(kept: Tensor, logits: Tensor) -> Tensor:
    return ops.where(kept, logits, -float("inf"))

"""Sampling: logits (R, V) -> tokens (R,) drawn from the temperate, filtered distribution.

R rows, one a prompt, V vocabulary. Filters set the logits they remove to minus infinity, compute in float32, and mean
what the warpers of transformers mean. Top-k: Fan et al. 2018, arXiv:1805.04833; top-p: Holtzman et al. 2019,
arXiv:1904.09751; min-p: Nguyen et al. 2024, arXiv:2407.01082.
"""

import math
import random
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral, Real

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation import strategy
from keras_tx.generation.strategy import Strategy

_COLDEST = 1e-30  # a temperature that float32 still divides by
_FAINTEST = -104.0  # exp of less is zero in float32
_HALVINGS = 30  # of that range: down to 1e-7, the distance of neighbouring logits


def at_temperature(logits, temperature):
    """Logits (R, V) minus the largest of their row, divided by `temperature`, a number or (R, 1)."""
    logits = ops.cast(logits, "float32")
    logits = logits - ops.max(logits, axis=-1, keepdims=True)  # nothing can overflow then
    return logits / ops.maximum(ops.cast(temperature, "float32"), _COLDEST)


def top_k(logits, k):
    """Keeps the `k` largest logits (R, V) of a row, and all that equal the last of them. `k` is a Python integer."""
    logits = ops.cast(logits, "float32")
    if k >= logits.shape[-1]:
        return logits
    least = ops.min(
        ops.top_k(logits, k)[0], axis=-1, keepdims=True
    )  # the last of them; XLA sorts all where one is taken
    return _where(logits >= least, logits)


def top_p(logits, p):
    """Keeps the fewest of the likeliest tokens whose probabilities sum to `p`, a number or (R, 1), or more.

    That is every token with less than `p` of the probability on likelier ones. Equals at the border all stay. Where the
    border lies is found by halving: XLA on a CPU takes longer to sort a vocabulary of 50,000.
    """
    logits = ops.cast(logits, "float32")
    relative = logits - ops.max(logits, axis=-1, keepdims=True)
    weights = ops.exp(relative)
    p = ops.cast(p, "float32")
    enough = ops.where(p < 1.0, p, 2.0) * ops.sum(weights, axis=-1, keepdims=True)  # 1: all, however sums are rounded
    high = ops.zeros_like(relative[:, :1])  # above the largest logit there is less than p
    low = high + _FAINTEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = ops.sum(ops.where(relative > middle, weights, 0.0), axis=-1, keepdims=True) >= enough
        low, high = ops.where(beyond, middle, low), ops.where(beyond, high, middle)
    return _where(ops.logical_or(relative > low, p >= 1.0), logits)


def min_p(logits, p):
    """Keeps the tokens at least `p`, a number or (R, 1), times as likely as the likeliest of their row."""
    logits = ops.cast(logits, "float32")
    relative = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    return _where(relative >= ops.cast(p, "float32"), logits)


def draw(logits, noise):
    """The inverse of the cumulative distribution of logits (R, V) at `noise` (R,), numbers in [0, 1): tokens (R,).

    Sums go over blocks of the vocabulary and then over the tokens of one block, which is faster than the running sum of
    all, and more exact.
    """
    logits = ops.cast(logits, "float32")
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    size = math.isqrt(logits.shape[-1] - 1) + 1
    count = -(-logits.shape[-1] // size)
    weights = ops.pad(weights, ((0, 0), (0, count * size - logits.shape[-1])))
    blocks = ops.reshape(weights, (-1, count, size))
    sums = ops.sum(blocks, axis=-1)
    reached = ops.cumsum(sums, axis=-1)
    target = ops.cast(noise, "float32") * reached[:, -1]
    block = _first_beyond(sums, reached, target)
    target = target - strategy.pick(reached, block) + strategy.pick(sums, block)
    inside = ops.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # (R, size)
    return block * size + _first_beyond(inside, ops.cumsum(inside, axis=-1), target)


def draw_of_few(logits, noise):
    """As `draw`, for so few tokens that blocks do not pay; their number may be unknown while a graph is traced."""
    weights = ops.exp(logits - ops.max(logits, axis=-1, keepdims=True))
    reached = ops.cumsum(weights, axis=-1)
    return _first_beyond(weights, reached, ops.cast(noise, "float32") * reached[:, -1])


def _first_beyond(weights, reached, target):
    """The first index with a weight whose running sum is beyond `target`; where rounding left none, the heaviest."""
    beyond = ops.logical_and(reached > target[:, None], weights > 0)
    return strategy.integer(strategy.likeliest(ops.where(beyond, float("inf"), weights)))


def _where(kept, logits):
    return ops.where(kept, logits, -float("inf"))


@dataclass(frozen=True)
class Sample(Strategy):
    """Draws each token: from softmax(logits / temperature), of which `top_k`, `top_p` and `min_p` keep a part.

    They apply in this order, each to what the one before it left, as in transformers. One number a row and step decides
    what is drawn; it depends on the seed, the row's place in the batch and the step alone, not on the backend, the
    other rows or the length. So a prompt alone gives what it gives as the first of a batch, and equal prompts in one
    batch give different samples.

    The score of a result is the sum of the log-probabilities that the model gave its tokens, before all this.

    Args:
        temperature: below 1 sharpens the distribution, above 1 flattens it.
        top_k: keep this many of the likeliest tokens. All that follows then costs next to nothing.
        top_p: keep the fewest of the likeliest tokens whose probabilities sum to this or more; in (0, 1].
        min_p: keep the tokens at least this many times as likely as the likeliest; in [0, 1].
        seed: an integer, for the same samples in every call; None for others in each, which
            `keras.utils.set_random_seed` makes reproducible. Strategies that differ in it alone are equal: it is not
            part of what is compiled.

    Raises:
        ValueError: for a temperature that is not positive and finite, a `top_k` below 1, `top_p` or `min_p` out of
            range, or a seed that is not an integer.
    """

    temperature: float = 1.0
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = field(default=None, compare=False)

    def __post_init__(self):
        checks.positive_float("temperature", self.temperature)
        checks.positive_int("top_k", self.top_k, none=True)
        for name, zero in (("top_p", False), ("min_p", True)):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and (0 < value <= 1 or (zero and value == 0))):
                rule = f"a number in {'[' if zero else '('}0, 1] or None"
                raise ValueError(f"The argument `{name}` must be {rule}. Received: {name}={value!r}")
        if self.seed is not None and (not isinstance(self.seed, Integral) or isinstance(self.seed, bool)):
            raise ValueError(f"The argument `seed` must be an integer or None. Received: seed={self.seed!r}")
        for name, plain in (("temperature", float), ("top_p", float), ("min_p", float), ("top_k", int), ("seed", int)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, plain(value))  # frozen; of NumPy's numbers some overflow

    def noise(self, batch, num_new):
        """(M, B) float32 in [0, 1): column i is the stream of the counter generator Philox with key (seed, i)."""
        # Keras seeds Python's generator, and takes its own seeds from it; unlike draws of `keras.random`, its numbers
        # are the same on every backend.
        seed = random.getrandbits(64) if self.seed is None else self.seed % 2**64
        keys = [np.array([seed, row], "uint64") for row in range(batch)]
        streams = [np.random.Generator(np.random.Philox(key=key)).random(num_new, "float32") for key in keys]
        return np.stack(streams, axis=1)

    def begin(self, ids, real, num_new, limit, vocabulary_size, padding_id=0, noise=None):
        state = super().begin(ids, real, num_new, limit, vocabulary_size, padding_id)
        shape, batch = None if noise is None else tuple(noise.shape), ids.shape[0]
        if shape is None or len(shape) != 2 or shape[0] != num_new or (batch and shape[1] not in (batch, None)):
            raise ValueError(
                f"`noise` must have the shape ({num_new}, {batch}), new slots and prompts. Received: "
                f"noise.shape={shape}"
            )
        state["noise"] = ops.cast(ops.convert_to_tensor(noise), "float32")
        return state

    def choose(self, scores, state):
        scores, tokens = at_temperature(scores, self.temperature), None
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores, tokens = ops.top_k(scores, self.top_k)  # no more than k, where equals compete for the last place
        if self.top_p is not None and self.top_p < 1:
            scores = top_p(scores, self.top_p)
        if self.min_p:
            scores = min_p(scores, self.min_p)
        places = draw(scores, ops.take(state["noise"], state["step"], axis=0))
        return places if tokens is None else strategy.pick(strategy.integer(tokens), places)

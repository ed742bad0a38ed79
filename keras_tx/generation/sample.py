"""The strategy that samples: logits (R, V) -> tokens (R,) drawn from a filtered distribution.

R rows, one for each of B prompts, M new tokens, V vocabulary.
"""

import random
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral, Real

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation import sampling
from keras_tx.generation.state import State, as_int32, pick
from keras_tx.generation.strategy import Strategy
from keras_tx.types import Tensor


@dataclass(frozen=True)
class Sample(Strategy):
    """Sampling: draws each token from softmax(logits / temperature), restricted by `top_k`, `top_p` and `min_p`.

    The filters apply in this order, each to the tokens that the one before it kept, as in transformers. Each draw uses
    one random number, which depends only on the seed, the index of the prompt in the batch and the step, not on the
    backend, the other prompts or the length. So a single prompt has the same continuation as the first prompt of a
    batch, and equal prompts in one batch have different continuations.

    The score of a result is the sum of the log-probabilities that the model gave to its tokens, before temperature and
    filters.

    Args:
        temperature: below 1 sharpens the distribution, above 1 flattens it.
        top_k: keep only this many of the most likely tokens. The other filters then cost almost no time. None: all
            tokens.
        top_p: keep only the smallest set of most likely tokens whose probabilities sum to at least this number, in (0,
            1].
        min_p: keep only tokens whose probability is at least this fraction of the highest probability, in [0, 1].
        seed: an integer, for the same samples in every call; None for new samples in every call, which
            `keras.utils.set_random_seed` makes reproducible. Strategies that differ only in the seed compare as equal,
            so that they share a compiled program.

    Raises:
        ValueError: for a temperature that is not positive and finite, a `top_k` below 1, `top_p` or `min_p` out of
            range, or a seed that is not an integer.

    Reference:
        Top-k: Fan et al. 2018, arXiv:1805.04833; top-p: Holtzman et al. 2019, arXiv:1904.09751; min-p: Nguyen et al.
        2024, arXiv:2407.01082.

    Examples:
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> strategy = keras_tx.generation.Sample(0.8, top_k=5, top_p=0.9, seed=3)
        >>> rows = model.generate([[5, 7, 9], [3]], strategy, max_new_tokens=4, jit_compile=False)
        >>> [len(row) for row in rows]
        [7, 5]
        >>> rows == model.generate([[5, 7, 9], [3]], strategy, max_new_tokens=4, jit_compile=False)
        True
    """

    temperature: float = 1.0
    _: KW_ONLY
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        checks.positive_float("temperature", self.temperature)
        checks.positive_int("top_k", self.top_k, none=True)
        for name, zero in (("top_p", False), ("min_p", True)):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and (0 < value <= 1 or (zero and value == 0))):
                rule = f"a number in {'[' if zero else '('}0, 1] or None"
                raise ValueError(f"The argument `{name}` must be {rule}. Received: {name}={value!r}")
        if self.seed is not None and (not isinstance(self.seed, Integral) or isinstance(self.seed, bool)):
            raise ValueError(f"The argument `seed` must be an integer or None. Received: seed={self.seed!r}")
        for name, kind in (("temperature", float), ("top_p", float), ("min_p", float), ("top_k", int), ("seed", int)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, kind(value))  # NumPy's numbers overflow where Python's do not

    def noise(self, batch_size: int, num_new: int) -> np.ndarray:
        """Uniform random numbers in [0, 1), float32 (M, B); column i is drawn from Philox with the key (seed, i)."""
        # `keras.utils.set_random_seed` seeds Python's generator, whose numbers are the same on every backend; those of
        # `keras.random` are not.
        seed = random.getrandbits(64) if self.seed is None else self.seed % 2**64
        keys = [np.array([seed, row], "uint64") for row in range(batch_size)]
        streams = [np.random.Generator(np.random.Philox(key=key)).random(num_new, "float32") for key in keys]
        return np.stack(streams, axis=1)

    def initial_state(
        self,
        ids: Tensor,
        real: Tensor,
        num_new: int,
        limit: Tensor,
        vocabulary_size: int,
        padding_id: Tensor = 0,
        noise: Tensor = None,
    ) -> State:
        state = super().initial_state(ids, real, num_new, limit, vocabulary_size, padding_id)
        shape, batch_size = None if noise is None else tuple(noise.shape), ids.shape[0]
        if (
            shape is None
            or len(shape) != 2
            or shape[0] != num_new
            or (batch_size and shape[1] not in (batch_size, None))
        ):
            raise ValueError(
                f"`noise` must have the shape ({num_new}, {batch_size}), new slots and prompts. Received: "
                f"noise.shape={shape}"
            )
        state["noise"] = ops.cast(ops.convert_to_tensor(noise), "float32")
        return state

    def choose(self, scores: Tensor, state: State) -> Tensor:
        scores, tokens = self._filtered(scores)
        drawn = sampling.draw(scores, ops.take(state["noise"], state["step"], axis=0))
        return drawn if tokens is None else pick(as_int32(tokens), drawn)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The distribution (R, V) that `choose` draws from."""
        filtered, tokens = self._filtered(scores)
        probabilities = ops.softmax(filtered, axis=-1)
        return probabilities if tokens is None else sampling.scattered(probabilities, tokens, scores.shape[-1])

    def _filtered(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """The remaining logits, and their tokens if there are fewer than the vocabulary has."""
        scores, tokens = sampling.at_temperature(scores, self.temperature), None
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            scores, tokens = ops.top_k(scores, self.top_k)  # exactly k; `sampling.top_k` keeps all ties
        if self.top_p is not None and self.top_p < 1:
            scores = sampling.top_p(scores, self.top_p)
        if self.min_p:
            scores = sampling.min_p(scores, self.min_p)
        return scores, tokens

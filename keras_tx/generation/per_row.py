"""A strategy with its own options for each row: logits (R, V) -> tokens (R,), greedy in some rows, sampled in others.

R rows, one for each prompt, M new tokens, V vocabulary, K the largest `top_k`. For TensorFlow graphs, in which K may be
a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

from keras import ops

from keras_tx.generation import sampling
from keras_tx.generation.state import State, argmax, as_int32, pick
from keras_tx.generation.strategy import Strategy
from keras_tx.types import Tensor


@dataclass(frozen=True, eq=False)
class PerRowStrategy(Strategy):
    """Chooses what `Greedy()` or `Sample(temperature, top_k=top_k, top_p=top_p)` would choose, row by row.

    Args:
        temperature: float32 (R,); 0 for greedy rows.
        top_k: int32 (R,); 0, or the size of the vocabulary, for all tokens.
        top_p: float32 (R,), in (0, 1].

    `initial_state` takes the noise (M, R) from `philox.uniform`, and may take a limit for each row.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

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
        return {**state, "noise": noise}

    def choose(self, scores: Tensor, state: State) -> Tensor:
        is_sampled = self.temperature > 0
        likeliest = argmax(scores)
        sampled = _if_any(is_sampled, lambda: self._sample(scores, state, is_sampled), likeliest)
        return ops.where(is_sampled, sampled, likeliest)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The distribution (R, V) that `choose` draws from; 1 for the chosen token in greedy rows."""
        size, is_sampled = scores.shape[-1], self.temperature > 0
        likeliest = ops.one_hot(argmax(scores), size, dtype="float32")
        heated = sampling.at_temperature(scores, ops.where(is_sampled, self.temperature, 1.0)[:, None])
        from_few, from_all = self._ways(is_sampled, size)

        def of_few() -> Tensor:
            few, tokens = self._few(heated, from_few)
            return sampling.scattered(ops.softmax(few, axis=-1), tokens, size)

        few = _if_any(from_few, of_few, likeliest)
        every = _if_any(from_all, lambda: ops.softmax(self._keep_top_p(heated, from_all), axis=-1), likeliest)
        return ops.where(from_few[:, None], few, ops.where(from_all[:, None], every, likeliest))

    def _sample(self, scores: Tensor, state: State, is_sampled: Tensor) -> Tensor:
        """Draws a token for each row; in greedy rows the result is arbitrary and not used."""
        noise = ops.take(state["noise"], state["step"], axis=0)
        scores = sampling.at_temperature(scores, ops.where(is_sampled, self.temperature, 1.0)[:, None])
        from_few, from_all = self._ways(is_sampled, scores.shape[-1])

        def of_few() -> Tensor:
            few, tokens = self._few(scores, from_few)
            return pick(tokens, sampling.draw_from_few(few, noise))

        unused = ops.zeros_like(self.top_k)
        few = _if_any(from_few, of_few, unused)
        every = _if_any(from_all, lambda: as_int32(sampling.draw(self._keep_top_p(scores, from_all), noise)), unused)
        return ops.where(from_few, few, every)

    def _ways(self, is_sampled: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Whether each row is drawn from the `top_k` likeliest tokens, and whether from all."""
        has_top_k = ops.logical_and(self.top_k > 0, self.top_k < size)
        return ops.logical_and(is_sampled, has_top_k), ops.logical_and(is_sampled, ops.logical_not(has_top_k))

    def _few(self, scores: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The filtered logits (R, K) of the likeliest tokens, and these tokens, the likeliest first."""
        largest_k = ops.max(ops.where(rows, self.top_k, 1))
        scores, tokens = ops.top_k(scores, largest_k)
        is_kept = ops.arange(largest_k, dtype="int32") < self.top_k[:, None]
        return self._keep_top_p(ops.where(is_kept, scores, -float("inf")), rows), as_int32(tokens)

    def _keep_top_p(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies `top_p` to scores, if one of the rows where `rows` is True needs it."""
        p = ops.where(rows, self.top_p, 1.0)
        return _if_any(p < 1, lambda: sampling.top_p(scores, p[:, None]), scores)


def _if_any(conditions: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    return ops.cond(ops.any(conditions), compute, lambda: otherwise)

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

    def _sample(self, scores: Tensor, state: State, is_sampled: Tensor) -> Tensor:
        """Draws a token for each row; in greedy rows the result is arbitrary and not used."""
        noise = ops.take(state["noise"], state["step"], axis=0)
        scores = sampling.at_temperature(scores, ops.where(is_sampled, self.temperature, 1.0)[:, None])
        has_top_k = ops.logical_and(self.top_k > 0, self.top_k < scores.shape[-1])
        from_few = ops.logical_and(is_sampled, has_top_k)
        from_all = ops.logical_and(is_sampled, ops.logical_not(has_top_k))
        unused = ops.zeros_like(self.top_k)
        of_few = _if_any(from_few, lambda: self._sample_top_k(scores, noise, from_few), unused)
        of_all = _if_any(from_all, lambda: as_int32(sampling.draw(self._keep_top_p(scores, from_all), noise)), unused)
        return ops.where(from_few, of_few, of_all)

    def _sample_top_k(self, scores: Tensor, noise: Tensor, rows: Tensor) -> Tensor:
        largest_k = ops.max(ops.where(rows, self.top_k, 1))
        scores, tokens = ops.top_k(scores, largest_k)  # (R, K), the likeliest first
        is_kept = ops.arange(largest_k, dtype="int32") < self.top_k[:, None]
        scores = self._keep_top_p(ops.where(is_kept, scores, -float("inf")), rows)
        return pick(as_int32(tokens), sampling.draw_from_few(scores, noise))

    def _keep_top_p(self, scores: Tensor, rows: Tensor) -> Tensor:
        """Applies `top_p` to scores, if one of the rows where `rows` is True needs it."""
        p = ops.where(rows, self.top_p, 1.0)
        return _if_any(p < 1, lambda: sampling.top_p(scores, p[:, None]), scores)


def _if_any(conditions: Tensor, compute: Callable[[], Tensor], otherwise: Tensor) -> Tensor:
    return ops.cond(ops.any(conditions), compute, lambda: otherwise)

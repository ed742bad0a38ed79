"""A strategy whose numbers come with the rows: logits (R, V) -> tokens (R,), greedy for some rows, sampled for others.

R rows, one a prompt, V vocabulary, K the largest `top_k`. For graphs of TensorFlow, where K may be a tensor.
"""

from dataclasses import dataclass
from typing import Any

from keras import ops

from keras_tx.generation import sampling, strategy
from keras_tx.generation.strategy import Strategy


@dataclass(frozen=True, eq=False)
class PerRowStrategy(Strategy):
    """What `Greedy()` or `Sample(temperature, top_k=top_k, top_p=top_p)` would choose for each row.

    Args:
        temperature: float32 (R,); 0 for greedy rows.
        top_k: int32 (R,); 0, or as many as the vocabulary has, for all tokens.
        top_p: float32 (R,), in (0, 1].

    `begin` takes the noise (M, R) of `philox.uniform`, and may take a limit for each row.
    """

    temperature: Any
    top_k: Any
    top_p: Any

    def begin(self, ids, real, num_new, limit, vocabulary_size, padding_id=0, noise=None):
        state = super().begin(ids, real, num_new, limit, vocabulary_size, padding_id)
        return {**state, "noise": noise}

    def choose(self, scores, state):
        samples = self.temperature > 0
        likeliest = strategy.likeliest(scores)
        drawn = ops.cond(ops.any(samples), lambda: self._drawn(scores, state, samples), lambda: likeliest)
        return ops.where(samples, drawn, likeliest)

    def _drawn(self, scores, state, samples):
        """A token of the distribution of each row; anything in the rows that are greedy."""
        noise = ops.take(state["noise"], state["step"], axis=0)
        scores = sampling.at_temperature(scores, ops.where(samples, self.temperature, 1.0)[:, None])
        few = ops.logical_and(samples, ops.logical_and(self.top_k > 0, self.top_k < scores.shape[-1]))
        many = ops.logical_and(samples, ops.logical_not(few))
        nothing = ops.zeros_like(self.top_k)
        of_all = ops.cond(
            ops.any(many),
            lambda: strategy.integer(sampling.draw(self._likeliest(scores, many), noise)),
            lambda: nothing,
        )
        of_few = ops.cond(ops.any(few), lambda: self._drawn_of_few(scores, noise, few), lambda: nothing)
        return ops.where(few, of_few, of_all)

    def _drawn_of_few(self, scores, noise, few):
        most = ops.max(ops.where(few, self.top_k, 1))
        scores, tokens = ops.top_k(scores, most)  # (R, K), the likeliest first
        kept = ops.arange(most, dtype="int32") < self.top_k[:, None]
        scores = self._likeliest(ops.where(kept, scores, -float("inf")), few)
        return strategy.pick(strategy.integer(tokens), sampling.draw_of_few(scores, noise))

    def _likeliest(self, scores, counted):
        """`top_p` of the rows that count, if there is one that needs it."""
        p = ops.where(counted, self.top_p, 1.0)
        return ops.cond(ops.any(p < 1), lambda: sampling.top_p(scores, p[:, None]), lambda: scores)

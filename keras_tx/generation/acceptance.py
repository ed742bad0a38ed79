"""The rule of speculative sampling: a draft token of another distribution is kept or replaced, (R, V) -> tokens (R,).

R rows, V vocabulary. Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318,
algorithm 2. Each new token has three random numbers: `draft_noise` draws the draft, `chances` decides whether it is
kept, `noise` draws another token.
"""

from dataclasses import dataclass
from typing import Any

from keras import ops

from keras_tx.generation import sampling
from keras_tx.generation.state import State, pick
from keras_tx.generation.strategy import Strategy
from keras_tx.types import Tensor


def kept_or_replaced(
    probabilities: Tensor, draft_probabilities: Tensor, drafts: Tensor, chances: Tensor, noise: Tensor
) -> Tensor:
    """Tokens with the distribution p = `probabilities`, as many of them as possible equal to `drafts`.

    A draft d, drawn from q = `draft_probabilities`, is kept with the probability min(1, p(d) / q(d)). Otherwise the
    token is drawn from max(p - q, 0), normalized.

    Args:
        probabilities: (R, V).
        draft_probabilities: (R, V); zeros in a row without a draft.
        drafts: (R,).
        chances, noise: (R,), uniform numbers in [0, 1).
    """
    of_draft = pick(draft_probabilities, drafts)
    is_kept = ops.logical_and(of_draft > 0, chances * of_draft < pick(probabilities, drafts))
    rest = ops.maximum(probabilities - draft_probabilities, 0.0)
    is_left = ops.any(rest > 0, axis=-1, keepdims=True)  # nothing, up to rounding, if both are the same
    drawn = sampling.draw(ops.log(ops.where(is_left, rest, probabilities)), noise)
    return ops.where(is_kept, drafts, ops.cast(drawn, drafts.dtype))


@dataclass(frozen=True, eq=False)
class Checking(Strategy):
    """Keeps or replaces `draft` (R,), drawn from `draft_probabilities` (R, V): both are entries of the state."""

    strategy: Any  # `Sample` or `PerRowStrategy`

    def choose(self, scores: Tensor, state: State) -> Tensor:
        noise, chances = (ops.take(state[name], state["step"], axis=0) for name in ("noise", "chances"))
        probabilities = self.strategy.probabilities(scores)
        return kept_or_replaced(probabilities, state["draft_probabilities"], state["draft"], chances, noise)

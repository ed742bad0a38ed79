"""Greedy decoding: logits (R, V) -> the most likely tokens (R,)."""

from dataclasses import dataclass

from keras_tx.generation.state import State, argmax
from keras_tx.generation.strategy import Strategy
from keras_tx.types import Tensor


@dataclass(frozen=True)
class Greedy(Strategy):
    """Greedy search: takes the most likely token at every step; the first one if several are equally likely.

    The default strategy of `generate`. The score of a result is the sum of the log-probabilities of its tokens.

    Examples:
        >>> logits = np.array([[0.1, 2.0, 0.3], [1.0, 0.0, 1.0]], "float32")
        >>> keras_tx.generation.Greedy().choose(logits, state={}).numpy().tolist()
        [1, 0]
    """

    def choose(self, scores: Tensor, state: State) -> Tensor:
        return argmax(scores)

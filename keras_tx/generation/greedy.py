"""Greedy decoding: logits (R, V) -> the likeliest tokens (R,)."""

from dataclasses import dataclass

from keras_tx.generation import strategy
from keras_tx.generation.strategy import Strategy


@dataclass(frozen=True)
class Greedy(Strategy):
    """Takes the likeliest token, the first of equals, until a stop token or the limit.

    The score of a result is the sum of the log-probabilities of its tokens.
    """

    def choose(self, scores, state):
        return strategy.likeliest(scores)

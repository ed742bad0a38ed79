"""Beam search: logits (R, V) -> the next tokens of the best beams (R,), and the beams they continue.

B prompts, W beams, R = B * W, M new slots, V vocabulary, C candidates. This is the search of transformers (5.23), step
for step: the same candidates, scores, early stopping and results. Length penalty: Wu et al. 2016, arXiv:1609.08144,
equation 14, without its 5s.
"""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation import strategy
from keras_tx.generation.strategy import Strategy

NOWHERE = -1e9  # the score of beams that must lose, finite as in transformers; half of it no real beam can have


@dataclass(frozen=True)
class Beam(Strategy):
    """Keeps the `num_beams` likeliest continuations at every step, and returns the best of those that end.

    A continuation ends at a stop token or at the limit. Its score is the sum of its log-probabilities, as the
    constraints left them, divided by length ** length_penalty, where the length counts the generated tokens, the stop
    token among them. With one beam this is `Greedy`, except that a repetition penalty applies to log-probabilities here
    and to logits there.

    Args:
        num_beams: W.
        length_penalty: above 0 favours longer results, below 0 shorter ones.
        early_stopping: when a prompt is done that has `num_beams` results. True: at once. False: when the best running
            beam, were it to end now, would not be among them. "never": when it could not be among them even if all its
            further tokens were certain.
        num_return_sequences: how many of the results to return, the best first.

    Raises:
        ValueError: for numbers out of range, another `early_stopping`, more `num_return_sequences` than `num_beams`,
            and in `begin` for more beams than the vocabulary has tokens.
    """

    num_beams: int
    _: KW_ONLY
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self):
        checks.positive_int("num_beams", self.num_beams)
        number = isinstance(self.length_penalty, (int, float)) and not isinstance(self.length_penalty, bool)
        if not number or not math.isfinite(self.length_penalty):
            raise ValueError(
                "The argument `length_penalty` must be a finite number. Received: "
                f"length_penalty={self.length_penalty!r}"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                "The argument `early_stopping` must be True, False or 'never'. Received: "
                f"early_stopping={self.early_stopping!r}"
            )
        checks.positive_int("num_return_sequences", self.num_return_sequences)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                "`num_return_sequences` must not be above `num_beams`. Received: "
                f"num_return_sequences={self.num_return_sequences}, num_beams={self.num_beams}"
            )

    @property
    def width(self):
        return self.num_beams

    def begin(self, ids, real, num_new, limit, vocabulary_size, padding_id=0, noise=None):
        if self.num_beams > vocabulary_size:
            raise ValueError(
                "`num_beams` must not be above the size of the vocabulary. Received: "
                f"num_beams={self.num_beams}, vocabulary_size={vocabulary_size}"
            )
        state = strategy.begin(ids, real, width=self.width, num_new=num_new, limit=limit, padding_id=padding_id)
        nowhere = ops.full_like(self._split(state["ids"][:, 0]), NOWHERE, dtype="float32")  # (B, W)
        return {
            **state,
            # The beams of a prompt are equal at first: only one may go on, or all would go the same way.
            "scores": ops.where(ops.arange(self.width) == 0, 0.0, nowhere),
            "ended": ops.zeros_like(nowhere, dtype="bool"),
            "ended_scores": nowhere,
            "ended_ids": self._split(strategy.fill(state["padding"], state["ids"], num_new)),
        }

    def advance(self, logits, state, constraints, stop_tokens):
        width, live = self.width, ops.logical_not(state["done"])
        log_probs = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)
        scores = constraints(log_probs, state, stop_tokens) + ops.reshape(state["scores"], (-1, 1))

        # Each stop token can end a continuation of each beam: these many candidates leave W that go on.
        count = min(max(2, 1 + len(set(stop_tokens))) * width, width * scores.shape[-1])
        scores, tokens, origin = _candidates(scores, width, count)  # (B, C), the best first
        at_limit = state["step"] + 1 >= state["limit"]
        ends = ops.logical_or(strategy.is_one_of(tokens, stop_tokens), at_limit)
        new = self._results(state, scores, tokens, origin, ends)
        new["scores"], places = ops.top_k(scores + ops.where(ends, NOWHERE, 0.0), width)  # of those that go on

        # One NaN, an infinity or nothing but minus infinity make all of a row's log-probabilities NaN.
        lost = ops.any(self._split(ops.isnan(log_probs[:, 0])), axis=1)
        left = ops.logical_or(scores[:, 0] > NOWHERE / 2, ops.any(state["ended"], axis=1))
        lost = ops.logical_and(live, ops.logical_or(lost, ops.logical_not(left)))
        done = ops.logical_or(at_limit, ops.logical_not(self._may_improve(state, **new)))

        live_rows = ops.repeat(live, width, axis=0)
        tokens, origin = (ops.reshape(ops.take_along_axis(x, places, axis=1), (-1,)) for x in (tokens, origin))
        tokens = ops.where(live_rows, tokens, state["padding"])
        origin = ops.where(live_rows, origin, ops.arange(ops.shape(live_rows)[0], dtype="int32"))
        for name, value in new.items():
            new[name] = ops.where(ops.reshape(live, (-1,) + (1,) * (len(value.shape) - 1)), value, state[name])
        state = {
            **state,
            **new,
            **strategy.write(state, ops.take(state["ids"], origin, axis=0), tokens, live_rows),
            "broken": ops.logical_or(state["broken"], ops.any(lost)),
            "done": ops.logical_or(state["done"], done),
        }
        return state, tokens, origin

    def _results(self, state, scores, tokens, origin, ends):
        """The W best of the results so far and of the candidates (B, C) that end."""
        step, count, num_new = state["step"], tokens.shape[1], state["ended_ids"].shape[2]
        # Only the W best candidates may be results: the others are there to go on.
        ends = ops.logical_and(ops.logical_and(ends, ops.arange(count) < self.width), scores > NOWHERE / 2)
        scores = ops.where(ends, scores / ops.take(self._divisors(num_new), step + 1), NOWHERE)
        ids = ops.take(state["ids"][:, -num_new:], origin, axis=0)  # (B, C, M)
        ids = ops.where(ops.arange(num_new, dtype="int32") == step, tokens[:, :, None], ids)
        scores, places = ops.top_k(ops.concatenate([state["ended_scores"], scores], axis=1), self.width)
        ended = ops.take_along_axis(ops.concatenate([state["ended"], ends], axis=1), places, axis=1)
        ids = ops.take_along_axis(ops.concatenate([state["ended_ids"], ids], axis=1), places[:, :, None], axis=1)
        return {"ended": ended, "ended_scores": scores, "ended_ids": ids}

    def _may_improve(self, state, scores, ended, ended_scores, ended_ids):
        """Whether the beams that go on could still better the results, (B,)."""
        never = self.early_stopping == "never" and self.length_penalty > 0
        length = state["limit"] if never else state["step"] + 1
        hoped = scores[:, :1] / ops.take(self._divisors(ended_ids.shape[2]), length)
        worst = ops.where(ended, ops.min(ended_scores, axis=1, keepdims=True), NOWHERE)
        better = ops.logical_and(ops.any(hoped > worst, axis=1), scores[:, 0] > NOWHERE / 2)
        if self.early_stopping is True or self.width == 1:
            return ops.logical_and(better, ops.logical_not(ops.all(ended, axis=1)))
        return better

    def _divisors(self, longest):
        """length ** length_penalty for lengths 0 (never used) to `longest`, rounded to float32 once."""
        lengths, limits = np.maximum(np.arange(longest + 1.0), 1), np.finfo("float32")
        with np.errstate(over="ignore", under="ignore"):
            powers = lengths**self.length_penalty
        return ops.convert_to_tensor(np.clip(powers, limits.tiny, limits.max).astype("float32"))

    def result(self, state):
        """The best results (B, n, M), the padding id behind the stop token, and their scores (B, n), the best first.

        There are always as many as asked for, except where constraints leave fewer continuations: then the rest is
        padding, with a score of minus infinity.
        """
        ended = state["ended"][:, : self.num_return_sequences]
        scores = ops.where(ended, state["ended_scores"][:, : self.num_return_sequences], -float("inf"))
        ids = state["ended_ids"][:, : self.num_return_sequences]
        return ops.where(ended[:, :, None], ids, state["padding"]), scores

    def _split(self, x):
        """(R, ...) -> (B, W, ...)."""
        return ops.reshape(x, (-1, self.width, *x.shape[1:]))


def _candidates(scores, width, count):
    """The `count` best of all continuations of a prompt: scores (R, V) -> scores, tokens and rows, each (B, C)."""
    kept = min(count, scores.shape[-1])
    scores, tokens = ops.top_k(scores, kept)  # the best of all are among the best of each beam
    scores, places = ops.top_k(ops.reshape(scores, (-1, width * kept)), count)
    tokens = ops.take_along_axis(ops.reshape(tokens, (-1, width * kept)), places, axis=1)
    first = ops.arange(ops.shape(scores)[0], dtype="int32")[:, None] * width
    return scores, strategy.integer(tokens), first + strategy.integer(places) // kept

"""Beam search: logits (R, V) -> the next tokens of the best beams (R,), and the beams they continue.

B prompts, W beams, R = B * W, M new slots, V vocabulary, C candidates. Candidates, scores, early stopping and results
are those of transformers 5.23 at every step. Length penalty: Wu et al. 2016, arXiv:1609.08144, equation 14, without its
constant 5.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from numbers import Real

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation.state import State, append_tokens, as_int32, best_tokens, fill, initial_state, is_one_of
from keras_tx.generation.strategy import Strategy
from keras_tx.layers.cache import repeat_rows
from keras_tx.types import Tensor

EXCLUDED = -1e9  # the score of beams that must not win, finite as in transformers; no real beam reaches half of it
# The score of a place without a finished continuation. Those divided by length ** length_penalty may be below EXCLUDED.
EMPTY = -float("inf")


@dataclass(frozen=True)
class Beam(Strategy):
    """Beam search: keeps the `num_beams` most likely continuations of each prompt, and returns the best finished ones.

    A continuation is finished when it has a stop token or `max_new_tokens` tokens. Its score is the sum of its
    log-probabilities, after constraints, divided by length ** length_penalty, where length is the number of generated
    tokens including the stop token. With one beam it is the same as `Greedy`, except that a repetition penalty applies
    to log-probabilities instead of logits.

    Args:
        num_beams: the number of beams for each prompt, W.
        length_penalty: values above 0 favour longer results, values below 0 shorter ones; 1 divides the score by the
            length.
        early_stopping: when the search for a prompt ends, once it has `num_beams` finished continuations. True: at
            once. False: as soon as the best unfinished beam, if it ended now, would not be among the best `num_beams`.
            "never": as soon as no unfinished beam could be among them, even if all its further tokens had the
            probability 1.
        num_return_sequences: the number of results for each prompt, at most `num_beams`, the best first.

    Raises:
        ValueError: for values out of range, and in `generate` for more beams than the vocabulary has tokens.

    Reference:
        Length penalty: Wu et al. 2016, arXiv:1609.08144, equation 14, without its constant 5.

    Examples:
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> strategy = keras_tx.generation.Beam(3, num_return_sequences=2)
        >>> prompts = np.array([[5, 7, 9], [3, 2, 1]])
        >>> ids, scores = model.generate(prompts, strategy, max_new_tokens=4, return_scores=True, jit_compile=False)
        >>> ids.shape, scores.shape
        ((2, 2, 7), (2, 2))
        >>> bool((scores[:, 0] >= scores[:, 1]).all())
        True
    """

    num_beams: int
    _: KW_ONLY
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        checks.positive_int("num_beams", self.num_beams)
        is_number = isinstance(self.length_penalty, Real) and not isinstance(self.length_penalty, bool)
        if not is_number or not math.isfinite(self.length_penalty):
            raise ValueError(
                "The argument `length_penalty` must be a finite number. Received: "
                f"length_penalty={self.length_penalty!r}"
            )
        if not isinstance(self.early_stopping, (bool, np.bool_)) and self.early_stopping != "never":
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
        for name, kind in (("num_beams", int), ("length_penalty", float), ("num_return_sequences", int)):
            object.__setattr__(self, name, kind(getattr(self, name)))  # NumPy's numbers become Python's
        if isinstance(self.early_stopping, np.bool_):
            object.__setattr__(self, "early_stopping", bool(self.early_stopping))

    @property
    def rows_per_prompt(self) -> int:
        return self.num_beams

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
        if self.num_beams > vocabulary_size:
            raise ValueError(
                "`num_beams` must not be above the size of the vocabulary. Received: "
                f"num_beams={self.num_beams}, vocabulary_size={vocabulary_size}"
            )
        state = initial_state(
            ids, real, rows_per_prompt=self.num_beams, num_new=num_new, limit=limit, padding_id=padding_id
        )
        excluded = ops.full_like(self._split(state["ids"][:, 0]), EXCLUDED, dtype="float32")  # (B, W)
        return {
            **state,
            # The beams of a prompt are equal at first: without this, all of them would get the same tokens.
            "scores": ops.where(ops.arange(self.num_beams, dtype="int32") == 0, 0.0, excluded),
            "ended": ops.zeros_like(excluded, dtype="bool"),
            "ended_scores": ops.full_like(excluded, EMPTY),
            "ended_ids": self._split(fill(state["padding"], state["ids"], num_new)),
        }

    def advance(
        self,
        logits: Tensor,
        state: State,
        constraints: Callable[[Tensor, State, tuple[int, ...]], Tensor],
        stop_tokens: tuple[int, ...],
    ) -> tuple[State, Tensor, Tensor]:
        width, running = self.num_beams, ops.logical_not(state["done"])
        log_probs = ops.log_softmax(ops.cast(logits, "float32"), axis=-1)
        scores = constraints(log_probs, state, stop_tokens) + ops.reshape(state["scores"], (-1, 1))

        # Each stop token can end a continuation of each beam: with this many candidates, W unfinished ones are left.
        count = min(max(2, 1 + len(set(stop_tokens))) * width, width * scores.shape[-1])
        scores, tokens, origin = _candidates(scores, width, count)  # (B, C), the best first
        at_limit = state["step"] + 1 >= state["limit"]
        ends = ops.logical_or(is_one_of(tokens, stop_tokens), at_limit)
        new = self._finished(state, scores, tokens, origin, ends)
        excluded = ops.cast(ends, "float32") * EXCLUDED
        new["scores"], places = ops.top_k(scores + excluded, width)  # of the unfinished ones

        # A NaN, a positive infinity or only minus infinities make all log-probabilities of a row NaN.
        broken = ops.any(self._split(ops.isnan(log_probs[:, 0])), axis=1)
        has_beam = ops.logical_or(scores[:, 0] > EXCLUDED / 2, ops.any(state["ended"], axis=1))
        broken = ops.logical_and(running, ops.logical_or(broken, ops.logical_not(has_beam)))
        done = ops.logical_or(at_limit, ops.logical_not(self._can_improve(state, **new)))

        running_rows = repeat_rows(running, width)
        tokens, origin = (ops.reshape(ops.take_along_axis(x, places, axis=1), (-1,)) for x in (tokens, origin))
        tokens = ops.where(running_rows, tokens, state["padding"])
        origin = ops.where(running_rows, origin, ops.arange(ops.shape(running_rows)[0], dtype="int32"))
        for name, value in new.items():
            new[name] = ops.where(ops.reshape(running, (-1,) + (1,) * (len(value.shape) - 1)), value, state[name])
        state = {
            **state,
            **new,
            **append_tokens(state, ops.take(state["ids"], origin, axis=0), tokens, running_rows),
            "broken": ops.logical_or(state["broken"], ops.any(broken)),
            "done": ops.logical_or(state["done"], done),
        }
        return state, tokens, origin

    def _finished(self, state: State, scores: Tensor, tokens: Tensor, origin: Tensor, ends: Tensor) -> State:
        """The W best finished continuations, among those so far and the candidates (B, C) that end now."""
        step, count, num_new = state["step"], tokens.shape[1], state["ended_ids"].shape[2]
        # As in transformers, only the W best candidates may become results; the others may only continue.
        ends = ops.logical_and(
            ops.logical_and(ends, ops.arange(count, dtype="int32") < self.num_beams), scores > EXCLUDED / 2
        )
        scores = ops.where(ends, self._normalized(scores, step + 1, num_new), EMPTY)
        ids = ops.take(state["ids"][:, -num_new:], origin, axis=0)  # (B, C, M)
        ids = ops.where(ops.arange(num_new, dtype="int32") == step, tokens[:, :, None], ids)
        scores, places = ops.top_k(ops.concatenate([state["ended_scores"], scores], axis=1), self.num_beams)
        ended = ops.take_along_axis(ops.concatenate([state["ended"], ends], axis=1), places, axis=1)
        ids = ops.take_along_axis(ops.concatenate([state["ended_ids"], ids], axis=1), places[:, :, None], axis=1)
        return {"ended": ended, "ended_scores": scores, "ended_ids": ids}

    def _can_improve(
        self, state: State, scores: Tensor, ended: Tensor, ended_scores: Tensor, ended_ids: Tensor
    ) -> Tensor:
        """Whether an unfinished beam could still be better than a finished continuation, (B,)."""
        never = self.early_stopping == "never" and self.length_penalty > 0
        length = state["limit"] if never else state["step"] + 1
        best_possible = self._normalized(scores[:, 0], length, ended_ids.shape[2])
        better = ops.logical_and(best_possible > ops.min(ended_scores, axis=1), scores[:, 0] > EXCLUDED / 2)
        if self.early_stopping is True or self.num_beams == 1:
            return ops.logical_and(better, ops.logical_not(ops.all(ended, axis=1)))
        return better

    def _normalized(self, scores: Tensor, length: Tensor, longest: int) -> Tensor:
        """Scores divided by length ** length_penalty, finite, so that they are above `EMPTY`."""
        lengths, limits = np.maximum(np.arange(longest + 1.0), 1), np.finfo("float32")  # a length of 0 is never used
        with np.errstate(over="ignore", under="ignore"):
            powers = lengths**self.length_penalty
        divisors = ops.convert_to_tensor(np.clip(powers, limits.tiny, limits.max).astype("float32"))
        return ops.maximum(scores / ops.take(divisors, length), float(limits.min))

    def result(self, state: State) -> tuple[Tensor, Tensor]:
        """The best continuations (B, n, M), with the padding id after the stop token, and their scores (B, n).

        The best comes first. If constraints leave fewer than n continuations, the remaining ones are padding with a
        score of minus infinity.
        """
        ended = state["ended"][:, : self.num_return_sequences]
        scores = ops.where(ended, state["ended_scores"][:, : self.num_return_sequences], -float("inf"))
        ids = state["ended_ids"][:, : self.num_return_sequences]
        return ops.where(ended[:, :, None], ids, state["padding"]), scores

    def _split(self, x: Tensor) -> Tensor:
        """(R, ...) -> (B, W, ...)."""
        return ops.reshape(x, (-1, self.num_beams, *x.shape[1:]))


def _candidates(scores: Tensor, width: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all continuations of a prompt: scores (R, V) -> scores, tokens and rows, each (B, C)."""
    kept = min(count, scores.shape[-1])
    scores, tokens = best_tokens(scores, kept)  # the best of all are among the best of each beam
    scores, places = ops.top_k(ops.reshape(scores, (-1, width * kept)), count)
    tokens = ops.take_along_axis(ops.reshape(tokens, (-1, width * kept)), places, axis=1)
    first_row = ops.arange(ops.shape(scores)[0], dtype="int32")[:, None] * width
    return scores, as_int32(tokens), first_row + as_int32(places) // kept

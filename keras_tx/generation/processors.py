"""What a generated text must and must not hold: scores (R, V) -> scores (R, V), minus infinity where forbidden.

R rows, L slots, N tokens, V vocabulary. The rules, and the order in which they apply, are those of the logits
processors of transformers, except that the padding of a prompt is no part of a row: it is never penalized, no n-gram
runs over it, and no forbidden sequence begins in it. Repetition penalty: Keskar et al. 2019, arXiv:1909.05858.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation import strategy

_FORBIDDEN = -float("inf")
_NO_TOKEN = -1  # unlike any id


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Rules on what is generated. A function of scores (R, V), a state of `rows` and the stop tokens; immutable.

    A prompt counts as part of its row in the repetition penalty, n-grams and forbidden sequences.

    Args:
        repetition_penalty: above 1 makes tokens that the row holds less likely: their scores are divided by this where
            positive and multiplied by it where negative.
        no_repeat_ngram_size: no sequence of this many tokens comes twice; 0 for any.
        min_new_tokens: no stop token before there are this many generated tokens.
        forbidden_tokens: ids, and sequences of ids, that must not be generated. Of a sequence it is the last id that is
            forbidden, wherever the row ends with those before it.
        forced_tokens: {index: id}, generated tokens that are given; the index -1 is the last one possible, at the
            limit. These win over all other rules, and score 0.
        renormalize_logits: make log-probabilities of what the rules left; it changes the scores of beams alone.

    Raises:
        ValueError: for numbers out of range and ids that are not integers of at least 0.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    forbidden_tokens: Any = ()
    forced_tokens: Any = None
    renormalize_logits: bool = False

    def __post_init__(self):
        checks.positive_float("repetition_penalty", self.repetition_penalty)
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            if not _is_integer(getattr(self, name), 0):
                raise ValueError(
                    f"The argument `{name}` must be an integer of at least 0. Received: {name}={getattr(self, name)!r}"
                )
        object.__setattr__(self, "forbidden_tokens", _sequences(self.forbidden_tokens))
        object.__setattr__(self, "forced_tokens", _pairs(self.forced_tokens))

    def __call__(self, scores, state, stop_tokens):
        size = scores.shape[-1]
        if self.repetition_penalty != 1:
            penalized = ops.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = ops.where(_among(state["ids"], state["real"], size), penalized, scores)
        for forbidden in self._forbidden(state, stop_tokens, size):
            scores = ops.where(forbidden, _FORBIDDEN, scores)
        if self.forced_tokens:
            forced = strategy.integer(_NO_TOKEN)
            for index, token in self.forced_tokens:
                now = state["step"] == (state["limit"] - 1 if index == -1 else index)
                forced = ops.where(now, token, forced)
            forced = ops.reshape(forced, (-1, 1))  # (R, 1) where the rows have limits of their own
            given = ops.where(ops.arange(size, dtype="int32") == forced, 0.0, _FORBIDDEN)
            scores = ops.where(forced == _NO_TOKEN, scores, given)
        return ops.log_softmax(scores, axis=-1) if self.renormalize_logits else scores

    def _forbidden(self, state, stop_tokens, size):
        """Masks, broadcastable to (R, V), of what must not come next."""
        masks = []
        if self.no_repeat_ngram_size:
            masks.append(_repeats(state, self.no_repeat_ngram_size, size))
        single = [ids[0] for ids in self.forbidden_tokens if len(ids) == 1]
        if single:
            masks.append(ops.convert_to_tensor(np.isin(np.arange(size), single)))
        for length in sorted({len(ids) for ids in self.forbidden_tokens} - {1}):
            sequences = np.array([ids for ids in self.forbidden_tokens if len(ids) == length], "int32")  # (N, length)
            begun = ops.all(_last(state, length - 1)[:, None] == ops.convert_to_tensor(sequences[:, :-1]), axis=-1)
            last = ops.broadcast_to(ops.convert_to_tensor(sequences[:, -1]), ops.shape(begun))
            masks.append(_among(last, begun, size))
        if self.min_new_tokens and stop_tokens:
            stops = ops.convert_to_tensor(np.isin(np.arange(size), stop_tokens))
            masks.append(ops.logical_and(stops, state["step"] < self.min_new_tokens))
        return masks

    @property
    def least_new_tokens(self):
        """The smallest `max_new_tokens` that all rules can be kept with."""
        places = dict(self.forced_tokens)
        least = max(1, self.min_new_tokens, *[index + 1 for index in places])
        two_in_one_place = -1 in places and places.get(least - 1, places[-1]) != places[-1]
        return least + two_in_one_place

    def check(self, max_new_tokens, vocabulary_size, stop_tokens):
        """Refuses what cannot be kept.

        Raises:
            ValueError: for an id that is not in the vocabulary, more `min_new_tokens` than `max_new_tokens`, a forced
                index that is not reached, two forced tokens in one place, a forced token that is forbidden or that
                stops too early, a stop token that is forbidden, and a vocabulary that is forbidden as a whole.
        """
        forced = {"forced_tokens": [token for _, token in self.forced_tokens]}
        forbidden = {"forbidden_tokens": [token for ids in self.forbidden_tokens for token in ids]}
        for name, ids in {"stop_tokens": stop_tokens, **forbidden, **forced}.items():
            outside = [token for token in ids if not 0 <= token < vocabulary_size]
            if outside:
                raise ValueError(
                    f"`{name}` must be ids in [0, {vocabulary_size}), the vocabulary. Received: {outside[0]} in {name}"
                )
        if self.min_new_tokens > max_new_tokens:
            raise ValueError(
                "`min_new_tokens` must not be above `max_new_tokens`. Received: "
                f"min_new_tokens={self.min_new_tokens}, max_new_tokens={max_new_tokens}"
            )
        single = {ids[0] for ids in self.forbidden_tokens if len(ids) == 1}
        both = sorted(single & set(stop_tokens))
        if both:
            raise ValueError(
                "`forbidden_tokens` must not hold a stop token; to go on up to the limit, set `min_new_tokens` to it. "
                f"Received: {both[0]} in both"
            )
        closed = single | (set(stop_tokens) if self.min_new_tokens else set())
        if len(closed) == vocabulary_size:
            raise ValueError(
                "`forbidden_tokens` must leave a token to choose. Received: all of "
                f"vocabulary_size={vocabulary_size} forbidden, stop tokens among them before `min_new_tokens`"
            )
        self._check_forced(max_new_tokens, single, stop_tokens)

    def _check_forced(self, max_new_tokens, single, stop_tokens):
        places = dict(self.forced_tokens)
        for index, token in self.forced_tokens:
            received = f"Received: forced_tokens={places}"
            if index >= max_new_tokens:
                raise ValueError(
                    "Indices of `forced_tokens` must be below `max_new_tokens`. "
                    f"{received}, max_new_tokens={max_new_tokens}"
                )
            if index == max_new_tokens - 1 and places.get(-1, token) != token:
                raise ValueError(
                    "`forced_tokens` must not give two tokens for one place, where -1 is the last. "
                    f"{received}, max_new_tokens={max_new_tokens}"
                )
            if token in single:
                raise ValueError(f"`forced_tokens` must not be in `forbidden_tokens`. {received}, {token} in both")
            if token in stop_tokens and 0 <= index < self.min_new_tokens:
                raise ValueError(
                    "`forced_tokens` must not hold a stop token at an index below `min_new_tokens`. "
                    f"{received}, min_new_tokens={self.min_new_tokens}"
                )


def _is_integer(value, least):
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= least


def _sequences(forbidden):
    """Ids and sequences of ids -> a tuple of tuples of ids."""
    items = list(forbidden) if isinstance(forbidden, Iterable) else [forbidden, ()]
    found = [(item,) if _is_integer(item, 0) else tuple(item) if isinstance(item, Iterable) else () for item in items]
    if not all(ids and all(_is_integer(token, 0) for token in ids) for ids in found):
        raise ValueError(
            "The argument `forbidden_tokens` must hold ids of at least 0 and sequences of them. Received: "
            f"forbidden_tokens={forbidden!r}"
        )
    return tuple(tuple(int(token) for token in ids) for ids in found)


def _pairs(forced):
    """{index: id}, pairs of them, or None -> a sorted tuple of pairs."""
    if forced is None:
        return ()
    items = list(forced.items() if isinstance(forced, Mapping) else forced)
    pairs = all(isinstance(item, tuple) and len(item) == 2 for item in items)
    if not pairs or not all(_is_integer(index, -1) and _is_integer(token, 0) for index, token in items):
        raise ValueError(
            "The argument `forced_tokens` must map indices of at least -1 to ids of at least 0. Received: "
            f"forced_tokens={forced!r}"
        )
    return tuple(sorted((int(index), int(token)) for index, token in items))


def _among(ids, counted, size):
    """(R, V), True at those of `ids` (R, N) of which `counted` (R, N) is True. Ids outside the vocabulary never are."""
    counted = ops.logical_and(counted, ops.logical_and(ids >= 0, ids < size))
    row = ops.broadcast_to(ops.arange(ops.shape(ids)[0], dtype="int32")[:, None], ops.shape(ids))
    places = ops.stack([row, ops.where(counted, ids, 0)], axis=-1)
    counts = ops.scatter(
        ops.reshape(places, (-1, 2)), ops.reshape(ops.cast(counted, "float32"), (-1,)), (ops.shape(ids)[0], size)
    )
    return counts > 0


def _last(state, count):
    """The last `count` ids of each row, (R, count); `_NO_TOKEN` where there is none."""
    places = state["slot"] - count + ops.arange(count, dtype="int32")
    inside = ops.maximum(places, 0)
    real = ops.logical_and(ops.take(state["real"], inside, axis=1), places >= 0)
    return ops.where(real, ops.take(state["ids"], inside, axis=1), _NO_TOKEN)


def _repeats(state, length, size):
    """(R, V), True at tokens that would complete a sequence of `length` tokens that the row already holds."""
    ids = ops.where(state["real"], state["ids"], _NO_TOKEN)
    last = _last(state, length - 1)
    counted = state["real"][:, length - 1 :]
    for place in range(length - 1):  # whether the sequence that begins in each slot begins as the row ends
        same = ids[:, place : place - length + 1] == last[:, place : place + 1]
        counted = ops.logical_and(counted, same)
    return _among(ids[:, length - 1 :], counted, size)

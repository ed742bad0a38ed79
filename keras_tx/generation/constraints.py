"""Constraints on generated text: scores (R, V) -> scores (R, V), minus infinity where a token is forbidden.

R rows, L slots, N ids, V vocabulary. The rules, and the order in which they apply, are those of the logits processors
of transformers, except that they ignore the padding of a prompt: it is not penalized, n-grams do not cross it, and
forbidden sequences do not begin in it. Repetition penalty: Keskar et al. 2019, arXiv:1909.05858.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation.state import State, as_int32
from keras_tx.types import Tensor

_FORBIDDEN = -float("inf")
_NO_TOKEN = -1  # differs from every id


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Rules for generated tokens: a function of scores (R, V), a state and the stop tokens. Immutable.

    Args:
        repetition_penalty: above 1 makes tokens that the row contains already less likely: positive scores are divided
            by it, negative ones are multiplied by it.
        no_repeat_ngram_size: no sequence of this many tokens is generated twice; 0 for no such rule.
        min_new_tokens: no stop token before this many tokens are generated.
        forbidden_tokens: ids, and sequences of ids, that must not be generated. The last id of a sequence is forbidden
            wherever the row ends with those before it.
        forced_tokens: {index: id}, the generated tokens at these indices; -1 is the last token at `max_new_tokens`.
            They override all other rules, and their score is 0.
        renormalize_logits: return log-probabilities that are normalized over the remaining tokens; this only changes
            the scores of `Beam`.

    Raises:
        ValueError: for values out of range, ids that are not non-negative integers, and two forced tokens at one index.
    """

    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    forbidden_tokens: Any = ()
    forced_tokens: Any = None
    renormalize_logits: bool = False

    def __post_init__(self) -> None:
        checks.positive_float("repetition_penalty", self.repetition_penalty)
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            if not _is_integer(getattr(self, name), 0):
                raise ValueError(
                    f"The argument `{name}` must be an integer of at least 0. Received: {name}={getattr(self, name)!r}"
                )
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "repetition_penalty", float(self.repetition_penalty))
        object.__setattr__(self, "renormalize_logits", bool(self.renormalize_logits))
        object.__setattr__(self, "forbidden_tokens", _sequences(self.forbidden_tokens))
        object.__setattr__(self, "forced_tokens", _pairs(self.forced_tokens))

    def __call__(self, scores: Tensor, state: State, stop_tokens: tuple[int, ...]) -> Tensor:
        size = scores.shape[-1]
        if self.repetition_penalty != 1:
            penalized = ops.where(scores < 0, scores * self.repetition_penalty, scores / self.repetition_penalty)
            scores = ops.where(_contains(state["ids"], state["real"], size), penalized, scores)
        for forbidden in self._forbidden_masks(state, stop_tokens, size):
            scores = ops.where(forbidden, _FORBIDDEN, scores)
        if self.forced_tokens:
            forced = as_int32(_NO_TOKEN)
            for index, token in self.forced_tokens:
                is_here = state["step"] == (state["limit"] - 1 if index == -1 else index)
                forced = ops.where(is_here, token, forced)
            forced = ops.reshape(forced, (-1, 1))  # (R, 1) if each row has its own limit
            is_forced = ops.arange(size, dtype="int32") == forced
            only_forced = ops.where(
                is_forced, ops.zeros_like(scores), _FORBIDDEN
            )  # two numbers would be of Keras' floatx
            scores = ops.where(forced == _NO_TOKEN, scores, only_forced)
        if not self.renormalize_logits:
            return scores
        # Of a row without an allowed token the logarithm would be NaN, which no comparison ranks.
        is_open = ops.any(scores > _FORBIDDEN, axis=-1, keepdims=True)
        return ops.where(is_open, ops.log_softmax(scores, axis=-1), scores)

    def _forbidden_masks(self, state: State, stop_tokens: tuple[int, ...], size: int) -> list[Tensor]:
        """Masks, broadcastable to (R, V), of the tokens that must not come next."""
        masks = []
        if self.no_repeat_ngram_size:
            masks.append(_repeats(state, self.no_repeat_ngram_size, size))
        single = [ids[0] for ids in self.forbidden_tokens if len(ids) == 1]
        if single:
            masks.append(ops.convert_to_tensor(np.isin(np.arange(size), single)))
        for length in sorted({len(ids) for ids in self.forbidden_tokens} - {1}):
            sequences = np.array([ids for ids in self.forbidden_tokens if len(ids) == length], "int32")  # (N, length)
            begun = ops.all(last_ids(state, length - 1)[:, None] == ops.convert_to_tensor(sequences[:, :-1]), axis=-1)
            last = ops.broadcast_to(ops.convert_to_tensor(sequences[:, -1]), ops.shape(begun))
            masks.append(_contains(last, begun, size))
        if self.min_new_tokens and stop_tokens:
            stops = ops.convert_to_tensor(np.isin(np.arange(size), stop_tokens))
            masks.append(ops.logical_and(stops, state["step"] < self.min_new_tokens))
        return masks

    @property
    def least_new_tokens(self) -> int:
        """The smallest `max_new_tokens` with which all rules can be kept."""
        forced = dict(self.forced_tokens)
        least = max(1, self.min_new_tokens, *[index + 1 for index in forced])
        two_at_one_index = -1 in forced and forced.get(least - 1, forced[-1]) != forced[-1]
        return int(least + two_at_one_index)

    def check(self, max_new_tokens: int, vocabulary_size: int, stop_tokens: tuple[int, ...]) -> None:
        """Raises for rules that cannot be kept.

        Raises:
            ValueError: for an id outside the vocabulary, more `min_new_tokens` than `max_new_tokens`, a forced index
                that is not reached, two forced tokens at one index, a forced token that is forbidden or that stops too
                early, a forbidden stop token, and a vocabulary without an allowed token.
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
        excluded = single | (set(stop_tokens) if self.min_new_tokens else set())
        if len(excluded) == vocabulary_size:
            raise ValueError(
                "`forbidden_tokens` must leave a token to choose. Received: all of "
                f"vocabulary_size={vocabulary_size} forbidden, stop tokens among them before `min_new_tokens`"
            )
        self._check_forced(max_new_tokens, single, stop_tokens)

    def _check_forced(self, max_new_tokens: int, forbidden: set[int], stop_tokens: tuple[int, ...]) -> None:
        forced = dict(self.forced_tokens)
        for index, token in self.forced_tokens:
            received = f"Received: forced_tokens={forced}"
            if index >= max_new_tokens:
                raise ValueError(
                    "Indices of `forced_tokens` must be below `max_new_tokens`. "
                    f"{received}, max_new_tokens={max_new_tokens}"
                )
            if index == max_new_tokens - 1 and forced.get(-1, token) != token:
                raise ValueError(
                    "`forced_tokens` must not have two tokens for one index, where -1 is the last. "
                    f"{received}, max_new_tokens={max_new_tokens}"
                )
            if token in forbidden:
                raise ValueError(f"`forced_tokens` must not be in `forbidden_tokens`. {received}, {token} in both")
            if token in stop_tokens and 0 <= index < self.min_new_tokens:
                raise ValueError(
                    "`forced_tokens` must not hold a stop token at an index below `min_new_tokens`. "
                    f"{received}, min_new_tokens={self.min_new_tokens}"
                )


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _sequences(forbidden: Any) -> tuple[tuple[int, ...], ...]:
    """Ids and sequences of ids -> a tuple of tuples of ids."""
    found = [(item,) if _is_integer(item, 0) else _items(item) for item in _items(forbidden, none=[None])]
    if not all(ids and all(_is_integer(token, 0) for token in ids) for ids in found):
        raise ValueError(
            "The argument `forbidden_tokens` must hold ids of at least 0 and sequences of them. Received: "
            f"forbidden_tokens={forbidden!r}"
        )
    return tuple(tuple(int(token) for token in ids) for ids in found)


def _items(value: Any, none: Any = ()) -> Any:
    """`value` as a tuple of its items, or `none` if it is not iterable, such as a number or an array of shape ()."""
    try:
        return tuple(value)
    except TypeError:
        return none


def _pairs(forced: Any) -> tuple[tuple[int, int], ...]:
    """{index: id}, pairs of them, or None -> a sorted tuple of pairs."""
    if forced is None:
        return ()
    items = list(forced.items() if isinstance(forced, Mapping) else forced)
    are_pairs = all(isinstance(item, tuple) and len(item) == 2 for item in items)
    if not are_pairs or not all(_is_integer(index, -1) and _is_integer(token, 0) for index, token in items):
        raise ValueError(
            "The argument `forced_tokens` must map indices of at least -1 to ids of at least 0. Received: "
            f"forced_tokens={forced!r}"
        )
    pairs = sorted({(int(index), int(token)) for index, token in items})
    if len(dict(pairs)) < len(pairs):
        raise ValueError(
            f"The argument `forced_tokens` must not have two tokens for one index. Received: forced_tokens={forced!r}"
        )
    return tuple(pairs)


def _contains(ids: Tensor, counted: Tensor, size: int) -> Tensor:
    """(R, V), True at the ids (R, N) whose `counted` (R, N) is True. Ids outside the vocabulary are ignored."""
    counted = ops.logical_and(counted, ops.logical_and(ids >= 0, ids < size))
    row = ops.broadcast_to(ops.arange(ops.shape(ids)[0], dtype="int32")[:, None], ops.shape(ids))
    places = ops.stack([row, ops.where(counted, ids, 0)], axis=-1)
    counts = ops.scatter(
        ops.reshape(places, (-1, 2)), ops.reshape(ops.cast(counted, "float32"), (-1,)), (ops.shape(ids)[0], size)
    )
    return counts > 0


def last_ids(state: State, count: int) -> Tensor:
    """The last `count` ids of each row, (R, count); `_NO_TOKEN` where the row has fewer."""
    slots = state["slot"] - count + ops.arange(count, dtype="int32")
    clipped = ops.maximum(slots, 0)
    real = ops.logical_and(ops.take(state["real"], clipped, axis=1), slots >= 0)
    return ops.where(real, ops.take(state["ids"], clipped, axis=1), _NO_TOKEN)


def _repeats(state: State, length: int, size: int) -> Tensor:
    """(R, V), True at tokens that would complete a sequence of `length` tokens that the row already contains."""
    ids = ops.where(state["real"], state["ids"], _NO_TOKEN)
    last = last_ids(state, length - 1)
    is_repeat = state["real"][:, length - 1 :]
    for i in range(length - 1):  # the sequence from a slot on must begin with the last tokens of the row
        same = ids[:, i : i - length + 1] == last[:, i : i + 1]
        is_repeat = ops.logical_and(is_repeat, same)
    return _contains(ids[:, length - 1 :], is_repeat, size)

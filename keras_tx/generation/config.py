"""The checked options of `generate` that do not depend on the inputs: strategy, constraints, special tokens."""

from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from keras_tx import checks
from keras_tx.generation.analysed import analysed
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.decode_loop import DecodeLoop
from keras_tx.generation.greedy import Greedy
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.speculative import Speculative
from keras_tx.generation.speculative_loop import SpeculativeLoop
from keras_tx.generation.strategy import Strategy
from keras_tx.internals.keras_jax_steps import sync_variables

MOST_NEW_TOKENS = 2**30  # rounded up to a power of two, the number of slots must fit into int32


class GenerationConfig:
    """The options of `generate` for a model, with the defaults that a tokenizer gives.

    Args:
        model: `IncrementalModel` of the model that generates.
        strategy: `Greedy()` if None.
        tokenizer: its `cls_id` and `sep_id` are the defaults of `start_token` and `stop_tokens`. Ids of the model that
            it lacks are forbidden, as are those that have no row in the embedding of the target.
        others: see `keras_tx.generation.generate`.

    Attributes:
        draft: `IncrementalModel` of the draft model of a `Speculative` strategy, or None.

    Raises:
        TypeError: for a strategy that is not a `Strategy`, or cannot be hashed.
        ValueError: for values out of range, ids outside the vocabulary, contradictory constraints, and a draft model
            that does not fit the model.
    """

    def __init__(
        self,
        model: IncrementalModel,
        strategy: Strategy | None = None,
        tokenizer: Any = None,
        *,
        max_new_tokens: int,
        min_new_tokens: int = 0,
        stop_tokens: Any = None,
        start_token: Any = None,
        repetition_penalty: float = 1.0,
        no_repeat_ngram_size: int = 0,
        forbidden_tokens: Any = (),
        forced_tokens: Any = None,
        renormalize_logits: bool = False,
    ):
        self.max_new_tokens: int = checks.positive_int("max_new_tokens", max_new_tokens, most=MOST_NEW_TOKENS)
        self.model = model
        self.strategy = _checked_strategy(Greedy() if strategy is None else strategy)
        if isinstance(self.strategy, Speculative):
            model.check_drafts()
        self.draft = _checked_draft(self.strategy, model)
        if start_token is None:
            start_token = getattr(tokenizer, "cls_id", None)
        self.start_token = None if start_token is False else _checked_start(start_token, model.target_vocabulary_size)
        stop_tokens = getattr(tokenizer, "sep_id", None) if stop_tokens is None else stop_tokens
        self.stop_tokens = _ids("stop_tokens", () if stop_tokens is None else _checked_stop(stop_tokens))
        self.padding_id = model.padding_ids[model.target] or 0
        self.constraints = Constraints(
            repetition_penalty=repetition_penalty,
            no_repeat_ngram_size=no_repeat_ngram_size,
            min_new_tokens=min_new_tokens,
            forbidden_tokens=forbidden_tokens,
            forced_tokens=forced_tokens,
            renormalize_logits=renormalize_logits,
        )
        self.constraints = self._without_unknown_ids(tokenizer)
        self.constraints.check(self.max_new_tokens, model.vocabulary_size, self.stop_tokens)

    def _without_unknown_ids(self, tokenizer: Any) -> Constraints:
        """The constraints, which also forbid the ids that the tokenizer or the embedding of the target lacks.

        Vocabularies of models, or of their output alone, are often padded to a multiple of 64 or 128.
        """
        size, embedded = self.model.vocabulary_size, self.model.target_vocabulary_size
        forced = self.constraints.forced_tokens
        asked_for = {*self.stop_tokens, *[token for _, token in forced]}
        without_row = [token for token in sorted(asked_for.difference(self.stop_tokens)) if embedded <= token < size]
        if without_row:
            raise ValueError(
                f"`forced_tokens` must be ids in [0, {embedded}), which have a row in the embedding of the target, or "
                f"stop tokens. Received: {without_row[0]} in forced_tokens"
            )
        known = getattr(tokenizer, "vocabulary_size", None)  # of other packages' tokenizers it may be a method
        first = min(known, embedded) if isinstance(known, Integral) else embedded
        more = [token for token in range(first, size) if token not in asked_for]
        if not more:
            return self.constraints
        forbidden = [*self.constraints.forbidden_tokens, *more]
        return replace(self.constraints, forbidden_tokens=forbidden, forced_tokens=forced)

    def decode_loop(self, num_new: int, strategy: Strategy | None = None) -> DecodeLoop:
        """The `DecodeLoop` for at most `num_new` tokens, with another strategy if one is given."""
        strategy = self.strategy if strategy is None else strategy
        options = (self.constraints, self.stop_tokens, self.padding_id, num_new)
        if isinstance(strategy, Speculative):
            return SpeculativeLoop(self.model, strategy, *options, self.draft)
        return DecodeLoop(self.model, strategy, *options)

    def target_start(self) -> int:
        """The id that a target begins with; raises ValueError if there is none."""
        if self.start_token is None:
            raise ValueError("`start_token` must be given: the id that begins a target. Received: start_token=None")
        return self.start_token


def _checked_start(start_token: Any, vocabulary_size: int) -> int | None:
    if start_token is None:
        return None
    start = _ids("start_token", start_token)
    if len(start) != 1 or not 0 <= start[0] < vocabulary_size:
        raise ValueError(
            f"`start_token` must be an id in [0, {vocabulary_size}). Received: start_token={start_token!r}"
        )
    return start[0]


def _checked_stop(stop_tokens: Any) -> Any:
    stop_tokens = sorted(stop_tokens) if isinstance(stop_tokens, (set, frozenset)) else stop_tokens
    if isinstance(stop_tokens, (list, tuple)):
        is_nested = any(isinstance(one, (list, tuple)) or np.ndim(one) > 0 for one in stop_tokens)
    else:
        is_nested = np.ndim(stop_tokens) > 1
    if is_nested:
        raise ValueError(
            "`stop_tokens` must be an id or a flat list of ids; sequences of ids are not supported. Received: "
            f"stop_tokens={stop_tokens!r}"
        )
    return stop_tokens


def _checked_strategy(strategy: Any) -> Strategy:
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "`strategy` must be `Greedy()`, `Sample()`, `Beam()` or another `Strategy`. Received: "
            f"strategy={strategy!r}"
        )
    try:
        hash(strategy)
    except TypeError as error:
        raise TypeError(
            "`strategy` must be hashable, for example a frozen dataclass of hashable values. Received: "
            f"strategy={strategy!r}"
        ) from error
    return strategy


def _checked_draft(strategy: Strategy, model: IncrementalModel) -> IncrementalModel | None:
    """The `IncrementalModel` of the draft model of a strategy, if it has one. It must be able to follow `model`."""
    given = strategy.draft_model if isinstance(strategy, Speculative) else None
    if given is None:
        return None
    sync_variables(given)
    draft = analysed(given._generation_model() if hasattr(given, "_generation_model") else given, None)[0]
    sizes = [draft.vocabulary_size, model.vocabulary_size]
    if sizes[0] == sizes[1]:
        sizes = [draft.target_vocabulary_size, model.target_vocabulary_size]
    if sizes[0] < sizes[1] or draft.vocabulary_size != model.vocabulary_size:
        raise ValueError(
            "`draft_model` must have the vocabulary of the model, the same ids for the same tokens. Received: a "
            f"vocabulary of {sizes[0]} in the draft model, {sizes[1]} in the model"
        )
    sources = [[(one.vocabulary_sizes[name], one.padding_ids[name]) for name in one.sources] for one in (draft, model)]
    if sources[0] and sources[0] != sources[1]:
        raise ValueError(
            "`draft_model` must have no sources, or as many as the model, with the same vocabulary sizes and padding "
            f"ids. Received: (vocabulary size, padding id) of sources {sources[0]} in the draft model, {sources[1]} in "
            "the model"
        )
    limits = [(draft.max_length, model.max_length)]
    if sources[0]:
        limits.append((draft.max_source_length, model.max_source_length))
    for of_draft, of_model in limits:
        if of_draft is not None and (of_model is None or of_draft < of_model):
            raise ValueError(
                "`draft_model` must have as many learned positions as the model, or none. Received: "
                f"max_length={of_draft} in the draft model, {of_model} in the model"
            )
    return draft


def _ids(name: str, ids: Any) -> tuple[int, ...]:
    """An id, or several -> a tuple."""
    array = np.ravel(ids)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers. Received: {name}={ids!r}")
    return tuple(int(token) for token in array)

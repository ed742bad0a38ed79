"""One call of `generate` or `stream`: inputs -> prompts and sources -> compiled loop -> results like the inputs.

B prompts, P tokens of a prompt, S source tokens, n results for each prompt, M new tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation.analysed import analysed
from keras_tx.generation.beside import array_beside, real_tokens
from keras_tx.generation.compiled_loop import CompiledDecodeLoop
from keras_tx.generation.config import MOST_NEW_TOKENS, GenerationConfig
from keras_tx.generation.decode_loop import Context
from keras_tx.generation.model_checks import has_two_vocabularies
from keras_tx.generation.prompts import (
    RealRows,
    TextPieces,
    as_rows,
    as_strings,
    bucketed,
    check_concrete,
    is_text,
    of_sides,
    padded,
    until_stop,
)
from keras_tx.generation.speculative import without_drafts
from keras_tx.generation.state import State
from keras_tx.internals.keras_jax_steps import sync_variables
from keras_tx.locks import lock_of
from keras_tx.text.compatibility import check_fits
from keras_tx.types import Tensor

_MOST = 2**31  # what inputs beside ids are below: there is no other limit


class GenerationRequest:
    """The inputs of one call as arrays, and the compiled loop for them. See `generate` for the arguments."""

    def __init__(
        self,
        model: Any,
        inputs: Any,
        strategy: Any,
        *,
        tokenizer: Any,
        source_tokenizer: Any,
        max_new_tokens: int,
        target: str | None,
        jit_compile: bool,
        **options: Any,
    ):
        # Before the model is analysed:
        checks.positive_int("max_new_tokens", max_new_tokens, most=MOST_NEW_TOKENS)
        check_concrete(inputs)
        _check_tokenizer(tokenizer)
        sync_variables(model)
        model = model._generation_model() if hasattr(model, "_generation_model") else model
        self.model, loops = analysed(model, target)
        self.config = GenerationConfig(self.model, strategy, tokenizer, max_new_tokens=max_new_tokens, **options)
        if source_tokenizer is not None and not self.model.sources:
            raise ValueError(
                "`source_tokenizer` is only for models with sources. Received: source_tokenizer of type "
                f"{type(source_tokenizer).__name__}, a model without sources"
            )
        if source_tokenizer is not None and not callable(source_tokenizer):
            raise TypeError(
                f"`source_tokenizer` must be callable with texts. Received: source_tokenizer={source_tokenizer!r}"
            )
        self.tokenizer, self.source_tokenizer = of_sides(tokenizer, source_tokenizer, self.model.sources)
        self._given_source_tokenizer = source_tokenizer
        self._read_inputs(inputs)
        start_token = options.get("start_token")
        if self.begins_with_ids and start_token is not None and start_token is not False:
            raise ValueError(
                "`start_token` must be None for prompts that are ids: write it at the beginning of each. Received: "
                f"start_token={start_token!r}"
            )
        self._check_length()
        config, jit_compile = self.config, bool(jit_compile)
        self.limit = ops.convert_to_tensor(config.max_new_tokens, "int32")
        num_new = bucketed(config.max_new_tokens)
        # `config.draft` is another one if the draft model has other variables now.
        rules = (config.strategy, config.draft, config.constraints, config.stop_tokens, config.padding_id)
        key = (*rules, num_new, jit_compile)
        models = [model] if config.draft is None else [model, config.draft.model]
        if key not in loops:
            with lock_of(model):  # which a thread that compiles holds: the others go on with what is compiled already
                if key not in loops:
                    loops[key] = CompiledDecodeLoop(config.decode_loop(num_new), models, jit_compile)
        # The loop's own strategy is equal to the one given here, which alone has the seed.
        self.loop, self.strategy = loops[key], config.strategy

    def _read_inputs(self, inputs: Any) -> None:
        """Sets `prompts`, rows of ids, and `sources`, rows of ids for each other input of the model."""
        model, self.is_text, self.begins_with_ids = self.model, False, False
        named = dict(inputs) if isinstance(inputs, dict) else {(model.sources or [model.target])[0]: inputs}
        missing = [name for name in model.sources if name not in named]
        if missing or not set(named) & set(model.inputs):
            received = sorted(named, key=str)
            raise ValueError(f"`inputs` must have {model.sources or model.inputs}. Received: {received}")
        unknown = sorted(set(named) - set(model.inputs), key=str)
        if unknown:
            raise ValueError(
                f"`inputs` must have only the inputs that `generate` reads, {model.inputs}. Received: also {unknown}"
            )
        self.is_array = all(_is_array(x) for x in named.values())
        rows_of = {
            name: self._read_rows(name, named[name], keep_padding=name in model.joined)
            for name in model.inputs
            if name in named
        }
        self.is_single = all(is_single for _, is_single in rows_of.values())
        counts = {name: len(rows) for name, (rows, _) in rows_of.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"All `inputs` must have the same number of rows. Received: {counts}")
        self.sources = {name: rows_of[name][0] for name in model.sources}
        owners = {beside.source for beside in model.beside.values()} | model.joined.keys()
        given = {
            name: rows_of[name][0] if name in model.joined else self._read_rows(name, named[name], keep_padding=True)[0]
            for name in owners
        }
        self.real = {}
        for name in owners:
            group = model.joined.get(name, [name])
            self.real[name] = real_tokens({one: given[one] for one in group}, model.padding_ids)
        for name in model.joined:  # tokens stay beside those that the model adds them to
            self.sources[name] = [row[real] for row, real in zip(given[name], self.real[name], strict=True)]
        if model.target in rows_of:
            self.prompts = rows_of[model.target][0]
            self.begins_with_ids = not is_text(named[model.target])
            self.width = (
                named[model.target].shape[-1] if self.is_array and not self.is_text else 0
            )  # the number of columns of the array
        else:
            self.prompts = [np.array([self.config.target_start()], "int32")] * next(iter(counts.values()))

    def _read_rows(self, name: str, inputs: Any, *, keep_padding: bool = False) -> tuple[list[np.ndarray], bool]:
        """The rows of ids of one input, and whether it was a single text or row."""
        padding_id = None if keep_padding else self.model.padding_ids[name]
        vocabulary_size = self.model.vocabulary_sizes[name] or self.model.vocabulary_size
        if name in self.model.beside:
            if is_text(inputs):
                raise ValueError(
                    f"`{name}` must have a number for each token of `{self.model.beside[name].source}`. Received: "
                    f"texts, {name}={inputs!r}"
                )
            vocabulary_size = _MOST
        if not is_text(inputs):
            is_target = bool(self.model.sources) and name == self.model.target
            return as_rows(name, inputs, padding_id, vocabulary_size, is_target=is_target)
        if self.tokenizer is None:
            raise ValueError(f"`tokenizer` must be given for texts. Received: tokenizer=None, {name}={inputs!r}")
        self.is_text = True
        texts, is_single = as_strings(inputs)
        if name != self.model.target:
            if has_two_vocabularies(self.model, self._given_source_tokenizer):
                self._check_sizes(name)
            rows = self._source_ids(texts)
        else:
            start = [] if self.config.start_token is None else [self.config.start_token]
            tokens = _as_lists(self.tokenizer.tokenize(texts))
            # The start token may have the padding id.
            rows = RealRows(np.asarray(start + [token for token in row if token != padding_id]) for row in tokens)
        return as_rows(name, rows, padding_id, vocabulary_size)[0], is_single

    def _source_ids(self, texts: list[str]) -> Any:
        """The ids (B, S) of texts, with special tokens and padding."""
        tokenizer = self.source_tokenizer
        encoded = tokenizer(texts) if callable(tokenizer) else None
        if not isinstance(encoded, Mapping) or "token_ids" not in encoded:
            name = "tokenizer" if self._given_source_tokenizer is None else "source_tokenizer"
            received = f"a call that returned {encoded!r:.200}" if callable(tokenizer) else f"{name}={tokenizer!r}"
            raise TypeError(
                f'`{name}` must be callable for sources that are texts, and return a dict with "token_ids". Received: '
                f"{received}"
            )
        return ops.convert_to_numpy(encoded["token_ids"])

    def _check_sizes(self, source: str) -> None:
        """Raises if the tokenizers of two vocabularies have more tokens than the model, as if they were swapped."""
        given = {self.model.target: ("tokenizer", self.tokenizer), source: ("source_tokenizer", self.source_tokenizer)}
        for name, (argument, tokenizer) in given.items():
            if hasattr(tokenizer, "vocabulary_size"):
                size = self.model.vocabulary_sizes[name] or self.model.vocabulary_size
                check_fits(tokenizer, size, tokenizer_name=argument, input_name=name)

    def _check_length(self) -> None:
        longest, max_length = max(len(row) for row in self.prompts), self.model.max_length
        if max_length is not None and longest + self.config.max_new_tokens > max_length:
            raise ValueError(
                "`max_new_tokens` and the prompt must fit into the learned positions. Received: "
                f"max_new_tokens={self.config.max_new_tokens}, a prompt of {longest}, max_length={max_length}"
            )

    def prefill(self) -> tuple[State, Tensor, Context]:
        """Runs the prefill on the prompts: the state, the first new tokens, and the context of the decode steps."""
        length = bucketed(max(len(row) for row in self.prompts))
        real = padded([np.ones_like(row) for row in self.prompts], length, 0, left=True).astype(bool)
        ids = padded(self.prompts, length, self.config.padding_id, left=True)
        noise: Any = self.strategy.noise(len(self.prompts), self.loop.num_new)
        noise = noise if noise is None else ops.convert_to_tensor(noise, "float32")
        sources = [ops.convert_to_tensor(self._source_array(name)) for name in self.model.sources]
        arrays = [ops.convert_to_tensor(array) for array in (ids, real)]
        state, tokens, context = self.loop.prefill(*arrays, sources, self.limit, noise)
        return state, tokens, context

    def _source_array(self, name: str) -> np.ndarray:
        """(B, S), padded on the right."""
        if name in self.model.beside:
            beside = self.model.beside[name]
            width = self._source_array(beside.source).shape[1]
            return array_beside(name, self.sources[name], beside, self.real[beside.source], width)
        rows, padding_id, limit = self.sources[name], self.model.padding_ids[name], self.model.max_source_length
        longest = max(len(row) for row in rows)
        if limit is not None and longest > limit:
            raise ValueError(
                f"`{name}` must fit into the learned positions. Received: {name} of length {longest}, "
                f"max_length={limit}"
            )
        if all(self.model.padding_ids[one] is None for one in self.model.joined.get(name, [name])):
            if len({len(row) for row in rows}) > 1:
                raise ValueError(
                    f"`{name}` must have rows of the same length: its embedding has no `padding_id`. Received: lengths "
                    f"{sorted({len(row) for row in rows})}"
                )
            return padded(rows, longest, 0, left=False)
        length = bucketed(longest) if self.model.buckets_sources else longest
        return padded(rows, length if limit is None else min(length, limit), padding_id or 0, left=False)

    def run(self) -> tuple[Any, Any]:
        """What `generate` returns, and the scores."""
        state, tokens, context = self.prefill()
        state, _, _ = self.loop.decode(state, tokens, context, self.limit)
        self._check_state(state)
        ids, scores = (ops.convert_to_numpy(x) for x in self.loop.strategy.result(state))
        return self._answers(ids[:, :, : self.config.max_new_tokens]), self._in_form_of_inputs(scores)

    def stream(self) -> Iterator[Any]:
        """What `stream` yields."""
        state, tokens, context = self.prefill()
        count, pieces = 0, TextPieces(self._prompt_texts() if self.is_text else [])
        while True:
            self._check_state(state)
            new = ops.convert_to_numpy(state["ids"])[:, -self.loop.num_new :]
            is_running = bool(ops.convert_to_numpy(self.strategy.is_running(state)))
            known, count = count, int(ops.convert_to_numpy(state["step"]))
            for length in range(known + 1, count + 1):  # several if drafts were right
                is_last = not is_running and length == count
                if self.is_text:
                    texts = pieces.next([row[0] for row in self._texts(new[:, None, :length])], is_last=is_last)
                    yield texts[0] if self.is_single else texts
                else:
                    yield int(new[0, length - 1]) if self.is_single else new[:, length - 1]
            if not is_running:
                return
            until = ops.convert_to_tensor(count + 1, "int32")
            state, tokens, context = self.loop.decode(state, tokens, context, until)

    def _check_state(self, state: State) -> None:
        if bool(ops.convert_to_numpy(state["broken"])):
            size, last = self.model.target_vocabulary_size, ops.convert_to_numpy(state["ids"][:, -self.loop.num_new :])
            last = last[:, int(ops.convert_to_numpy(state["step"])) - 1]
            outside = last[(last < 0) | (last >= size)]
            if outside.size:
                name = type(without_drafts(self.strategy)).__name__
                raise ValueError(
                    f"`choose` of {name} must return ids in [0, {size}), the vocabulary. Received: {outside[0]}"
                )
            raise ValueError(
                "The logits of `model` must not be NaN, and the constraints must allow some token. Received: no token "
                f"to choose at the new token {int(ops.convert_to_numpy(state['step']))}"
            )

    def _answers(self, ids: np.ndarray) -> Any:
        """New ids (B, n, M) -> what `generate` returns."""
        if self.is_text:
            return self._in_form_of_inputs(self._texts(ids))
        if not self.is_array:
            return self._in_form_of_inputs([[row.tolist() for row in rows] for rows in self._rows(ids)])
        longest = max(len(until_stop(row, self.config.stop_tokens)) for rows in ids for row in rows)
        ids = ids[:, :, :longest]
        if not self.model.sources:
            prompts = padded(self.prompts, self.width, self.config.padding_id, left=True)
            ids = np.concatenate([np.repeat(prompts[:, None], ids.shape[1], axis=1), ids], axis=2)
        return self._in_form_of_inputs(ids)

    def _rows(self, ids: np.ndarray) -> list[list[np.ndarray]]:
        """The n rows of each prompt up to the stop token; they begin with the prompt if there is no source."""
        prompts = [np.array([], "int32")] * len(ids) if self.model.sources else self.prompts
        return [
            [np.concatenate([prompt, until_stop(row, self.config.stop_tokens)]) for row in rows]
            for prompt, rows in zip(prompts, ids, strict=True)
        ]

    def _prompt_texts(self) -> list[str]:
        """The texts that the results begin with."""
        if self.model.sources:
            return [""] * len(self.prompts)
        return list(self.tokenizer.decode([row.tolist() for row in self.prompts]))

    def _texts(self, ids: np.ndarray) -> list[list[str]]:
        """The n texts of each prompt."""
        rows = self._rows(ids)
        texts = iter(self.tokenizer.decode([row.tolist() for prompt_rows in rows for row in prompt_rows]))
        return [[next(texts) for _ in prompt_rows] for prompt_rows in rows]

    def _in_form_of_inputs(self, answers: Any) -> Any:
        """Removes the axis of n results if n is 1, and the axis of prompts if there was a single prompt, not a list."""
        if len(answers[0]) == 1:
            answers = answers[:, 0] if hasattr(answers, "shape") else [rows[0] for rows in answers]
        return answers[0] if self.is_single else answers


def _check_tokenizer(tokenizer: Any) -> None:
    """Raises for an object that is not a tokenizer, also if the inputs are ids."""
    for method in ("tokenize", "decode") if tokenizer is not None else ():
        if not callable(getattr(tokenizer, method, None)):
            raise TypeError(f"`tokenizer` must have the method `{method}`. Received: tokenizer={tokenizer!r}")


def _is_array(inputs: Any) -> bool:
    """Whether `inputs` are an array or tensor of rows of one length, not a ragged tensor or an array of objects."""
    return hasattr(inputs, "shape") and str(inputs.dtype) != "object" and not hasattr(inputs, "to_list")


def _as_lists(rows: Any) -> Any:
    """Rows of ids as lists, from a ragged tensor or from lists."""
    return rows.to_list() if hasattr(rows, "to_list") else rows

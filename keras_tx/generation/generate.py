"""Generation, the face: text or ids in, the same out, by any functional model whose outputs are next-token logits.

B prompts, P tokens of a prompt, N new tokens.
"""

import inspect

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation.beam import Beam
from keras_tx.generation.config import GenerationConfig
from keras_tx.generation.decode_loop import CompiledDecodeLoop, bucket
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.prompts import Pieces, as_rows, as_strings, is_text, padded, until_stop


def generate(
    model,
    inputs,
    strategy=None,
    *,
    max_new_tokens,
    min_new_tokens=0,
    stop_tokens=None,
    start_token=None,
    tokenizer=None,
    source_tokenizer=None,
    repetition_penalty=1.0,
    no_repeat_ngram_size=0,
    forbidden_tokens=(),
    forced_tokens=None,
    renormalize_logits=False,
    return_scores=False,
    target=None,
    jit_compile=True,
):
    """Writes on from prompts, or writes the targets of sources.

    ```python
    generate(model, [[5, 7, 11], [5]], max_new_tokens=20)
    generate(translator, ["A dog runs."], Beam(5), max_new_tokens=40, tokenizer=tokenizer)
    ```

    The model runs once over the prompts and then once for each new token, on a KV cache. It may be of this package, or
    any functional model put together from `Decoder`, `DecoderLayer` or causal `MultiHeadAttention` and layers that
    treat each token by itself. Prompts and `max_new_tokens` are rounded up to powers of two for which everything is
    compiled once; the answers are not affected. Another strategy, constraint or number of prompts compiles anew.

    Args:
        model: functional; its output is logits (B, T, V).
        inputs: texts (`str`, or a list of them) with a `tokenizer`; or ids: (P,), (B, P), padding left out, or a
            list of rows of any lengths. For a model with a source (`Seq2Seq`) they are sources. A dict by the names of
            the model's inputs gives both sources and the beginning of the targets.
        strategy: `Greedy()` (the default), `Sample(...)` or `Beam(...)`.
        max_new_tokens: the most tokens to write.
        min_new_tokens: no stop token before so many.
        stop_tokens: an id, or several, that end a row; the tokenizer's `sep_id` if None and there is a tokenizer.
        start_token: the id that begins a target, or a text prompt; the tokenizer's `cls_id` if None; False for none.
        tokenizer: with `tokenize`, `decode` and, for sources, a call, as `keras_tx.text.BertTokenizer`.
        source_tokenizer: of the sources, where they have another vocabulary.
        repetition_penalty: divides (multiplies) positive (negative) scores of tokens already there; 1 does nothing.
        no_repeat_ngram_size: no so many tokens in a row appear twice; 0 allows all.
        forbidden_tokens: ids, or rows of ids, that are never written.
        forced_tokens: dict {index of the new token: id}; -1 is the last possible one.
        renormalize_logits: make log-probabilities of what these rules left, which changes what a `Beam` finds.
        return_scores: also return the score of each answer, (B,) or (B, n).
        target: the name of the input that grows, where the graph does not tell.
        jit_compile: whether TensorFlow compiles by XLA.

    Returns:
        Texts for texts, rows for rows, an array for an array. Of a model without sources, the prompts and what follows;
        of one with sources only what is new. A stop token is included in ids; in an array padding follows it. With
        `Beam(num_return_sequences=n)`, n > 1, a list (or an axis) of n for each prompt, best first.

    The padding id may be written like any token, as in transformers; `forbidden_tokens` keeps it out.

    Raises:
        ValueError: for an empty prompt, one that is all padding, ids outside the vocabulary, `max_new_tokens` that are
            not positive or beyond a table of learned positions, contradictory options, or logits that are NaN.
        TypeError: for a model that is not functional.
    """
    job = GenerationRequest(
        model,
        inputs,
        strategy,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_tokens=stop_tokens,
        start_token=start_token,
        tokenizer=tokenizer,
        source_tokenizer=source_tokenizer,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        forbidden_tokens=forbidden_tokens,
        forced_tokens=forced_tokens,
        renormalize_logits=renormalize_logits,
        target=target,
        jit_compile=jit_compile,
    )
    state, tokens, fixed = job.begin()
    state, _, _ = job.loop.go_on(state, tokens, fixed, job.limit)
    job.check(state)
    ids, scores = (ops.convert_to_numpy(x) for x in job.loop.strategy.result(state))
    answers = job.answer(ids[:, :, : job.max_new_tokens])
    return (answers, job.shaped(scores)) if return_scores else answers


def stream(model, inputs, strategy=None, **options):
    """Yields new tokens as they come: what `generate` returns behind the prompt, piece by piece.

    Args:
        model, inputs, strategy, options: as for `generate`, without `return_scores`; no `Beam`, whose beginning may
            change until the end.

    Yields:
        For one text a piece of text, for several a list of pieces; for one row of ids an integer, for several an array
        (B,), with the padding id behind the end of a row.

    Raises:
        ValueError: as `generate`, and for a strategy with beams.
    """
    given = inspect.signature(generate).bind(model, inputs, strategy, **options)
    given.apply_defaults()
    if given.arguments.pop("return_scores"):
        raise ValueError("`return_scores` is not for `stream`: a score is known at the end. Received: True")
    job = GenerationRequest(**given.arguments)
    if isinstance(job.strategy, Beam):
        raise ValueError(f"`strategy` must have no beams to be streamed. Received: strategy={strategy}")
    return job.stream()


class GenerationRequest:
    """One call of `generate`: the prompts as arrays, and the compiled loop for them."""

    def __init__(
        self, model, inputs, strategy, *, tokenizer, source_tokenizer, max_new_tokens, target, jit_compile, **rules
    ):
        checks.positive_int("max_new_tokens", max_new_tokens)
        model = model._generation_model() if hasattr(model, "_generation_model") else model
        self.steps, loops = _compiled_before(model, target)
        task = GenerationConfig(self.steps, strategy, tokenizer, max_new_tokens=max_new_tokens, **rules)
        self.task, self.max_new_tokens = task, task.max_new_tokens
        self.stop_tokens, self.padding_id = task.stop_tokens, task.padding_id
        self.tokenizer, self.source_tokenizer = tokenizer, source_tokenizer or tokenizer
        self._read(inputs)
        self._check_length()
        self.limit = ops.convert_to_tensor(max_new_tokens, "int32")
        num_new = bucket(max_new_tokens)
        key = (task.strategy, task.constraints, task.stop_tokens, task.padding_id, num_new, jit_compile)
        if key not in loops:
            loops[key] = CompiledDecodeLoop(task.search(num_new), model, jit_compile)
        self.loop, self.strategy = loops[key], task.strategy

    def _read(self, inputs):
        """Sets `rows`, the beginnings of what grows, and `sources`, the rows of each other input."""
        steps, self.as_text = self.steps, False
        named = dict(inputs) if isinstance(inputs, dict) else {(steps.sources or [steps.target])[0]: inputs}
        missing = [name for name in steps.sources if name not in named]
        if missing or not set(named) & set(steps.inputs):
            raise ValueError(f"`inputs` must have {steps.sources or steps.inputs}. Received: {sorted(named)}")
        self.as_array = all(hasattr(x, "shape") and str(x.dtype) != "object" for x in named.values())
        read = {name: self._rows(name, named[name]) for name in steps.inputs if name in named}
        self.one = all(one for _, one in read.values())
        counts = {name: len(rows) for name, (rows, _) in read.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"`inputs` must be equally many. Received: {counts}")
        self.sources = {name: read[name][0] for name in steps.sources}
        if steps.target in read:
            self.rows = read[steps.target][0]
        else:
            self.rows = [np.array(self.task.start_row(), "int32")] * next(iter(counts.values()))

    def _rows(self, name, inputs):
        vocabulary_size = self.steps.vocabulary_sizes[name] or self.steps.vocabulary_size
        if not is_text(inputs):
            return as_rows(name, inputs, self.steps.padding_ids[name], vocabulary_size)
        if self.tokenizer is None:
            raise ValueError(f"`tokenizer` must be given for texts. Received: tokenizer=None, {name}={inputs!r}")
        self.as_text = True
        texts, one = as_strings(inputs)
        if name != self.steps.target:
            rows = ops.convert_to_numpy(self.source_tokenizer(texts)["token_ids"])
        else:
            start = [] if self.task.start_token is None else [self.task.start_token]
            rows = [start + list(row) for row in _listed(self.tokenizer.tokenize(texts))]
        return as_rows(name, rows, self.steps.padding_ids[name], vocabulary_size)[0], one

    def _check_length(self):
        longest, limit = max(len(row) for row in self.rows), self.steps.max_length
        if limit is not None and longest + self.max_new_tokens > limit:
            raise ValueError(
                "`max_new_tokens` and the prompt must fit into the learned positions. Received: "
                f"max_new_tokens={self.max_new_tokens}, a prompt of {longest}, max_length={limit}"
            )

    def begin(self):
        """The prompts through the model: the state, the first new tokens, and what the loop needs."""
        length = bucket(max(len(row) for row in self.rows))
        real = padded([np.ones_like(row) for row in self.rows], length, 0, left=True).astype(bool)
        ids = padded(self.rows, length, self.padding_id, left=True)
        noise = self.strategy.noise(len(self.rows), self.loop.num_new)
        noise = noise if noise is None else ops.convert_to_tensor(noise, "float32")
        sources = [ops.convert_to_tensor(self._source(name)) for name in self.steps.sources]
        arrays = [ops.convert_to_tensor(array) for array in (ids, real)]
        return self.loop.begin(*arrays, sources, self.limit, noise)

    def _source(self, name):
        rows, padding_id, limit = self.sources[name], self.steps.padding_ids[name], self.steps.max_source_length
        longest = max(len(row) for row in rows)
        if limit is not None and longest > limit:
            raise ValueError(
                f"`{name}` must fit into the learned positions. Received: {name} of length {longest}, "
                f"max_length={limit}"
            )
        if padding_id is None:
            if len({len(row) for row in rows}) > 1:
                raise ValueError(
                    f"`{name}` must be of one length: its embedding has no `padding_id`. Received: lengths "
                    f"{sorted({len(row) for row in rows})}"
                )
            return padded(rows, longest, 0, left=False)
        length = bucket(longest)
        return padded(rows, length if limit is None else min(length, limit), padding_id, left=False)

    def check(self, state):
        if bool(ops.convert_to_numpy(state["broken"])):
            raise ValueError(
                "The logits must not be NaN, and some token must be allowed. Received: no token to choose at the new "
                f"token {int(ops.convert_to_numpy(state['step']))}"
            )

    def stream(self):
        state, tokens, fixed = self.begin()
        written = np.empty((len(self.rows), 0), "int32")
        pieces = Pieces(self._prompts() if self.as_text else [])
        while True:
            self.check(state)
            written = np.concatenate([written, ops.convert_to_numpy(tokens)[:, None]], axis=1)
            going = bool(ops.convert_to_numpy(self.strategy.going(state)))
            if self.as_text:
                texts = pieces.new_in([texts[0] for texts in self._texts(written[:, None])], last=not going)
                yield texts[0] if self.one else texts
            else:
                yield int(written[0, -1]) if self.one else written[:, -1]
            if not going:
                return
            state, tokens, fixed = self.loop.go_on(
                state, tokens, fixed, ops.convert_to_tensor(written.shape[1] + 1, "int32")
            )

    def answer(self, ids):
        """New ids (B, n, N) -> what `generate` returns."""
        if self.as_text:
            return self.shaped(self._texts(ids))
        if not self.as_array:
            return self.shaped([[row.tolist() for row in rows] for rows in self._whole(ids)])
        longest = max(len(until_stop(row, self.stop_tokens)) for rows in ids for row in rows)
        ids = ids[:, :, :longest]
        if not self.steps.sources:
            prompts = padded(self.rows, max(len(row) for row in self.rows), self.padding_id, left=True)
            ids = np.concatenate([np.repeat(prompts[:, None], ids.shape[1], axis=1), ids], axis=2)
        return self.shaped(ids)

    def _whole(self, ids):
        """For each prompt its n rows, up to the stop token; behind the prompt, where there is no source."""
        before = [np.array([], "int32")] * len(ids) if self.steps.sources else self.rows
        return [
            [np.concatenate([prompt, until_stop(row, self.stop_tokens)]) for row in rows]
            for prompt, rows in zip(before, ids, strict=True)
        ]

    def _prompts(self):
        """The texts that the answers begin with."""
        return [""] * len(self.rows) if self.steps.sources else self.tokenizer.decode([x.tolist() for x in self.rows])

    def _texts(self, ids):
        whole = self._whole(ids)
        texts = iter(self.tokenizer.decode([row.tolist() for rows in whole for row in rows]))
        return [[next(texts) for _ in rows] for rows in whole]

    def shaped(self, answers):
        """One answer for one prompt; one for each prompt where n is 1."""
        if len(answers[0]) == 1:
            answers = answers[:, 0] if hasattr(answers, "shape") else [rows[0] for rows in answers]
        return answers[0] if self.one else answers


def _listed(rows):
    return rows.to_list() if hasattr(rows, "to_list") else rows


def _compiled_before(model, target):
    """The `IncrementalModel` and the compiled loops of a model, kept with it while it has the same variables."""
    variables = model.variables
    kept = vars(model).get("_keras_tx_loops")
    if kept is None or list(map(id, kept[0])) != list(map(id, variables)):
        kept = (variables, {})
        object.__setattr__(model, "_keras_tx_loops", kept)  # not tracked: it is no part of the model
    if target not in kept[1]:
        kept[1][target] = (IncrementalModel(model, target), {})
    return kept[1][target]

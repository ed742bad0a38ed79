"""What the signatures of a generative model share: requests to checked rows of ids, decoding, and ids to texts.

B prompts, S source tokens, T target tokens, M new tokens, n results of each prompt. A model with sources, such as
`Seq2Seq`, gets sources, and its targets begin with the start token; any other model gets prompts. Everything here
becomes part of TensorFlow graphs.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import keras

from keras_tx.generation import Beam, Greedy, Sample, Strategy, generate, in_graph, philox
from keras_tx.generation.config import GenerationConfig
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.model_checks import check_sources, has_two_vocabularies
from keras_tx.generation.per_row import PerRowStrategy
from keras_tx.generation.prompts import of_sides
from keras_tx.generation.speculative import Speculative, without_drafts
from keras_tx.models.language_model import LanguageModel
from keras_tx.optional import Lazy
from keras_tx.serving.graph_texts import rows_spec, text_function, token_function
from keras_tx.serving.request_inputs import checked_ids, graph_function
from keras_tx.serving.tokenizer_checks import check_length_limit
from keras_tx.text.compatibility import check_fits
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

MAX_NEW_TOKENS = 64  # the default; half of the learned positions if that is less
NUM_BEAMS = 4  # of the signature `beam`, where the strategy is not a `Beam`
_NO_OPTIONS = ("model", "inputs", "tokenizer", "source_tokenizer", "return_scores", "jit_compile")

Decoded = tuple[Tensor, Tensor, Tensor]  # new tokens (B, n, M), their lengths (B, n) and scores (B, n)


class TextGenerator:
    """A generative model with its tokenizers and the options of generation, to be called from graphs.

    Args:
        model: a model that `keras_tx.generation.generate` takes.
        tokenizer, source_tokenizer: tokenizers that run in a graph; None: requests have ids.
        generation: options of `generate`, by name.

    Attributes:
        model: the model as it was given.
        is_language_model: whether it is a `CausalLM` or a `Seq2Seq`, which have attention scores and hidden states.
        incremental_model: the model as decoding runs it.
        config: the checked options.
        max_new_tokens: M.
        max_prompt_tokens: the largest number of tokens of a prompt, if the model itself has no limit; otherwise None.
        client_inputs: the inputs of the model that clients give: its sources, or the only input.

    Raises:
        TypeError: an unknown strategy, or a model that is not functional.
        ValueError: an unknown option, options that contradict each other or the model, a tokenizer that does not match
            the model, or a source without a padding id.
    """

    def __init__(
        self,
        model: keras.Model,
        tokenizer: Any = None,
        source_tokenizer: Any = None,
        generation: Mapping[str, Any] | None = None,
    ):
        options = dict(generation or {})
        known = [name for name in inspect.signature(generate).parameters if name not in _NO_OPTIONS]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"`generation` must have keys among {known}. Received: {unknown}")
        self.model = model
        self.is_language_model = isinstance(model, LanguageModel)
        functional = model._generation_model() if self.is_language_model else model
        self.incremental_model = IncrementalModel(functional, options.pop("target", None))
        sources = self.incremental_model.sources
        if source_tokenizer is not None and (tokenizer is None or not sources):
            raise ValueError(
                "`source_tokenizer` is only for models with sources, beside the `tokenizer` of their targets. "
                f"Received: source_tokenizer of type {type(source_tokenizer).__name__}, sources {sources}, "
                f"tokenizer={tokenizer!r}"
            )
        self.tokenizer, self.source_tokenizer = of_sides(tokenizer, source_tokenizer, sources)
        positions = self.incremental_model.max_length or 2 * MAX_NEW_TOKENS
        options.setdefault("max_new_tokens", min(MAX_NEW_TOKENS, positions // 2))
        self.config = GenerationConfig(self.incremental_model, tokenizer=tokenizer, **options)
        _check_noise(without_drafts(self.config.strategy))
        self.max_new_tokens: int = self.config.max_new_tokens
        # Random numbers for each row: three for each token if a draft model draws drafts, see `Speculative.noise`.
        self._noise_length = self.max_new_tokens * (1 if self.config.draft is None else 3)
        self.max_prompt_tokens: int | None = None
        self.client_inputs: list[str] = sources or [self.incremental_model.target]
        if sources:
            self.config.target_start()
            check_sources(self.incremental_model)
        if tokenizer is not None:
            self._check_tokenizers(source_tokenizer)
        self._decoders: dict[Strategy, Any] = {}
        self._token_functions: dict[int, Any] = {}  # by the `id` of the tokenizer

    def input_names(self, single: str, several: str = "{}") -> list[str]:
        """Names of a signature's inputs: `single` if there is one, otherwise `several` formatted with each name."""
        if len(self.client_inputs) == 1:
            return [single]
        return [several.format(name) for name in self.client_inputs]

    # Requests

    def tokenize(self, texts: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Texts -> prompts and sources.

        Args:
            texts: strings (B,), one tensor for each of `client_inputs`.
            names: of these inputs, for the messages.

        Returns:
            Prompts, ragged (B, None), and sources, a list of tensors (B, S).
        """
        if self.incremental_model.sources:
            ids = [self.source_tokenizer(one)["token_ids"] for one in texts]
            padding_ids = [self.incremental_model.padding_ids[name] for name in self.client_inputs]
            rows = [in_graph.ragged_rows(one, padding_id) for one, padding_id in zip(ids, padding_ids, strict=True)]
            return self._start_and_sources(rows, names)
        return self._checked_prompts(self._token_rows(texts[0], self.config.start_token), names[0]), []

    def rows_of_ids(self, inputs: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """`token_ids` (B, T) and `lengths` (B,) for each of `client_inputs` -> prompts and sources, as `tokenize`."""
        rows = []
        for index, name in enumerate(self.client_inputs):
            ids, lengths = inputs[2 * index : 2 * index + 2]
            padding_id = self.incremental_model.padding_ids[name]
            ids = checked_ids(
                ids,
                lengths,
                self.incremental_model.vocabulary_sizes[name] or self.incremental_model.vocabulary_size,
                padding_id or 0,
                name=names[2 * index],
                lengths_name=names[2 * index + 1],
            )
            rows.append(in_graph.ragged_rows(tf.RaggedTensor.from_tensor(ids, lengths=lengths), padding_id))
        if self.incremental_model.sources:
            return self._start_and_sources(rows, names[::2])
        return self._checked_prompts(rows[0], names[0]), []

    def _token_rows(self, texts: Tensor, start_token: int | None = None) -> Tensor:
        """Texts (B,) -> the ids of their tokens, ragged (B, None), after a start token if there is one."""
        padding_id = self.incremental_model.padding_ids[self.incremental_model.target]
        rows = in_graph.ragged_rows(in_graph.ragged_tokens(self.tokenizer.tokenize(texts)), padding_id)
        start = [] if start_token is None else [tf.fill([rows.nrows(), 1], start_token)]  # which may be the padding id
        return tf.concat([*start, rows], axis=1)

    def _start_and_sources(self, rows: Sequence[Tensor], names: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        limit = self.incremental_model.max_source_length
        sources, rows = [], [_check_not_empty(one, name) for one, name in zip(rows, names, strict=True)]
        for one, name, model_input in zip(rows, names, self.client_inputs, strict=True):
            same_number = tf.equal(one.nrows(), rows[0].nrows())
            one = _check(one, same_number, f"{name} must be one for each {names[0]}. Received:", one.nrows())
            if limit is not None:
                rule = f"{name} must fit into the {limit} learned positions. Received: tokens"
                one = _check(one, one.row_lengths() <= limit, rule, one.row_lengths())
            sources.append(in_graph.right_padded(one, self.incremental_model.padding_ids[model_input]))
        start = tf.RaggedTensor.from_tensor(tf.fill([rows[0].nrows(), 1], self.config.target_start()))
        return start, sources

    def _checked_prompts(self, rows: Tensor, name: str) -> Tensor:
        rows = _check_not_empty(rows, name)
        if self.max_prompt_tokens is not None:
            rule = f"{name} must be at most {self.max_prompt_tokens} tokens long. Received:"
            rows = _check(rows, rows.row_lengths() <= self.max_prompt_tokens, rule, rows.row_lengths())
        return rows

    def check_positions(self, rows: Tensor, num_new: Tensor, names: str) -> Tensor:
        """Returns `rows`, checked to leave learned positions for `num_new` more tokens."""
        limit = self.incremental_model.max_length
        if limit is None:
            return rows
        lengths = tf.cast(rows.row_lengths(), "int32")
        rule = f"{names} must fit into the {limit} learned positions. Received: tokens"
        return _check(rows, lengths + num_new <= limit, rule, lengths + tf.maximum(num_new, 0))

    # Decoding

    def generate(self, prompts: Tensor, sources: list[Tensor], name: str, strategy: Strategy | None = None) -> Decoded:
        """Generates with a strategy, by default that of `generation`; traced once for all signatures that call it."""
        strategy = self.config.strategy if strategy is None else strategy
        strategy = self.beam_strategy() if isinstance(strategy, Beam) else strategy
        if strategy not in self._decoders:
            self._decoders[strategy] = self._decoder(strategy)
        prompts = self.check_positions(prompts, self.max_new_tokens, f"{name} and the new tokens")
        decoded: Decoded = self._decoders[strategy](prompts, sources)
        return decoded

    def _decoder(self, strategy: Strategy) -> Any:
        @graph_function(*self._specs())
        def decode(prompts: Tensor, sources: list[Tensor]) -> Decoded:
            noise, chooser = None, without_drafts(strategy)
            if isinstance(chooser, Sample):
                noise = philox.uniform(row_seeds(chooser.seed, prompts.nrows()), self._noise_length)
            return self._decode(strategy, prompts, sources, tf.constant(self.max_new_tokens), noise)

        return decode

    def generate_per_row(
        self, prompts: Tensor, sources: list[Tensor], name: str, options: Mapping[str, Tensor]
    ) -> Decoded:
        """Generates with separate options (B,) for each row: see `check_row_options`."""
        prompts = self.check_row_options(prompts, name, options)
        noise = philox.uniform(options["seed"], self._noise_length)
        strategy = [options[key] for key in ("temperature", "top_k", "top_p")]
        decoded: Decoded = self._per_row_decoder(prompts, sources, options["max_new_tokens"], strategy, noise)
        return decoded

    def generate_greedily(self, prompts: Tensor, sources: list[Tensor], name: str) -> Decoded:
        """Generates the likeliest token in each step, with a decoder that another signature has, too."""
        if without_drafts(self.config.strategy) == Greedy():
            return self.generate(prompts, sources, name)
        prompts = self.check_positions(prompts, self.max_new_tokens, f"{name} and the new tokens")
        rows = prompts.nrows()
        limit, noise = tf.fill([rows], self.max_new_tokens), tf.zeros([self._noise_length, rows])
        options = [tf.zeros([rows]), tf.zeros([rows], "int32"), tf.ones([rows])]
        decoded: Decoded = self._per_row_decoder(prompts, sources, limit, options, noise)
        return decoded

    @cached_property
    def _per_row_decoder(self) -> Any:
        """As `_decoder`, with `PerRowStrategy`, and with drafts if the strategy of `generation` has them."""
        limit, *options = (tf.TensorSpec([None], dtype) for dtype in ("int32", "float32", "int32", "float32"))

        @graph_function(*self._specs(), limit, options, tf.TensorSpec([self._noise_length, None]))
        def decode(
            prompts: Tensor, sources: list[Tensor], limit: Tensor, options: list[Tensor], noise: Tensor
        ) -> Decoded:
            strategy: Strategy = PerRowStrategy(*options)
            if isinstance(self.config.strategy, Speculative):
                strategy = replace(self.config.strategy, strategy=strategy)
            return self._decode(strategy, prompts, sources, limit, noise)

        return decode

    def _specs(self) -> tuple[Any, list[Any]]:
        """What decoders take: ragged prompts, and sources."""
        return rows_spec(), [tf.TensorSpec([None, None], tf.int32) for _ in self.incremental_model.sources]

    def check_row_options(self, prompts: Tensor, name: str, options: Mapping[str, Tensor]) -> Tensor:
        """Returns `prompts`, checked with "max_new_tokens", "temperature", "top_k", "top_p", "seed" of each row."""
        max_new_tokens, temperature, top_k, top_p, _ = options.values()
        for key, values in options.items():
            same_number = tf.equal(tf.size(values, tf.int64), prompts.nrows())
            prompts = _check(prompts, same_number, f"{key} must be one for each {name}. Received:", values)
        least, most = self.config.constraints.least_new_tokens, self.max_new_tokens
        rules = {
            "max_new_tokens": ((max_new_tokens >= least) & (max_new_tokens <= most), f"in [{least}, {most}]"),
            "temperature": ((temperature >= 0) & tf.math.is_finite(temperature), "0, which is greedy, or above"),
            "top_k": (top_k >= 0, "0, which is all tokens, or above"),
            "top_p": ((top_p > 0) & (top_p <= 1), "in (0, 1]"),
        }
        for key, (is_right, rule) in rules.items():
            prompts = _check(prompts, is_right, f"{key} must be {rule}. Received:", options[key])
        return self.check_positions(prompts, max_new_tokens, f"{name} and max_new_tokens")

    def _decode(
        self, strategy: Strategy, prompts: Tensor, sources: list[Tensor], max_new_tokens: Tensor, noise: Tensor
    ) -> Decoded:
        loop = self.config.decode_loop(self.max_new_tokens, strategy)
        ids, scores = in_graph.generate(loop, prompts, sources, max_new_tokens, noise)
        return ids, in_graph.lengths(ids, self.config.stop_tokens, tf.reshape(max_new_tokens, [-1, 1])), scores

    def beam_strategy(self) -> Beam:
        """The strategy of the signature `beam`: it returns every beam, unless `generation` asks for fewer results."""
        strategy = self.config.strategy
        if not isinstance(strategy, Beam):
            beams = min(NUM_BEAMS, self.incremental_model.vocabulary_size)
            return Beam(beams, num_return_sequences=beams)
        if strategy.num_return_sequences > 1:
            return strategy
        return replace(strategy, num_return_sequences=strategy.num_beams)

    def score(self, prompts: Tensor, sources: list[Tensor], target: Tensor, name: str) -> dict[str, Tensor]:
        """The log-probabilities of the texts `target` (B,) after the prompts, each with a stop token at its end."""
        rows = self._token_rows(target)
        for token in self._forced_beginning():
            prompts = tf.concat([prompts, tf.fill([prompts.nrows(), 1], tf.cast(token, prompts.dtype))], axis=1)
        if self.config.stop_tokens:
            rows = tf.concat([rows, tf.fill([rows.nrows(), 1], self.config.stop_tokens[0])], axis=1)
        same_number = tf.equal(rows.nrows(), prompts.nrows())
        rows = _check(rows, same_number, f"target must be one for each {name}. Received:", target)
        if self.tokenizer.max_length is not None:
            rule = f"target must be at most {self.tokenizer.max_length} tokens long. Received:"
            rows = _check(rows, rows.row_lengths() <= self.tokenizer.max_length, rule, rows.row_lengths())
        whole = self.check_positions(tf.concat([prompts, rows], axis=1), -1, f"{name} and target")
        padding_id = self.config.padding_id
        least = in_graph.least_columns(whole.nrows(), self.incremental_model.max_length)
        logits = self.incremental_model.full_logits(
            [*self.widened(sources), in_graph.right_padded(whole[:, :-1], padding_id, least)]
        )  # (B, T, V)
        logits = tf.cast(logits, "float32")
        next_ids = in_graph.right_padded(whole[:, 1:], padding_id, least)
        log_probs = tf.gather(logits, next_ids, batch_dims=2) - tf.reduce_logsumexp(logits, axis=-1)

        ids, is_target = in_graph.right_padded(rows, padding_id), tf.sequence_mask(rows.row_lengths())
        is_target = tf.pad(is_target, [[0, 0], [0, tf.shape(ids)[1] - tf.shape(is_target)[1]]])
        places = tf.cast(prompts.row_lengths() - 1, "int32")[:, None] + tf.range(tf.shape(ids)[1])
        places = tf.minimum(places, tf.shape(log_probs)[1] - 1)
        log_probs = tf.where(is_target, tf.gather(log_probs, places, batch_dims=1), 0.0)
        return {
            "log_probability": tf.reduce_sum(log_probs, axis=1),
            "tokens": tf.where(is_target, self.token_strings(ids), ""),
            "token_log_probabilities": log_probs,
            "num_tokens": tf.cast(rows.row_lengths(), "int32"),
        }

    def _forced_beginning(self) -> list[int]:
        """The special tokens that decoding forces first, such as one of BART, which are no part of texts."""
        forced: dict[int, int] = dict(self.config.constraints.forced_tokens)
        special: Any = getattr(self.tokenizer, "_special_ids", list)()
        return list(itertools.takewhile(special.__contains__, (forced.get(i, -1) for i in range(len(forced)))))

    def widened(self, sources: list[Tensor]) -> list[Tensor]:
        """Sources (B, S), padded so that the products of an export get enough rows: see `in_graph.least_columns`."""
        model, made = self.incremental_model, []
        for name, one in zip(model.sources, sources, strict=True):
            least = in_graph.least_source_columns(tf.shape(one)[0], model)
            made.append(in_graph.at_least_columns(one, model.padding_ids[name], least))
        return made

    # Responses

    def ragged(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Ids (B, M) and their lengths (B,) -> ragged (B, None)."""
        return tf.RaggedTensor.from_tensor(ids, lengths=tf.cast(lengths, "int64"))

    def detokenize(self, prompts: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """New ids (B, n, M) -> texts (B, n) as `generate` returns them, with the prompt in a model without sources."""
        count = ids.shape[1]
        rows = self.ragged(tf.reshape(ids, [-1, ids.shape[2]]), tf.reshape(lengths, [-1]))
        if not self.incremental_model.sources:
            prompts = tf.gather(prompts, tf.repeat(tf.range(prompts.nrows()), count))
            rows = tf.concat([prompts, rows], axis=1)
        return tf.reshape(self._text_function(rows), [-1, count])

    @cached_property
    def _text_function(self) -> Any:
        return text_function(self.tokenizer)

    def token_strings(self, ids: Tensor, tokenizer: Any = None) -> Tensor:
        """Ids (B, T) -> the strings of their tokens (B, T); "" for an id outside the vocabulary."""
        tokenizer = tokenizer or self.tokenizer
        if id(tokenizer) not in self._token_functions:
            self._token_functions[id(tokenizer)] = token_function(tokenizer)
        return self._token_functions[id(tokenizer)](ids)

    # Checks before there is a graph

    def _check_tokenizers(self, given: Any) -> None:
        model = self.incremental_model
        has_two_vocabularies(model, given)  # raises if it is None, and needed
        sources = [("source_tokenizer", self.source_tokenizer, name) for name in model.sources]
        for tokenizer_name, tokenizer, name in [("tokenizer", self.tokenizer, model.target), *sources]:
            check_fits(
                tokenizer,
                model.vocabulary_sizes[name] or model.vocabulary_size,
                padding_id=model.padding_ids[name] if name in model.sources else None,
                tokenizer_name=tokenizer_name,
                input_name=name,
            )
        tokenizer = self.source_tokenizer if model.sources else self.tokenizer
        if model.sources or model.max_length is None:
            check_length_limit(tokenizer)
        if model.max_length is None and not model.sources:
            self.max_prompt_tokens = tokenizer.max_length


def _check_noise(strategy: Strategy) -> None:
    if type(strategy).noise not in (Strategy.noise, Sample.noise):
        raise ValueError(
            "`generation` must have a strategy without a `noise` method of its own: it runs in Python, and the "
            f"exported graph cannot call it. Received: strategy={strategy!r}"
        )


def row_seeds(seed: int | None, count: Tensor) -> Tensor:
    """A seed for each row: that of `Sample`, or random ones, which differ after each restart of a server."""
    if seed is None:
        return tf.raw_ops.RandomUniformInt(shape=[count], minval=tf.int64.min, maxval=tf.int64.max)
    return tf.fill([count], tf.constant((seed + 2**63) % 2**64 - 2**63, tf.int64))


def _check_not_empty(rows: Tensor, name: str) -> Tensor:
    rule = f"{name} must have a token in each row. Received: tokens"
    return _check(rows, rows.row_lengths() > 0, rule, rows.row_lengths())


def _check(rows: Tensor, is_right: Tensor, rule: str, received: Tensor) -> Tensor:
    """Returns ragged `rows` that depend on an assertion that all of `is_right` is True."""
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(is_right), [rule, received])]):
        return tf.RaggedTensor.from_row_splits(tf.identity(rows.values), tf.identity(rows.row_splits), validate=False)

"""Exporters for the two kinds of models, encoder models and generative models, with their checks."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import keras

from keras_tx.generation import Greedy, Sample, generate, in_graph
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.speculative import without_drafts
from keras_tx.generation.strategy import Strategy
from keras_tx.internals.keras_models import layers_within
from keras_tx.layers import LearnedPositionalEncoding
from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.optional import Lazy
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving import parity
from keras_tx.serving.class_labels import check_labels, multi_label_kind
from keras_tx.serving.encoder_signatures import encoder_signatures
from keras_tx.serving.generator_signatures import generator_signatures
from keras_tx.serving.request_inputs import graph_function, text_spec
from keras_tx.serving.row_checks import check_rows
from keras_tx.serving.text_encoder import TextEncoder, half_dtype_of
from keras_tx.serving.text_generator import TextGenerator, row_seeds
from keras_tx.serving.tokenizer_checks import check_in_graph, check_length_limit, check_pairs
from keras_tx.serving.warmup import inputs_for
from keras_tx.text.compatibility import check_fits
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

SHORT_TEXT = "A short one."  # the text for the check of rows
LONGEST_ROW = 32  # the length for that check, if neither the model nor a tokenizer has a limit
PROMPTS = (SHORT_TEXT, "one")  # or sources, for the parity of generative models
GENERATION_TASKS = ("causal_lm", "conditional_generation")  # of checkpoints
CLASSIFICATION_TASKS = ("sequence_classification", "token_classification")

Tokenizers: TypeAlias = Mapping[str, Any]  # {"tokenizer": ..., "source_tokenizer": ...}, None where there is none


class Exporter(Protocol):
    """The interface of an exporter: what `export` needs of a model.

    Attributes:
        model: the model.
        precision: that of matrix products with weights in the exported graph.
        labels: names of the classes; None for a model that does not classify.
        multi_label: what a head returns that may give a text several labels, "logits" or "probabilities"; else None.
        generation: options of `generate`; None for an encoder model.
        request_defaults: {name of an input: its value in warm-up requests}.
    """

    model: keras.Model
    precision: str
    labels: list[str] | None
    multi_label: str | None
    generation: dict[str, Any] | None
    request_defaults: dict[str, float]

    def signatures(self) -> dict[str, Any]:
        """Returns {name: tf.function with an input signature}."""

    def parity(self, signatures: Mapping[str, Any], texts: Sequence[Any] = ()) -> dict[str, Any]:
        """Returns requests with the answers of the Keras model, which `check` compares with those of the export."""

    def id_inputs(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Texts -> the inputs of signatures over ids, by name."""


def exporter_for(
    model: keras.Model,
    tokenizers: Tokenizers,
    generation: Mapping[str, Any] | None,
    labels: Sequence[str] | None,
    text_pairs: bool = False,
) -> Exporter:
    """Returns the exporter of a model. Everything that can be checked without building a graph is checked here.

    Args:
        model: a functional model.
        tokenizers: by argument name, "tokenizer" and "source_tokenizer".
        generation, labels, text_pairs: as for `export`.

    Raises:
        TypeError, ValueError: as for `export`.
    """
    is_checkpoint = isinstance(model, PretrainedModel)
    is_encoder = isinstance(model, (TextClassifier, MaskedLM)) or (is_checkpoint and model.task not in GENERATION_TASKS)
    generates = isinstance(model, (CausalLM, Seq2Seq)) or (generation is not None and not is_encoder)
    if text_pairs and (generates or (is_checkpoint and not is_encoder)):
        raise ValueError(
            "`text_pairs` is for models that classify or encode. Received: text_pairs=True for a model of type "
            f"{type(model).__name__} that generates"
        )
    if is_checkpoint and model.task in GENERATION_TASKS:
        family, values = model.family, model.generation_config
        model._check_generation_config()
        options = {**family.generation_options(values), **(generation or {})}
        if options.get("strategy") is None:
            options["strategy"] = family.strategy(values)
        return GeneratorExporter(model._generation_model(), **tokenizers, generation=options, labels=labels)
    if generates:
        return GeneratorExporter(model, **tokenizers, generation=generation, labels=labels)
    for name, value in (("generation", generation), ("source_tokenizer", tokenizers["source_tokenizer"])):
        if value is not None:
            raise ValueError(
                f"`{name}` is for models that generate. Received: {name}={value!r}, model of type "
                f"{type(model).__name__}"
            )
    return EncoderExporter(model, tokenizers["tokenizer"], labels, text_pairs)


class EncoderExporter:
    """Exports a `TextClassifier`, a `MaskedLM`, an encoder checkpoint, or a user's functional model over ids.

    Without `labels`, a checkpoint that classifies has those of its config.

    Raises:
        TypeError: the model is not functional, or the tokenizer does not run in a graph.
        ValueError: labels, tokenizer and model do not fit each other.
    """

    def __init__(self, model: keras.Model, tokenizer: Any, labels: Sequence[str] | None, text_pairs: bool = False):
        self.model, self.tokenizer, self.text_pairs = model, tokenizer, text_pairs
        self.precision = "float32"
        self.encoder = TextEncoder(model)
        self._is_own_model = isinstance(model, (TextClassifier, MaskedLM))
        if self._is_own_model and model.embedding.padding_id is None:
            raise ValueError(
                "`model` must have a padding id, or rows of different lengths could not share a batch. Received: "
                "padding_id=None"
            )
        self.fills_masks = isinstance(model, MaskedLM) or getattr(model, "task", None) == "masked_lm"
        if self.fills_masks and labels is not None:
            raise ValueError(
                f"`labels` are for models over classes. Received: labels={labels!r} for a model that fills masks"
            )
        labels = _labels_of_config(model) if labels is None else labels
        classifies = isinstance(model, TextClassifier) or labels is not None
        self.multi_label = multi_label_kind(self.encoder, model) if classifies else None
        self.labels = check_labels(self.encoder, labels, self.multi_label) if classifies else None
        if tokenizer is not None:
            self._check_tokenizer()
        if text_pairs:
            self._check_pairs()
        self.padding_id = self._padding_id()
        self.generation: dict[str, Any] | None = None
        self.request_defaults: dict[str, float] = {}

    def signatures(self) -> dict[str, Any]:
        """Returns {name: tf.function with an input signature}."""
        self.check_rows()
        arguments = (self.encoder, self.tokenizer, self.labels, self.padding_id, self.fills_masks)
        return encoder_signatures(*arguments, multi_label=self.multi_label, text_pairs=self.text_pairs)

    def check_rows(self) -> None:
        """Raises ValueError if the outputs of a user's model for a row depend on its padding or on other rows."""
        if not self._is_own_model:  # whose layers mask padding, and see no other rows
            ids, length = self.sample_row()
            check_rows(self.encoder, self.padding_id, ids, length)

    def _padding_id(self) -> int:
        """The padding id of the model, of the tokenizer or of the config, whichever is known first.

        If none of them has one, a model with a padding mask has no padding id, and other models have the padding id 0.
        """
        of_config = self.model.config.get("pad_token_id") if isinstance(self.model, PretrainedModel) else None
        of_tokenizer = None if self.tokenizer is None else self.tokenizer.pad_id
        known = [one for one in (self.encoder.padding_id, of_tokenizer, of_config) if one is not None]
        return known[0] if known else (-1 if self.encoder.has_mask else 0)

    def parity(self, signatures: Mapping[str, Any], texts: Sequence[Any] = ()) -> dict[str, Any]:
        """Returns the answers of the Keras model to fixed texts and to the first of `texts`, for `check` to compare.

        Without a tokenizer, there is only the answer to one row of ids.
        """
        if self.tokenizer is None:
            row, _ = self.sample_row()
            example = parity.token_ids_example(signatures["tokens"], row, self._least_precise)
            return {"signatures": {"tokens": example}}
        half, pairs = self._least_precise, self.text_pairs
        examples = parity.encoder_examples(signatures, self, self.tokenizer, half, texts, pairs)
        content: dict[str, Any] = {"signatures": examples}
        if self.labels is not None and isinstance(self.model, TextClassifier):
            content |= parity.classifier_answers(
                self.encoder, self.tokenizer, self.labels, half, self.multi_label, pairs
            )
        return content

    @property
    def _least_precise(self) -> str | None:
        """The least precise dtype of the exported graph, if it is less precise than float32."""
        return self.encoder.half_dtype if self.precision == "float32" else self.precision

    def id_inputs(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Texts, or pairs of texts -> token_ids (B, T), lengths (B,), and segment_ids (B, T) of pairs."""
        parts = [list(part) for part in zip(*texts, strict=True)] if self.text_pairs else [texts]
        ids, segments = self.encoder.tokenize(self.tokenizer, *parts)
        lengths = tf.math.count_nonzero(ids != self.padding_id, axis=1, dtype="int32")
        return {"token_ids": ids, "lengths": lengths, "segment_ids": tf.cast(segments, "int32")}

    def sample_row(self) -> tuple[Any, int]:
        """A short row of ids, and the largest number of tokens in a row."""
        if self.tokenizer is not None:
            text = [SHORT_TEXT, SHORT_TEXT] if self.text_pairs else SHORT_TEXT
            row = self.id_inputs([text])["token_ids"][0].numpy()
            return row, max(len(row), self.tokenizer.max_length or self.encoder.max_length or 0)
        size = self.encoder.vocabulary_size or LONGEST_ROW
        row = [token for token in range(min(size, 7)) if token != self.padding_id]
        return row, max(len(row), min(LONGEST_ROW, self.encoder.max_length or LONGEST_ROW))

    def _check_tokenizer(self) -> None:
        tokenizer, encoder = self.tokenizer, self.encoder
        check_in_graph("tokenizer", tokenizer)
        if tokenizer.pad_id is None:
            raise ValueError("`tokenizer` must have a padding token. Received: tokenizer.pad_id=None")
        if encoder.max_length is None:
            check_length_limit(tokenizer)
        # A tokenizer without a limit is called with the model's, and one of a fixed length with that length.
        is_cut_to_fit = encoder.fixed_length is not None or tokenizer.max_length is None
        check_fits(
            tokenizer,
            encoder.vocabulary_size,
            padding_id=encoder.padding_id,
            max_length=None if is_cut_to_fit else encoder.max_length,
        )
        if self.fills_masks and tokenizer.mask_id is None:
            raise ValueError(
                "`tokenizer` must have a mask token, for which the model finds words. Received: tokenizer.mask_id=None"
            )

    def _check_pairs(self) -> None:
        if self.fills_masks:
            raise ValueError(
                "`text_pairs` is for models that classify or encode. Received: text_pairs=True for a model that fills "
                "masks"
            )
        if self.tokenizer is None:
            raise ValueError("`tokenizer` must be given for `text_pairs=True`. Received: tokenizer=None")
        if keras.backend.backend() == "tensorflow":  # else in the process that exports: the check calls the tokenizer
            check_pairs(self.tokenizer, self.encoder)


def _labels_of_config(model: keras.Model) -> list[str] | None:
    """The labels of a checkpoint with one class for each row or token; None for any other model."""
    if not (isinstance(model, PretrainedModel) and model.task in CLASSIFICATION_TASKS):
        return None
    names = model.config.get("id2label") or {}
    labels = [name for _, name in sorted((int(index), str(name)) for index, name in names.items())]
    labels = labels or [f"LABEL_{index}" for index in range(model.output["logits"].shape[-1])]  # as in transformers
    return None if model.config.get("problem_type") == "regression" or len(labels) < 2 else labels


class GeneratorExporter:
    """Exports a `CausalLM`, a `Seq2Seq`, or another model that `keras_tx.generation.generate` takes.

    Raises:
        TypeError: a tokenizer does not run in a graph.
        ValueError: there are labels, which generative models do not use.
    """

    def __init__(
        self,
        model: keras.Model,
        tokenizer: Any,
        source_tokenizer: Any,
        generation: Mapping[str, Any] | None,
        labels: Sequence[str] | None,
    ):
        if labels is not None:
            raise ValueError(
                f"`labels` are for models over classes. Received: labels={labels!r} for a model that generates"
            )
        for name, given in (("tokenizer", tokenizer), ("source_tokenizer", source_tokenizer)):
            if given is not None:
                check_in_graph(name, given)
        self.model, self.tokenizer, self.source_tokenizer = model, tokenizer, source_tokenizer
        self.precision = "float32"
        self.generation: dict[str, Any] | None = dict(generation or {})
        self.labels: list[str] | None = None
        self.multi_label: str | None = None
        self._options: dict[str, Any] = dict(generation or {})
        rules = {name: self._options[name] for name in ("min_new_tokens", "forced_tokens") if name in self._options}
        positions = [one.max_length for one in layers_within(model) if isinstance(one, LearnedPositionalEncoding)]
        several = min(2, min(positions, default=4) // 2)  # so that there is a decode step after the prefill
        least = max(Constraints(**rules).least_new_tokens, several)
        self.request_defaults: dict[str, float] = {"max_new_tokens": self._options.get("max_new_tokens", least)}

    def signatures(self) -> dict[str, Any]:
        """Returns {name: tf.function with an input signature}."""
        _check_seed(self._strategy)
        return generator_signatures(self.model, self.tokenizer, self.source_tokenizer, self._options)

    def parity(self, signatures: Mapping[str, Any], texts: Sequence[Any] = ()) -> dict[str, Any]:
        """Returns the texts of `generate` and one answer of every other signature, for `check` to compare.

        Signatures that sample are saved as requests without answers; so are, in half precision or int8, those whose
        answers depend on chosen tokens.
        """
        samples = isinstance(self._strategy, Sample)
        half_dtype = half_dtype_of(self.model) if self.precision == "float32" else self.precision
        examples = {}
        for name, function in signatures.items():
            inputs = self._request(function)
            if inputs is not None:
                is_random = samples and name in ("serving_default", "tokens")
                examples[name] = parity.generator_example(name, function, inputs, is_random, half_dtype)
        names = [spec.name for spec in signatures["serving_default"].input_signature]
        if names == ["text"] and not samples and half_dtype is None:
            generated = self._generated([*PROMPTS, *texts[: parity.MOST_WARMUP_TEXTS]])
            examples["serving_default"] = generated or examples["serving_default"]
        return {"signatures": examples}

    def _request(self, function: Any) -> dict[str, Tensor] | None:
        """The inputs of a signature for the first text that is short enough; None if one of the inputs is unknown."""
        specs = {spec.name: spec for spec in function.input_signature}
        if self.tokenizer is not None:
            text = next((text for text in PROMPTS if self._fits(text)), PROMPTS[-1])
            return inputs_for(specs, [text], self)
        row = self.sample_row()
        return {
            name: tf.constant([row] if spec.shape.rank == 2 else [len(row)], spec.dtype) for name, spec in specs.items()
        }

    def sample_row(self) -> list[int]:
        model = self._generator.incremental_model
        special = {*self._generator.config.stop_tokens, *model.padding_ids.values()}
        return [token for token in range(min(model.vocabulary_size, 8)) if token not in special][:2]

    def _generated(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Examples of `serving_default`, with the texts that `generate` returns."""
        options = {"strategy": Greedy(), **self._options}
        texts = [text for text in texts if self._fits(text)]
        options |= {"tokenizer": self.tokenizer, "source_tokenizer": self.source_tokenizer, "jit_compile": False}
        options["max_new_tokens"] = self._generator.max_new_tokens
        results = generate(self.model, texts, **options) if texts else []
        best = [result if isinstance(result, str) else result[0] for result in results]
        return [
            {"inputs": {"text": [text]}, "outputs": {"text": [one]}, "tolerance": 0}
            for text, one in zip(texts, best, strict=True)
        ]

    def _fits(self, text: str) -> bool:
        """Whether the model has positions for a text and its continuation."""
        tokens, model = self.id_inputs([text])["token_ids"].shape[1], self._generator.incremental_model
        return bool(model.sources) or tokens + self._generator.max_new_tokens <= (model.max_length or math.inf)

    def id_inputs(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Texts -> token_ids (B, T), lengths (B,), of sources or of prompts with the start token."""
        ids, lengths = self._tokenize(tf.constant(texts, tf.string))
        return {"token_ids": ids, "lengths": tf.cast(lengths, "int32")}

    @cached_property
    def _tokenize(self) -> Any:
        generator = self._generator

        @graph_function(text_spec())
        def tokenize(text: Tensor) -> tuple[Tensor, Tensor]:
            prompts, sources = generator.tokenize([text], ["text"])
            if not sources:
                return in_graph.right_padded(prompts, generator.config.padding_id), prompts.row_lengths()
            padding_id = generator.incremental_model.padding_ids[generator.client_inputs[0]]
            return sources[0], tf.math.count_nonzero(sources[0] != padding_id, axis=1)

        return tokenize

    @property
    def _strategy(self) -> Strategy:
        """The strategy that chooses tokens, which drafts do not change."""
        return without_drafts(self._options.get("strategy") or Greedy())

    @cached_property
    def _generator(self) -> TextGenerator:
        return TextGenerator(self.model, self.tokenizer, self.source_tokenizer, self._options)


def _check_seed(strategy: Strategy) -> None:
    """Raises if TensorFlow refuses the random seeds of requests, as it does if operations must be deterministic."""
    if not isinstance(strategy, Sample) or strategy.seed is not None:
        return
    try:
        row_seeds(None, 1)
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(
            "`generation` must have a `Sample` with a `seed` in a process that calls "
            f"`tf.config.experimental.enable_op_determinism`. Received: strategy={strategy!r}"
        ) from error

"""The kinds of models that leave, and what each must be: those that read ids, and those that write."""

import math
from functools import cached_property

from keras_tx.generation import Greedy, Sample, generate, in_graph
from keras_tx.models import CausalLM, MaskedLM, Seq2Seq, TextClassifier
from keras_tx.optional import Lazy
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving import parity
from keras_tx.serving.encoder_signatures import check_labels, encoder_signatures
from keras_tx.serving.generator_signatures import generator_signatures
from keras_tx.serving.request_inputs import text_spec
from keras_tx.serving.text_encoder import TextEncoder, check_padding, half_of
from keras_tx.serving.text_generator import TextGenerator
from keras_tx.serving.warmup import inputs_for

tf = Lazy("tensorflow")

SHORT = "A short one."  # the tokens that padding is tried with
LONGEST = 32  # how many are tried where neither the model nor a tokenizer tells
TEXTS = (SHORT, "one")  # that are written on, or whose targets are written
WRITE = ("causal_lm", "conditional_generation")  # tasks of checkpoints
CLASSIFY = ("sequence_classification", "token_classification")


def exporter_for(model, tokenizers, generation, labels):
    """The kind of a model, with all that can be checked before there is a graph.

    Args:
        model: functional.
        tokenizers: {"tokenizer": ..., "source_tokenizer": ...}.
        generation, labels: as for `export`.

    Returns:
        An `EncoderExporter` or `GeneratorExporter`. Both have `signatures()`, `parity(signatures)`, `ids_of(texts)`,
        `labels`, `generation`, and `of_requests`, the numbers of a warm-up request.
    """
    pretrained = isinstance(model, PretrainedModel)
    if pretrained and model.task in WRITE:
        family, values = model.family, model.generation_config
        options = {"strategy": family.strategy(values), **family.generation_options(values), **(generation or {})}
        return GeneratorExporter(model._generation_model(), **tokenizers, generation=options, labels=labels)
    reads = pretrained or isinstance(model, (TextClassifier, MaskedLM))
    if isinstance(model, (CausalLM, Seq2Seq)) or (generation is not None and not reads):
        return GeneratorExporter(model, **tokenizers, generation=generation, labels=labels)
    for name, value in (("generation", generation), ("source_tokenizer", tokenizers["source_tokenizer"])):
        if value is not None:
            raise ValueError(
                f"`{name}` is for models that write. Received: {name}={value!r}, model of type {type(model).__name__}"
            )
    return EncoderExporter(model, tokenizers["tokenizer"], labels)


class EncoderExporter:
    """A `TextClassifier`, a `MaskedLM`, a `PretrainedModel`, or another functional model over ids.

    The labels of a checkpoint that classifies are those of its config, if none are given.

    Raises:
        TypeError: the model is not functional, or the tokenizer does not run in a graph.
        ValueError: labels, tokenizer and model do not fit each other.
    """

    def __init__(self, model, tokenizer, labels):
        self.model, self.tokenizer = model, tokenizer
        self.reader = TextEncoder(model)
        own = isinstance(model, (TextClassifier, MaskedLM))
        if own and model.embedding.padding_id is None:
            raise ValueError(
                "`model` must have a padding id, or rows of different lengths could not share a batch. Received: "
                "padding_id=None"
            )
        self.fills = isinstance(model, MaskedLM) or getattr(model, "task", None) == "masked_lm"
        if self.fills and labels is not None:
            raise ValueError(
                f"`labels` are for models over classes. Received: labels={labels!r} for a model that fills masks"
            )
        labels = _own_labels(model) if labels is None else labels
        classifies = isinstance(model, TextClassifier) or labels is not None
        self.labels = check_labels(self.reader, labels) if classifies else None
        if tokenizer is not None:
            self._check_tokenizer()
        self.padding_id = self._padding_id()
        self.generation, self.of_requests = None, {}
        self._tried = own or self.reader.width is not None

    def signatures(self):
        """{name: tf.function}."""
        if not self._tried:
            ids, width = self._some_ids()
            check_padding(self.reader, self.padding_id, ids, width)
        return encoder_signatures(self.reader, self.tokenizer, self.labels, self.padding_id, self.fills)

    def _padding_id(self):
        """That of the model, of its config, or of the tokenizer. Where nothing tells, and there is a mask, none is."""
        of_config = self.model.config.get("pad_token_id") if isinstance(self.model, PretrainedModel) else None
        of_tokenizer = None if self.tokenizer is None else self.tokenizer.pad_id
        known = [one for one in (self.reader.padding_id, of_tokenizer, of_config) if one is not None]
        return known[0] if known else (-1 if self.reader.has_mask else 0)

    def parity(self, signatures, texts=()):
        """What `check` compares with: the answers of the live model, to texts of its own and to the first of `texts`.

        Without a tokenizer: to a row of ids.
        """
        if self.tokenizer is None:
            row = self._some_ids()[0]
            return {"signatures": {"tokens": parity.ids_example(signatures["tokens"], self.reader, row)}}
        content = {"signatures": parity.encoder_examples(signatures, self.reader, self.tokenizer, texts)}
        if isinstance(self.model, TextClassifier):
            content |= parity.classifier_answers(self.reader, self.tokenizer, self.labels)
        return content

    def ids_of(self, texts):
        """Texts -> ids (B, T), lengths (B,)."""
        ids, _ = self.reader.tokenized(self.tokenizer, texts)
        return ids, tf.math.count_nonzero(ids != self.padding_id, axis=1, dtype="int32")

    def _some_ids(self):
        """Ids of a short text, and the most tokens of a row."""
        if self.tokenizer is not None:
            row = self.ids_of([SHORT])[0][0].numpy()
            return row, max(len(row), self.tokenizer.max_length or self.reader.max_length or 0)
        size = self.reader.vocabulary_size or LONGEST
        row = [token for token in range(min(size, 7)) if token != self.padding_id]
        return row, max(len(row), min(LONGEST, self.reader.max_length or LONGEST))

    def _check_tokenizer(self):
        tokenizer, reader = self.tokenizer, self.reader
        check_in_graph("tokenizer", tokenizer)
        if tokenizer.pad_id is None:
            raise ValueError("`tokenizer` must have a padding token. Received: tokenizer.pad_id=None")
        if reader.vocabulary_size is not None and tokenizer.vocabulary_size > reader.vocabulary_size:
            raise ValueError(
                "`tokenizer` must not have more tokens than the model. Received: "
                f"tokenizer.vocabulary_size={tokenizer.vocabulary_size}, model.vocabulary_size={reader.vocabulary_size}"
            )
        if reader.padding_id is not None and tokenizer.pad_id != reader.padding_id:
            raise ValueError(
                "`tokenizer` must pad with the id that the model takes for padding. Received: "
                f"tokenizer.pad_id={tokenizer.pad_id}, padding_id={reader.padding_id}"
            )
        if reader.max_length is None and tokenizer.max_length is None:
            raise ValueError(
                "`tokenizer` must have a `max_length`, or one long text takes all memory of a server. Received: "
                "tokenizer.max_length=None"
            )
        if reader.width is None and (tokenizer.max_length or 0) > (reader.max_length or math.inf):
            raise ValueError(
                "`tokenizer` must not make rows longer than the positions that the model has. Received: "
                f"tokenizer.max_length={tokenizer.max_length}, max_length={reader.max_length}"
            )
        if self.fills and tokenizer.mask_id is None:
            raise ValueError(
                "`tokenizer` must have a mask token, for which the model finds words. Received: tokenizer.mask_id=None"
            )


def _own_labels(model):
    """The labels in the config of a checkpoint with one class for each row or token; None of any other model."""
    if not (isinstance(model, PretrainedModel) and model.task in CLASSIFY):
        return None
    names = model.config.get("id2label") or {}
    labels = [name for _, name in sorted((int(index), str(name)) for index, name in names.items())]
    several = model.config.get("problem_type") in ("regression", "multi_label_classification")
    return None if several or len(labels) < 2 else labels


def check_in_graph(name, tokenizer):
    """Raises unless a tokenizer runs in a TensorFlow graph.

    Raises:
        TypeError: it doesn't; the message says why, where the tokenizer does.
    """
    if not getattr(tokenizer, "in_graph", hasattr(tokenizer, "vocabulary_size")):
        raise TypeError(
            f"`{name}` must be one that runs in a TensorFlow graph, such as BertTokenizer. Received: {name} of type "
            f"{type(tokenizer).__name__}{_because(tokenizer)}"
        )


def _because(tokenizer):
    reason = getattr(tokenizer, "not_in_graph", None)
    return f": {reason}" if reason else ""


class GeneratorExporter:
    """A `CausalLM`, a `Seq2Seq`, or another model that `keras_tx.generation.generate` takes.

    Raises:
        TypeError: a tokenizer does not run in a graph.
        ValueError: there are labels, for which such a model has no classes.
    """

    def __init__(self, model, tokenizer, source_tokenizer, generation, labels):
        if labels is not None:
            raise ValueError(
                f"`labels` are for models over classes. Received: labels={labels!r} for a model that writes"
            )
        for name, given in (("tokenizer", tokenizer), ("source_tokenizer", source_tokenizer)):
            if given is not None:
                check_in_graph(name, given)
        self.model, self.generation, self.labels = model, dict(generation or {}), None
        self.tokenizer, self.source_tokenizer = tokenizer, source_tokenizer
        self._asked = (model, self.tokenizer, self.source_tokenizer, self.generation)
        fewest = max(1, self.generation.get("min_new_tokens", 0))
        self.of_requests = {"max_new_tokens": self.generation.get("max_new_tokens", fewest)}

    def signatures(self):
        """{name: tf.function}."""
        return generator_signatures(*self._asked)

    def parity(self, signatures, texts=()):
        """What `check` compares with: what `generate` writes, and one answer of every other signature.

        Of a strategy that draws, and in half precision, there is the request alone.
        """
        draws = isinstance(self.generation.get("strategy"), Sample)
        examples = {}
        for name, function in signatures.items():
            inputs = self._request(function)
            if inputs is not None:
                drawn = draws and name in ("serving_default", "tokens")
                examples[name] = parity.generator_example(name, function, inputs, drawn, half_of(self.model))
        names = [spec.name for spec in signatures["serving_default"].input_signature]
        if names == ["text"] and not draws:
            examples["serving_default"] = self._written([*TEXTS, *texts[: parity.GIVEN]]) or examples["serving_default"]
        return {"signatures": examples}

    def _request(self, function):
        """The inputs of a signature for the first text that fits; None where nothing is known of one."""
        specs = {spec.name: spec for spec in function.input_signature}
        if self.tokenizer is not None:
            text = next((text for text in TEXTS if self._fits(text)), TEXTS[-1])
            return inputs_for(specs, [text], self)
        row = self._some_ids()
        return {
            name: tf.constant([row] if spec.shape.rank == 2 else [len(row)], spec.dtype) for name, spec in specs.items()
        }

    def _some_ids(self):
        steps = self._writer.steps
        others = {*self._writer.task.stop_tokens, *steps.padding_ids.values()}
        return [token for token in range(min(steps.vocabulary_size, 8)) if token not in others][:2]

    def _written(self, texts):
        """Examples of `serving_default`, by `generate`."""
        options = {"strategy": Greedy(), **self.generation}
        texts = [text for text in texts if self._fits(text)]
        options |= {"tokenizer": self.tokenizer, "source_tokenizer": self.source_tokenizer, "jit_compile": False}
        options["max_new_tokens"] = self._writer.max_new_tokens
        written = generate(self.model, texts, **options) if texts else []
        return [
            {"inputs": {"text": [text]}, "outputs": {"text": [one if isinstance(one, str) else one[0]]}, "tolerance": 0}
            for text, one in zip(texts, written, strict=True)
        ]

    def _fits(self, text):
        """Whether the model has positions for a text and what may be written behind it."""
        tokens, steps = self.ids_of([text])[0].shape[1], self._writer.steps
        return bool(steps.sources) or tokens + self._writer.max_new_tokens <= (steps.max_length or math.inf)

    def ids_of(self, texts):
        """Texts -> ids (B, T), lengths (B,): sources, or prompts with the start token."""
        ids, lengths = self._tokenized(tf.constant(texts, tf.string))
        return ids, tf.cast(lengths, "int32")

    @cached_property
    def _tokenized(self):
        writer = self._writer

        @tf.function(input_signature=[text_spec()], autograph=False)
        def tokenized(text):
            prompts, sources = writer.rows_of_texts([text], ["text"])
            if not sources:
                return in_graph.right_padded(prompts, writer.task.padding_id), prompts.row_lengths()
            padding_id = writer.steps.padding_ids[writer.given[0]]
            return sources[0], tf.math.count_nonzero(sources[0] != padding_id, axis=1)

        return tokenized

    @cached_property
    def _writer(self):
        return TextGenerator(*self._asked)

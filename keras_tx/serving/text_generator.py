"""A model that writes -> what its signatures share: texts or ids in, checked rows of ids, the searches, and texts out.

B prompts, S source tokens, M new tokens, n results. A model with sources (`Seq2Seq`) is given sources, and its targets
begin with the start token; any other is given prompts. Everything here is traced into graphs.
"""

import inspect
from dataclasses import replace

from keras_tx.generation import Beam, Sample, Strategy, generate, in_graph, philox
from keras_tx.generation.config import GenerationConfig
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.per_row import PerRowStrategy
from keras_tx.models.language_model import LanguageModel
from keras_tx.optional import Lazy
from keras_tx.serving.request_inputs import ids_in

tf = Lazy("tensorflow")

NEW_TOKENS = 64  # where `generation` does not say, or half of the learned positions if these are fewer
BEAMS = 4  # of the signature `beam`, where the strategy is another
_OF_A_CALL = ("model", "inputs", "tokenizer", "source_tokenizer", "return_scores", "jit_compile")


class TextGenerator:
    """What can be asked of a model that writes.

    Args:
        model: one that `keras_tx.generation.generate` takes.
        tokenizer, source_tokenizer: run in a graph; None: ids only.
        generation: dict of options of `generate`.

    Raises:
        TypeError: another strategy, or a model that is not functional.
        ValueError: an unknown option, options that contradict each other or the model, a tokenizer that does not fit
            the model, or sources without a padding id.
    """

    def __init__(self, model, tokenizer=None, source_tokenizer=None, generation=None):
        options = dict(generation or {})
        known = [name for name in inspect.signature(generate).parameters if name not in _OF_A_CALL]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"`generation` must have keys among {known}. Received: {unknown}")
        self.is_language_model = isinstance(model, LanguageModel)
        self.model = model
        writing = model._generation_model() if self.is_language_model else model
        self.steps = IncrementalModel(writing, options.pop("target", None))
        if source_tokenizer is not None and (tokenizer is None or not self.steps.sources):
            raise ValueError(
                "`source_tokenizer` is for models with sources, beside the `tokenizer` of their targets. Received: "
                f"source_tokenizer of type {type(source_tokenizer).__name__}, sources {self.steps.sources}, "
                f"tokenizer={tokenizer!r}"
            )
        self.tokenizer, self.source_tokenizer = tokenizer, source_tokenizer or tokenizer
        options.setdefault("max_new_tokens", min(NEW_TOKENS, (self.steps.max_length or 2 * NEW_TOKENS) // 2))
        self.task = GenerationConfig(self.steps, tokenizer=tokenizer, **options)
        _check_noise(self.task.strategy)
        self.max_new_tokens, self.most_tokens = self.task.max_new_tokens, None
        self.given = self.steps.sources or [self.steps.target]  # the inputs that clients fill
        self._check_model()
        if tokenizer is not None:
            self._check_tokenizers()
        self._programs = {}

    def names(self, one, several="{}"):
        """The names of the inputs of a signature: `one` if the model is given one, else `several` with each name."""
        return [one] if len(self.given) == 1 else [several.format(name) for name in self.given]

    # What comes in

    def rows_of_texts(self, texts, names):
        """Texts (B,) for each of `given` -> prompts, ragged (B, None), and sources, tensors (B, S)."""
        if self.steps.sources:
            ids = [self.source_tokenizer(one)["token_ids"] for one in texts]
            rows = [
                in_graph.ragged_rows(one, self.steps.padding_ids[name])
                for one, name in zip(ids, self.given, strict=True)
            ]
            return self._with_sources(rows, names)
        return self._prompts(self.rows_of_tokens(texts[0], self.task.start_token), names[0]), []

    def rows_of_tokens(self, texts, start=None):
        """Texts (B,) -> the ids of their tokens, ragged (B, None), behind `start`."""
        rows = self.tokenizer.tokenize(texts).with_row_splits_dtype("int64")
        if start is not None:
            rows = tf.concat([tf.fill([rows.nrows(), 1], start), rows], axis=1)
        return in_graph.ragged_rows(rows, self.steps.padding_ids[self.steps.target])

    def rows_of_ids(self, inputs, names):
        """`token_ids` (B, T) and `lengths` (B,) for each of `given` -> as `rows_of_texts`."""
        rows = []
        for index, name in enumerate(self.given):
            ids, lengths = inputs[2 * index : 2 * index + 2]
            padding_id = self.steps.padding_ids[name]
            ids = ids_in(
                ids,
                lengths,
                self.steps.vocabulary_sizes[name] or self.steps.vocabulary_size,
                padding_id or 0,
                name=names[2 * index],
                lengths_name=names[2 * index + 1],
            )
            rows.append(in_graph.ragged_rows(tf.RaggedTensor.from_tensor(ids, lengths=lengths), padding_id))
        if self.steps.sources:
            return self._with_sources(rows, names[::2])
        return self._prompts(rows[0], names[0]), []

    def _with_sources(self, rows, names):
        most = self.steps.max_source_length
        sources, rows = [], [_with_tokens(one, name) for one, name in zip(rows, names, strict=True)]
        for one, name, given in zip(rows, names, self.given, strict=True):
            one_each = tf.equal(one.nrows(), rows[0].nrows())
            one = _checked(one, one_each, f"{name} must be one for each {names[0]}. Received:", one.nrows())
            if most is not None:
                rule = f"{name} must fit into the {most} learned positions. Received: tokens"
                one = _checked(one, one.row_lengths() <= most, rule, one.row_lengths())
            sources.append(in_graph.right_padded(one, self.steps.padding_ids[given]))
        start = tf.RaggedTensor.from_tensor(tf.fill([rows[0].nrows(), 1], self.task.target_start()))
        return start, sources

    def _prompts(self, rows, name):
        rows = _with_tokens(rows, name)
        if self.most_tokens is not None:
            rule = f"{name} must be at most {self.most_tokens} tokens long. Received:"
            rows = _checked(rows, rows.row_lengths() <= self.most_tokens, rule, rows.row_lengths())
        return rows

    def fitting(self, rows, limit, names):
        """`rows`, to which `limit` tokens are added, if the model has so many positions."""
        most = self.steps.max_length
        if most is None:
            return rows
        lengths = tf.cast(rows.row_lengths(), "int32")
        rule = f"{names} must fit into the {most} learned positions. Received: tokens"
        return _checked(rows, lengths + limit <= most, rule, lengths + tf.maximum(limit, 0))

    # What is done

    def write(self, prompts, sources, name, strategy=None):
        """The new tokens (B, n, M), their lengths (B, n) and scores (B, n), by the strategy of `generation`."""
        strategy = self.task.strategy if strategy is None else strategy
        strategy = self.beam() if isinstance(strategy, Beam) else strategy
        if strategy not in self._programs:
            self._programs[strategy] = self._program(strategy)
        prompts = self.fitting(prompts, self.max_new_tokens, f"{name} and the new tokens")
        return self._programs[strategy](prompts, sources)

    def _program(self, strategy):
        """A function of prompts and sources, traced once for all signatures that call it."""
        rows = tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int64)
        sources = [tf.TensorSpec([None, None], tf.int32) for _ in self.steps.sources]

        @tf.function(input_signature=[rows, sources], autograph=False)
        def program(prompts, sources):
            noise = None
            if isinstance(strategy, Sample):
                noise = philox.uniform(_seeds(strategy.seed, prompts.nrows()), self.max_new_tokens)
            return self._searched(strategy, prompts, sources, tf.constant(self.max_new_tokens), noise)

        return program

    def write_by_row(self, prompts, sources, name, limit, temperature, top_k, top_p, seed):
        """As `write`, by numbers (B,) for each row."""
        prompts = self.with_numbers(prompts, name, limit, temperature, top_k, top_p, seed)
        noise = philox.uniform(seed, self.max_new_tokens)
        return self._searched(PerRowStrategy(temperature, top_k, top_p), prompts, sources, limit, noise)

    def with_numbers(self, prompts, name, limit, temperature, top_k, top_p, seed):
        """`prompts`, once it is sure that the numbers are right, and that they and `limit` tokens have positions."""
        numbers = {"max_new_tokens": limit, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        for key, value in numbers.items():
            one_each = tf.equal(tf.size(value, tf.int64), prompts.nrows())
            prompts = _checked(prompts, one_each, f"{key} must be one for each {name}. Received:", value)
        least = self.task.constraints.least_new_tokens
        rules = {
            "max_new_tokens": (
                (limit >= least) & (limit <= self.max_new_tokens),
                f"in [{least}, {self.max_new_tokens}]",
            ),
            "temperature": ((temperature >= 0) & tf.math.is_finite(temperature), "0, which is greedy, or above"),
            "top_k": (top_k >= 0, "0, which is all tokens, or above"),
            "top_p": ((top_p > 0) & (top_p <= 1), "in (0, 1]"),
        }
        for key, (right, rule) in rules.items():
            prompts = _checked(prompts, right, f"{key} must be {rule}. Received:", numbers[key])
        return self.fitting(prompts, limit, f"{name} and max_new_tokens")

    def _searched(self, strategy, prompts, sources, limit, noise):
        loop = self.task.decode_loop(self.max_new_tokens, strategy)
        ids, scores = in_graph.generate(loop, prompts, sources, limit, noise)
        limit = tf.reshape(limit, [-1, 1])
        return ids, in_graph.lengths(ids, self.task.stop_tokens, limit), scores

    def beam(self):
        """The strategy of the signature `beam`: all results of all beams, unless `generation` says how many."""
        strategy = self.task.strategy
        if not isinstance(strategy, Beam):
            beams = min(BEAMS, self.steps.vocabulary_size)
            return Beam(beams, num_return_sequences=beams)
        if strategy.num_return_sequences > 1:
            return strategy
        return replace(strategy, num_return_sequences=strategy.num_beams)

    def score(self, prompts, sources, target, name):
        """What the model as a whole gives to the texts `target` (B,) behind the prompts, a stop token at their end."""
        rows = self.rows_of_tokens(target)
        if self.task.stop_tokens:
            rows = tf.concat([rows, tf.fill([rows.nrows(), 1], self.task.stop_tokens[0])], axis=1)
        one_each = tf.equal(rows.nrows(), prompts.nrows())
        rows = _checked(rows, one_each, f"target must be one for each {name}. Received:", target)
        if self.tokenizer.max_length is not None:
            rule = f"target must be at most {self.tokenizer.max_length} tokens long. Received:"
            rows = _checked(rows, rows.row_lengths() <= self.tokenizer.max_length, rule, rows.row_lengths())
        whole = self.fitting(tf.concat([prompts, rows], axis=1), -1, f"{name} and target")
        logits = self.steps.full_logits(
            [*sources, in_graph.right_padded(whole[:, :-1], self.task.padding_id)]
        )  # (B, T, V)
        logits = tf.cast(logits, "float32")
        follows = in_graph.right_padded(whole[:, 1:], self.task.padding_id)
        log_probs = tf.gather(logits, follows, batch_dims=2) - tf.reduce_logsumexp(logits, axis=-1)

        ids, real = in_graph.right_padded(rows, self.task.padding_id), tf.sequence_mask(rows.row_lengths())
        real = tf.pad(real, [[0, 0], [0, tf.shape(ids)[1] - tf.shape(real)[1]]])
        places = tf.cast(prompts.row_lengths() - 1, "int32")[:, None] + tf.range(tf.shape(ids)[1])
        places = tf.minimum(places, tf.shape(log_probs)[1] - 1)
        log_probs = tf.where(real, tf.gather(log_probs, places, batch_dims=1), 0.0)
        return {
            "log_probability": tf.reduce_sum(log_probs, axis=1),
            "tokens": tf.where(real, self.tokens(ids), ""),
            "token_log_probabilities": log_probs,
            "num_tokens": tf.cast(rows.row_lengths(), "int32"),
        }

    # What goes out

    def new_rows(self, ids, lengths):
        """Ids (B, M) and their lengths (B,) -> ragged (B, None)."""
        return tf.RaggedTensor.from_tensor(ids, lengths=tf.cast(lengths, "int64"))

    def texts(self, prompts, ids, lengths):
        """What `generate` returns for new ids (B, n, M): texts (B, n), with the prompts where there is no source."""
        count = ids.shape[1]
        rows = self.new_rows(tf.reshape(ids, [-1, ids.shape[2]]), tf.reshape(lengths, [-1]))
        if not self.steps.sources:
            prompts = tf.gather(prompts, tf.repeat(tf.range(prompts.nrows()), count))
            rows = tf.concat([prompts, rows], axis=1)
        return tf.reshape(tf.convert_to_tensor(self.tokenizer.decode(rows), tf.string), [-1, count])

    def tokens(self, ids, tokenizer=None):
        """Ids (B, T) -> the strings of their tokens (B, T); "" for an id that the vocabulary does not have."""
        vocabulary = (tokenizer or self.tokenizer).vocabulary
        known = (ids >= 0) & (ids < len(vocabulary))
        return tf.gather(tf.constant([*vocabulary, ""]), tf.where(known, ids, len(vocabulary)))

    # What must be

    def _check_model(self):
        if not self.steps.sources:
            return
        self.task.target_start()
        without = [name for name in self.steps.sources if self.steps.padding_ids[name] is None]
        if without:
            raise ValueError(
                "`model` must have a padding id for its sources, or rows of different lengths could not share a batch. "
                f"Received: padding_id=None for {without}"
            )

    def _check_tokenizers(self):
        sizes, steps = self.steps.vocabulary_sizes, self.steps
        fits = [("tokenizer", self.tokenizer, steps.target)]
        fits += [("source_tokenizer", self.source_tokenizer, name) for name in steps.sources]
        for name, tokenizer, given in fits:
            size = sizes[given] or steps.vocabulary_size
            if tokenizer.vocabulary_size > size:
                raise ValueError(
                    f"`{name}` must not have more tokens than the model. Received: "
                    f"{name}.vocabulary_size={tokenizer.vocabulary_size}, {size} rows for '{given}'"
                )
            if given in steps.sources and tokenizer.pad_id != steps.padding_ids[given]:
                raise ValueError(
                    f"`{name}` must pad with the id that the model takes for padding. Received: "
                    f"{name}.pad_id={tokenizer.pad_id}, padding_id={steps.padding_ids[given]}"
                )
        of_inputs = self.source_tokenizer if steps.sources else self.tokenizer
        if of_inputs.max_length is None and (steps.sources or steps.max_length is None):
            raise ValueError(
                "`tokenizer` must have a `max_length`, or one long text takes all memory of a server. Received: "
                "tokenizer.max_length=None"
            )
        if steps.max_length is None and not steps.sources:
            self.most_tokens = of_inputs.max_length


def _check_noise(strategy):
    if type(strategy).noise not in (Strategy.noise, Sample.noise):
        raise ValueError(
            "`generation` must have a strategy without `noise` of its own, which is NumPy's and not in the graph. "
            f"Received: strategy={strategy!r}"
        )


def _seeds(seed, count):
    """A seed for each row: the one of `Sample`, or any, which no server repeats after a restart."""
    if seed is None:
        return tf.raw_ops.RandomUniformInt(shape=[count], minval=tf.int64.min, maxval=tf.int64.max)
    return tf.fill([count], tf.constant((seed + 2**63) % 2**64 - 2**63, tf.int64))


def _with_tokens(rows, name):
    return _checked(
        rows, rows.row_lengths() > 0, f"{name} must have a token in each row. Received: tokens", rows.row_lengths()
    )


def _checked(rows, right, rule, received):
    """`rows`, once it is sure that all is `right`."""
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(right), [rule, received])]):
        return tf.RaggedTensor.from_row_splits(tf.identity(rows.values), tf.identity(rows.row_splits), validate=False)

"""A checkpoint as a functional model: `input_ids` (B, T), `attention_mask`, ... -> a dict by Hugging Face's names."""

import copy

import keras

from keras_tx import generation
from keras_tx.layers import Encoder
from keras_tx.layers.configs import serialized_policy
from keras_tx.layers.ids import check_ids, check_integers
from keras_tx.pretrained import array_prompts
from keras_tx.pretrained.registry import read_family

_IDS = {"input_ids": "embedding", "decoder_input_ids": "target_embedding"}  # the `TokenEmbedding` in the family
_MASKS = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}


@keras.saving.register_keras_serializable(package="keras_tx")
class PretrainedModel(keras.Model):
    """A functional `keras.Model` of this package's layers, with inputs and outputs as Hugging Face names them.

    `from_pretrained` makes it and fills it; made directly it has new weights. It takes a dict, ids alone, or ids and
    keyword arguments: arrays, in `fit` and `predict`, or symbolic tensors of a functional model around it.

        encoder = keras_tx.pretrained.from_pretrained("bert-base-uncased", task="base")
        ids = keras.Input((None,), dtype="int32")
        mask = keras.Input((None,), dtype="int32")
        pooled = encoder(ids, attention_mask=mask)["pooler_output"]
        classifier = keras.Model([ids, mask], keras.layers.Dense(3)(pooled))

    What is not given is as in Hugging Face: without `attention_mask` every token is real, the padding token too;
    `token_type_ids` are zeros. Outputs are a dict: `last_hidden_state` (B, T, D), `pooler_output` (B, D), `logits`,
    `start_logits` and `end_logits` (B, T), as the task has them, and on request `hidden_states`.

    Args:
        config: the dict of config.json.
        task: "base", "masked_lm", "sequence_classification", ...; None: what `architectures` in the config mean.
        output_hidden_states: whether `hidden_states` is among the outputs: a tuple, the embeddings and the output of
            each layer, (B, T, D).
        tied: whether logits are products with the token table; None: as the config says.
        skip_padding: of the `Encoder`, whose outputs at padding tokens are then 0.
        absent: optional parts that are left out, as "pooler".
        generation_config: the dict of generation_config.json: what `generate` does where it is not told.
        stored_dtypes: {name of a tensor: dtype} for `save_pretrained`, and the dtype of all others under "*".
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a model type or task that is not known, or a config that lacks a key or has a value that is not
            supported; for a `skip_padding` without an `Encoder`; the message names it.
    """

    def __init__(
        self,
        config,
        task=None,
        *,
        output_hidden_states=False,
        skip_padding=False,
        tied=None,
        absent=(),
        generation_config=None,
        stored_dtypes=None,
        dtype=None,
        **kwargs,
    ):
        family = read_family(config, task, tied=tied, absent=absent, dtype=dtype)
        inputs = family.symbolic_inputs()
        outputs = family.outputs(inputs, output_hidden_states)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
        encoders = [layer for layer in self.layers if isinstance(layer, Encoder)]
        if skip_padding and not encoders:
            raise ValueError(
                "`skip_padding` needs a model with an encoder over tokens. Received: "
                f"skip_padding={skip_padding!r}, model_type={config['model_type']!r}"
            )
        for encoder in encoders:
            encoder.skip_padding = skip_padding
        # Kept from Keras, which would track them: the layers of the family are those of the model.
        object.__setattr__(self, "family", family)
        object.__setattr__(self, "generation_config", copy.deepcopy(dict(generation_config or {})))
        object.__setattr__(self, "stored_dtypes", dict(stored_dtypes or {}))
        object.__setattr__(self, "_policy", keras.dtype_policies.get(dtype or keras.config.dtype_policy()))
        object.__setattr__(self, "_writing", None)
        object.__setattr__(self, "_output_hidden_states", bool(output_hidden_states))

    @property
    def config(self) -> dict:
        """A copy of the dict of config.json."""
        return copy.deepcopy(self.family.config.values)

    @property
    def task(self) -> str:
        return self.family.task

    @property
    def tied(self) -> bool:
        """Whether logits are products with the token table."""
        return self.family.tied

    def __call__(self, inputs, *args, **kwargs):
        named = {name: kwargs.pop(name) for name in self.family.inputs if name in kwargs}
        return super().__call__(self._named(inputs, named), *args, **kwargs)

    def call(self, inputs, training=None, mask=None, **kwargs):
        inputs = self._named(inputs)
        for name, size in self._ids.items():
            if inputs[name] is not None:
                check_ids(name, inputs[name], size)  # Keras would cast floats, and cut large integers
        return super().call(inputs, training=training, mask=mask, **kwargs)

    def compute_output_spec(self, inputs, training=None, mask=None):
        inputs = self._named(inputs)
        for name in self._ids:
            if inputs[name] is not None:
                check_integers(name, inputs[name])
        # Keras finds no shapes for a None. The symbolic input itself has none that contradict the others.
        symbolic = {x.name: keras.KerasTensor(x.shape, dtype=x.dtype) for x in self.inputs}
        inputs = {name: symbolic[name] if x is None else x for name, x in inputs.items()}
        return super().compute_output_spec(inputs, training=training, mask=mask)

    @property
    def _ids(self):
        """{input of token ids: size of the vocabulary}."""
        return {name: getattr(self.family, _IDS[name]).vocabulary_size for name in self.family.inputs if name in _IDS}

    def _named(self, inputs, named=None):
        """What a caller gave -> a dict of all inputs, None for those that are left out."""
        names, needed = self.family.inputs, self.family.needed
        if not isinstance(inputs, dict):
            several = isinstance(inputs, (list, tuple)) and all(hasattr(one, "shape") for one in inputs)
            inputs = dict(zip(names, inputs if several else [inputs], strict=False))
        given = {**inputs, **(named or {})}
        missing = [name for name in needed if given.get(name) is None]
        if missing or not given.keys() <= set(names) or len(given) < len(inputs) + len(named or {}):
            raise ValueError(
                f"`inputs` must have {list(needed)}, and may have {list(names)}, each once. Received: "
                f"{[*inputs, *(named or {})]}"
            )
        return {name: given.get(name) for name in names}

    def generate(self, inputs, strategy=None, **options):
        """Writes on from prompts, or the targets of sources: `keras_tx.generation.generate`, which see.

        What is not given is what `generation_config` says: the strategy, start and stop tokens, lengths, forbidden and
        forced tokens. Beside what `generate` takes, `inputs` may be a dict with `input_ids` and `attention_mask`. For
        arrays (B, P) the answer is an array as in transformers: prompts are left padded, answers filled up behind their
        end.

        Raises:
            ValueError: for a model that does not write, and as `keras_tx.generation.generate`.
        """
        model = self._generation_model()
        strategy, options = self._as_configured(inputs, strategy, options)
        names = [x.name for x in model.inputs]
        given = dict(inputs) if isinstance(inputs, dict) else {names[0]: inputs}
        masks = {name: given.pop(mask, None) for name, mask in _MASKS.items()}
        if not given.keys() <= set(names):
            raise ValueError(f"`inputs` must have {names}, and may have their masks. Received: {[*inputs]}")
        is_array = all(map(array_prompts.is_array, given.values())) and all(
            len(value.shape) == 2 for value in given.values()
        )
        if not is_array and all(mask is None for mask in masks.values()):
            return generation.generate(model, given, strategy, **options)

        padding_id = self._padding_id()
        rows = {
            name: array_prompts.rows_of(value, masks[name], getattr(self.family, _IDS[name]).padding_id)
            for name, value in given.items()
        }
        answers = generation.generate(model, rows, strategy, **options)
        answers, scores = answers if options.get("return_scores") else (answers, None)
        prompts = (given[names[0]], rows[names[0]]) if len(names) == 1 else None
        laid_out = array_prompts.laid_out(answers, prompts, padding_id)
        return (laid_out, scores) if options.get("return_scores") else laid_out

    def stream(self, inputs, strategy=None, **options):
        """Yields new tokens as they come: `keras_tx.generation.stream`, with what `generation_config` says.

        Args:
            inputs: texts with a `tokenizer`, or ids, of the model's first input; or a dict of inputs without masks.

        Raises:
            ValueError: for a model that does not write, a strategy with beams, and as `keras_tx.generation.stream`.
        """
        model = self._generation_model()
        strategy, options = self._as_configured(inputs, strategy, options)
        return generation.stream(model, inputs, strategy, **options)

    def _as_configured(self, inputs, strategy, options):
        strategy = self.family.strategy(self.generation_config) if strategy is None else strategy
        most = self.family.max_length(self.generation_config)
        if most is not None and "max_new_tokens" not in options:
            prompt = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
            longest = array_prompts.longest(prompt, options.get("tokenizer"))
            if longest >= most:
                raise ValueError(
                    "`max_new_tokens` must be given for prompts as long as `max_length` of the generation config. "
                    f"Received: a prompt of {longest}, max_length={most}"
                )
            options = {**options, "max_new_tokens": most - longest}
        found = self.family.generation_options(self.generation_config)
        embedding = getattr(self.family, "target_embedding", None) or self.family.embedding
        # Small models have the stop token of large ones in their config: no row ends by it.
        stops = [token for token in found.get("stop_tokens", ()) if token in range(embedding.vocabulary_size)]
        return strategy, {**found, "stop_tokens": tuple(stops), **options}

    def _padding_id(self):
        """What fills up behind the end of an answer: the padding token, or where there is none the one that ends it."""
        for name in ("pad_token_id", "eos_token_id"):
            for values in (self.generation_config, self.family.config.values):
                if values.get(name) is not None:
                    return values[name][0] if isinstance(values[name], list) else values[name]
        return 0

    def _generation_model(self):
        """The functional model over ids alone that `generate` runs, of the same layers."""
        if self._writing is None:
            object.__setattr__(self, "_writing", self.family.writing())
        if self._writing is None:
            raise ValueError(
                "`generate` needs a model that writes, of the task 'causal_lm' or 'conditional_generation'. Received: "
                f"task={self.task!r}"
            )
        return self._writing

    def get_config(self):
        return {
            "name": self.name,
            "trainable": self.trainable,
            "config": self.config,
            "task": self.task,
            "output_hidden_states": self._output_hidden_states,
            "skip_padding": any(layer.skip_padding for layer in self.layers if isinstance(layer, Encoder)),
            "tied": self.tied,
            "absent": list(self.family.config.absent),
            "generation_config": copy.deepcopy(self.generation_config),
            "stored_dtypes": dict(self.stored_dtypes),
            "dtype": serialized_policy(self, self._policy),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**{**config, "dtype": keras.dtype_policies.get(config["dtype"])})

"""A checkpoint as a functional Keras model, with inputs and outputs by Hugging Face's names."""

import copy
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import keras

from keras_tx import generation
from keras_tx.generation.model_checks import checked_functional
from keras_tx.generation.prompts import check_concrete, is_text, of_sides
from keras_tx.generation.strategy import Strategy
from keras_tx.internals.keras_jax_steps import sync_variables
from keras_tx.internals.keras_models import set_initializer, variables_initialized_at_end
from keras_tx.layers import Encoder, trainable
from keras_tx.layers.configs import serialized_policy
from keras_tx.layers.unpadding import padding_unread
from keras_tx.locks import lock_of
from keras_tx.models.base import Twins, clonable, with_twins
from keras_tx.models.checked_data import CheckedModel
from keras_tx.pretrained import array_prompts, generation_config
from keras_tx.pretrained import inputs as inputs_by_name
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family
from keras_tx.pretrained.initial_weights import initial_weights
from keras_tx.pretrained.registry import read_family
from keras_tx.types import DType

_IDS = {
    "input_ids": "embedding",
    "decoder_input_ids": "target_embedding",
}  # {input: the attribute of the family that embeds it}
GENERATIVE = ("causal_lm", "conditional_generation")  # tasks
CLASSIFYING = ("sequence_classification", "token_classification", "image_classification")
_TOKEN_TASKS = ("masked_lm", "token_classification")  # whose losses leave padding out


@keras.saving.register_keras_serializable(package="keras_tx")
class PretrainedModel(CheckedModel):
    """A Hugging Face model as a functional `keras.Model`, with inputs and outputs by Hugging Face's names.

    `from_pretrained` returns one with the weights of a checkpoint. The constructor initializes the weights randomly,
    from the same distributions as transformers for this config, such as by its `initializer_range`. Four things differ:
    rows of padding tokens are random and not zeros; norms of T5 begin at 1; sinusoidal positions of DistilBERT are
    initialized like learned ones; ModernBERT's distribution is cut off at two standard deviations.

    Call the model with a dict, such as a tokenizer of transformers returns, with ids alone, or with ids and keyword
    arguments: arrays in `fit` and `predict`, or symbolic tensors of your functional model.

    Inputs that you leave out have the same defaults as in transformers: without `attention_mask` all tokens are real,
    even padding tokens, unless a Keras layer attached a mask to the ids, which is used then; `token_type_ids` are
    zeros. A mask is boolean, or 1 at real tokens and 0 at padding tokens. The outputs are a dict: depending on the task
    `last_hidden_state` (B, T, D), `pooler_output` (B, D), `logits`, or `start_logits` and `end_logits` (B, T);
    with `output_hidden_states` also `hidden_states`.

    Args:
        config: the content of config.json, a dict.
        task: "base", "masked_lm", "sequence_classification", ... None: the task of `architectures` in the config.
        output_hidden_states: whether the outputs include `hidden_states`: a tuple with the embeddings and the output of
            each layer, (B, T, D) each.
        tied: whether the token embeddings are also the kernel of the output layer. None: `tie_word_embeddings` of the
            config.
        skip_padding: whether to skip padding tokens, as for `keras_tx.layers.Encoder`; the outputs there are then 0.
            None: on TensorFlow with only CPUs and without XLA, if every output is for a whole text, as for
            "sequence_classification"; for "masked_lm" and "token_classification" in training, where losses and metrics
            leave padding out. Pooling of the first token then needs texts that do not begin with padding.
        absent: names of optional parts to leave out, such as "pooler".
        generation_config: the content of generation_config.json, a dict: the defaults of `generate`.
        stored_dtypes: {name of a tensor: dtype} for `save_pretrained`, with the key "*" for all other tensors. None:
            "float32" for all.
        dtype: the dtype policy of the layers.

    Raises:
        ValueError: the model type or task is unknown, the config lacks a key or has an unsupported value, or
            `skip_padding` is set for a model without an `Encoder`. The message names the cause.

    Examples:
        >>> config = {"model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1}
        >>> config |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 16}
        >>> encoder = keras_tx.pretrained.PretrainedModel(config, "base")
        >>> ids = keras.Input((None,), dtype="int32")
        >>> mask = keras.Input((None,), dtype="int32")
        >>> pooled = encoder(ids, attention_mask=mask)["pooler_output"]
        >>> classifier = keras.Model([ids, mask], keras.layers.Dense(3)(pooled))
        >>> classifier.predict([np.array([[5, 7, 0]]), np.array([[1, 1, 0]])], verbose=0).shape
        (1, 3)
    """

    @clonable
    def __init__(
        self,
        config: dict[str, Any] | Config,
        task: str | None = None,
        *,
        output_hidden_states: bool = False,
        skip_padding: bool | None = None,
        tied: bool | None = None,
        absent: Collection[str] = (),
        generation_config: dict[str, Any] | None = None,
        stored_dtypes: dict[str, str] | None = None,
        dtype: DType = None,
        **kwargs: Any,
    ) -> None:
        with variables_initialized_at_end():
            family = read_family(config, task, tied=tied, absent=absent, dtype=dtype)
            inputs = family.symbolic_inputs()
            outputs = family.outputs(inputs, output_hidden_states)
            super().__init__(inputs=inputs, outputs=outputs, **kwargs)
            for variable, initializer in initial_weights(family):
                set_initializer(variable, initializer)
        encoders = [layer for layer in self.layers if isinstance(layer, Encoder)]
        if skip_padding and not encoders:
            raise ValueError(
                "`skip_padding` needs a model with an `Encoder`. Received: "
                f"skip_padding={skip_padding!r}, model_type={family.config.values['model_type']!r}"
            )
        for encoder in encoders:
            encoder.skip_padding = skip_padding
        self._set(
            family=family,
            generation_config=copy.deepcopy(dict(generation_config or {})),
            stored_dtypes=dict(stored_dtypes or {}),
            _policy=keras.dtype_policies.get(keras.config.dtype_policy() if dtype is None else dtype),
            _output_hidden_states=bool(output_hidden_states),
        )
        self._check_generation_config()

    def _set(self, family: Family, **attributes: Any) -> None:
        """Sets attributes that Keras does not track; it would track the layers of the family a second time."""
        family.limit_positions()
        for name, value in {"family": family, "_generator": None, **attributes}.items():
            object.__setattr__(self, name, value)

    def _take_over(self, source: Any, twins: Twins) -> None:
        names = ("generation_config", "stored_dtypes", "_policy", "_output_hidden_states", "source")
        kept = {name: copy.deepcopy(getattr(source, name)) for name in names if hasattr(source, name)}
        self._set(with_twins(source.family, twins), **kept)
        for variable, initializer in initial_weights(self.family):  # `clone_model` has created them from the layers
            if id(variable) not in source.ids_of_given_variables:
                variable.assign(initializer(variable.shape, dtype=variable.dtype))

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the content of config.json."""
        return copy.deepcopy(self.family.config.values)

    @property
    def task(self) -> str:
        return str(self.family.task)

    @property
    def tied(self) -> bool:
        """Whether the token embeddings are also the kernel of the output layer."""
        return bool(self.family.tied)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("mask", None)
        if mask is not None:
            masks = [name for name in self.family.inputs if name.endswith("_mask")]
            raise ValueError(
                f"`mask` must be None; masks of this model are {masks}. Received: mask of type {type(mask).__name__}"
            )
        further = {name: kwargs.pop(name) for name in self.family.inputs if name in kwargs}
        named = inputs_by_name.by_name(self.family, _as_dict(inputs), further)
        inputs_by_name.check_shapes(self, named)
        return super().__call__(inputs_by_name.with_keras_masks(named), *args, **kwargs)

    # Keras would fill an argument `mask` with the masks of the ids, and attach them to inputs.
    def call(self, inputs: Any, training: bool | None = None, **kwargs: Any) -> Any:
        inputs = inputs_by_name.checked(self._named(inputs), self._ids)
        with padding_unread(self._padding_is_unread(training)):
            return super().call(inputs, training=training, **kwargs)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "_new_layers"):
            self._new_layers.warn_if_frozen()
        return super().fit(*args, **kwargs)

    def _returns_logits(self) -> bool:
        return self.task != "base"

    def _padding_of_labels(self) -> int | None:
        found: Any = None
        if self.task in GENERATIVE:
            found = (getattr(self.family, "target_embedding", None) or self.family.embedding).padding_id
        elif self.task == "masked_lm":  # masks tell its embedding where padding is, but config.json has the id
            found = self.family.config.values.get("pad_token_id", getattr(self.family, "padding_id", None))
        return found if type(found) is int else None

    def _padding_is_unread(self, training: bool | None) -> bool:
        """Whether the outputs, in training only the loss, do not depend on those of the encoder at padding tokens."""
        if len(self.outputs) == 1 and self.task in _TOKEN_TASKS:
            return bool(training)
        return not any(len(x.shape) > 2 or x.shape[-1] is None for x in self.outputs)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> Any:
        inputs = inputs_by_name.checked(self._named(inputs), self._ids)
        # Keras cannot infer shapes from None. The symbolic input has the shape (None, None), which fits the others.
        symbolic = {x.name: keras.KerasTensor(x.shape, dtype=x.dtype) for x in self.inputs}
        inputs = {name: symbolic[name] if x is None else x for name, x in inputs.items()}
        return super().compute_output_spec(inputs, training=training)

    @property
    def _ids(self) -> dict[str, int]:
        """{name of an input of token ids: size of its vocabulary}."""
        return {name: getattr(self.family, _IDS[name]).vocabulary_size for name in self.family.inputs if name in _IDS}

    def _id_sizes(self) -> dict[str, int]:
        segments = "token_type_ids" in self.family.inputs
        return {**self._ids, **({"token_type_ids": self.family.embedding.num_segments} if segments else {})}

    def _ids_in_each_row(self) -> dict[str, tuple[int, str]]:
        at_last = getattr(self.family, "at_last", None) if self.task == "sequence_classification" else None
        return {} if at_last is None else {"input_ids": (at_last.token_id, "eos_token_id")}

    def _input_names(self) -> list[str]:
        return list(self.family.inputs)

    def _named(self, inputs: Any) -> dict[str, Any]:
        return inputs_by_name.by_name(self.family, inputs, {})

    def generate(self, inputs: Any, strategy: Strategy | None = None, **options: Any) -> Any:
        """Generates a continuation of each prompt, or a target sequence for each source.

        It calls `keras_tx.generation.generate`, with defaults from `generation_config`: the strategy, start and stop
        tokens, lengths, forbidden and forced tokens. `inputs` may also be a dict with `input_ids` and `attention_mask`.
        For arrays (B, P) the result is an array as in transformers: prompts are padded on the left, continuations on
        the right. Of a model with sources it has the new tokens alone, without the token that begins a target. Without
        an `attention_mask`, tokens with the padding id are padding; with one, a prompt may contain this id as a token.

        Raises:
            ValueError: the model is not generative, an `attention_mask` is 1 at the padding id of a source, or for the
                reasons of `keras_tx.generation.generate`.
        """
        model, inputs = self._generation_model(), _as_dict(inputs)
        names = [x.name for x in model.inputs]
        given, rows = self._prompts(inputs, names)
        strategy, options = self._as_configured(inputs, strategy, options)
        if rows is None:
            return generation.generate(model, given, strategy, **options)
        answers = generation.generate(model, rows, strategy, **options)
        answers, scores = answers if options.get("return_scores") else (answers, None)
        prompts = (given[names[0]], rows[names[0]]) if len(names) == 1 else None
        array = array_prompts.as_array(answers, prompts, self._padding_id())
        return (array, scores) if options.get("return_scores") else array

    def stream(self, inputs: Any, strategy: Strategy | None = None, **options: Any) -> Iterator[Any]:
        """Yields new tokens while they are generated, as `keras_tx.generation.stream` does.

        The defaults come from `generation_config`, as for `generate`.

        Args:
            inputs: as for `generate`.
            strategy: `Greedy` or `Sample`. None: that of `generation_config`.
            options: further arguments of `keras_tx.generation.generate`.

        Raises:
            ValueError: the model is not generative, or for the reasons of `keras_tx.generation.stream`.
        """
        model, inputs = self._generation_model(), _as_dict(inputs)
        given, rows = self._prompts(inputs, [x.name for x in model.inputs])
        strategy, options = self._as_configured(inputs, strategy, options)
        pieces: Iterator[Any] = generation.stream(model, given if rows is None else rows, strategy, **options)
        return pieces

    def _policy_of_layers(self) -> Any:
        return self._policy

    def _prompts(self, inputs: Any, names: list[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What the caller gave for the inputs `names`, and the rows of its real tokens if it is arrays or has masks."""
        check_concrete(inputs)
        given = dict(inputs) if isinstance(inputs, dict) else {names[0]: inputs}
        masks = {name: given.pop(inputs_by_name.MASKS[name], None) for name in names if name in given}
        if not given.keys() <= set(names):
            raise ValueError(
                f"The keys of `inputs` must be among {names}, or be masks of the inputs given. Received: {[*inputs]}"
            )
        are_arrays = {name: array_prompts.is_array(value) and len(value.shape) == 2 for name, value in given.items()}
        # As in transformers, all ids of a target are real without a mask.
        if not all(are_arrays.values()) and all(mask is None for mask in masks.values()):
            rows = {name: array_prompts.rows_of(given[name], None, None) for name in names[1:] if are_arrays.get(name)}
            return {**given, **rows}, None

        padding_ids = {name: None for name in names} | {names[0]: getattr(self.family, _IDS[names[0]]).padding_id}
        rows = {name: array_prompts.rows_of(value, masks[name], padding_ids[name]) for name, value in given.items()}
        if len(names) > 1 and names[0] in rows:  # the model finds the padding of a source by its id
            array_prompts.check_source(rows[names[0]], padding_ids[names[0]])
        return given, rows

    def _as_configured(
        self, inputs: Any, strategy: Strategy | None, options: dict[str, Any]
    ) -> tuple[Strategy, dict[str, Any]]:
        self._check_generation_config()
        strategy = self.family.strategy(self.generation_config) if strategy is None else strategy
        found, tokenizer = self.family.generation_options(self.generation_config), options.get("tokenizer")
        longest, limits = 1, "max_new_tokens" not in options
        if self.task == "causal_lm" and limits:
            prompt = next(iter(inputs.values()), None) if isinstance(inputs, dict) else inputs
            longest = array_prompts.longest(prompt, tokenizer, getattr(tokenizer, "cls_id", None))
        elif self.task != "causal_lm":
            target = inputs.get("decoder_input_ids") if isinstance(inputs, dict) else None
            start = options.get("start_token", found.get("start_token"))
            tokenizer, _ = of_sides(tokenizer, options.get("source_tokenizer"), True)
            longest = 1 if target is None else array_prompts.longest(target, tokenizer, start)
            found = self.family.generation_options(self.generation_config, longest)
            if target is not None and not is_text(target):
                found.pop("start_token", None)  # ids of a target already begin with theirs
        most = self.family.max_length(self.generation_config, longest) if limits else None
        if most is not None and longest >= most:
            raise ValueError(
                "`max_new_tokens` must be given if the prompt is as long as `max_length` of the generation config. "
                f"Received: a prompt of {longest}, max_length={most}"
            )
        return strategy, {**found, **({} if most is None else {"max_new_tokens": most - longest}), **options}

    def _check_generation_config(self) -> None:
        """Checks the settings of `generate`, which older checkpoints have in config.json."""
        generation_config.check(self.generation_config, "generation_config.json")
        if not self.generation_config and self.task in GENERATIVE:
            generation_config.check(self.family.config.values, "config.json")

    def _padding_id(self) -> int:
        """The id that pads generated rows: the padding token, or the first end-of-sequence token if there is none."""
        values = self.generation_config or self.family.config.values
        found = [values[name] for name in ("pad_token_id", "eos_token_id") if values.get(name) is not None]
        first = found[0] if found else 0
        return int(first[0] if isinstance(first, list) else first)

    def _generation_model(self) -> keras.Model:
        """The functional model from ids to logits that `generate` runs; it shares the layers of this model."""
        sync_variables(self)
        checked_functional(self)
        if self._generator is None:
            with lock_of(self):
                if self._generator is None:
                    object.__setattr__(self, "_generator", self.family.generation_model())
        if self._generator is None:
            raise ValueError(
                f"`generate` needs a generative model, of the task {' or '.join(map(repr, GENERATIVE))}. Received: "
                f"task={self.task!r}"
            )
        return self._generator

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "trainable": self.trainable,
            "config": self.config,
            "task": self.task,
            "output_hidden_states": self._output_hidden_states,
            "skip_padding": next((layer.skip_padding for layer in self.layers if isinstance(layer, Encoder)), None),
            "tied": self.tied,
            "absent": list(self.family.config.absent),
            "generation_config": copy.deepcopy(self.generation_config),
            "stored_dtypes": dict(self.stored_dtypes),
            "dtype": serialized_policy(self, self._policy),
            **trainable.config_of(self),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> "PretrainedModel":
        return cls(**{**config, "dtype": keras.dtype_policies.get(config["dtype"])})


def _as_dict(inputs: Any) -> Any:
    """A mapping that is no dict, such as a `BatchEncoding` of transformers, as a dict; anything else as it is."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs

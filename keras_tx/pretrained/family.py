"""The base class of checkpoint families, which create layers from a config, connect them, and map their tensors.

Each module in families/ has the classes of one family. Read families/bert.py first. B batch, T tokens, D hidden, L
layers.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx import generation
from keras_tx.generation.strategy import Strategy
from keras_tx.models.base import HasLayers
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

_NOT_SAMPLED = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "num_beams": 1}  # {setting: neutral value}


class Family(HasLayers):
    """The base class of all families.

    A subclass creates its layers in `__init__`, connects them in `outputs`, and maps each variable to a tensor in
    `rows`. `outputs` is called once; `rows` is called when the layers are built.

    Attributes of the class:
        model_types: the values of `model_type` in config.json.
        tasks: {task: architecture}, or {task: architectures} with one for each of `model_types`.
        inputs: the names of the inputs.
        needed: the inputs that cannot be left out.
        prefix: the prefix of the base model's tensors in a checkpoint with a head, such as "bert."; rows include it.
        other_prefix: the prefix in the checkpoints of `other_tasks`.
        embedding_key: the name of the token table, without prefix. It identifies checkpoints without prefix.
        head_key: the name of the table of the logits, which a checkpoint with tied logits lacks, or stores as a copy.
        tied_by_default: whether logits are tied if config.json has no `tie_word_embeddings`.
        tied_by_file: whether the file alone determines, without config.json, that logits are tied: if it has no table
            for them.
        copies: names of further copies of the token table; or {name: name of the tensor that it must be equal to}.
        parts: {part: name without prefix}: optional parts of the base model, left out if this tensor is missing.
        ignored: {regular expression: reason}: tensors that a checkpoint may contain and the model does not need.
        zeros: names of tensors that are zeros if the checkpoint lacks them.
        initial_scale: the key of config.json that new weights are scaled by, and its default, which 0 stands for, too.
        initial_distribution: the class of the initializers of new weights.
        is_causal: the value of `is_causal` in config.json that changes nothing. None: every value changes something.
        heads: regular expressions for the tensors of all heads and optional parts. A model for another task does not
            need them, and if the caller asks for a task whose head the checkpoint lacks, they are new.

    Args:
        config: the content of config.json.
        task: one of `tasks`.
        tied: whether the logits are products with the token table.
        dtype: the dtype policy of the layers.

    Raises:
        ValueError: a value in config.json is missing or not supported.
    """

    model_types: tuple[str, ...] = ()
    tasks: dict[str, str | tuple[str, ...]] = {}
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    needed: tuple[str, ...] = ("input_ids",)
    prefix = ""
    other_prefix: str | None = None
    other_tasks: tuple[str, ...] = ()
    embedding_key = ""
    head_key: str | None = None
    tied_by_default = True
    tied_by_file = False
    copies: tuple[str, ...] | dict[str, str] = ()
    parts: dict[str, str] = {}
    ignored: dict[str, str] = {}
    zeros: tuple[str, ...] = ()
    initial_scale: tuple[str, float] = ("initializer_range", 0.02)
    initial_distribution: type[keras.initializers.Initializer] = keras.initializers.RandomNormal
    is_causal: bool | None = None
    heads: tuple[str, ...] = ()
    embedding: Any  # a layer that each family makes

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        self.config, self.task, self.tied, self.dtype = config, task, tied, dtype
        config.refuse("is_causal", *(() if self.is_causal is None else (self.is_causal,)))
        key, default = self.initial_scale
        self.initializer_range = config.not_negative(key, default=default) or default  # so does transformers

    def symbolic_inputs(self) -> dict[str, Any]:
        """The symbolic inputs by name, integers (B, T). Inputs that are not in `needed` may be None in a call."""
        return {
            name: keras.Input((None,), dtype="int32", name=name, optional=name not in self.needed)
            for name in self.inputs
        }

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        """Connects the layers: returns the symbolic outputs by Hugging Face's names.

        Args:
            inputs: symbolic inputs by name. An input that is not in `needed` is None in some calls, so pass it only to
                layers of this package, as an argument that may be None.
            hidden_states: whether the outputs include `hidden_states`, a tuple of L + 1 tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `outputs`.")

    def limit_positions(self) -> None:
        """Sets `max_length` of layers whose table has rows that are not used as positions."""

    def rows(self) -> Iterable[Row]:
        """The rows of the table, which fill every variable of the model."""
        raise NotImplementedError(f"{type(self).__name__} must define `rows`.")

    def initial_stddev(self, theirs: str) -> float:
        """The standard deviation of a matrix or table of a new model, by the name of the tensor in a checkpoint."""
        return self.initializer_range

    def computed(self) -> dict[str, Any]:
        """Returns {name: array} for tensors that transformers expects and that are no variables here."""
        return {}

    def generation_model(self) -> keras.Model | None:
        """The same layers as a functional model from ids to logits, for `generate`; None if the task has none."""
        return None

    def generation_options(self, values: dict[str, Any], begins_with: int = 1) -> dict[str, Any]:
        """The keyword arguments of `generate` that generation_config.json sets.

        The configs of some small models have stop tokens of larger vocabularies, which never occur: they are left out.

        Args:
            values: those of generation_config.json.
            begins_with: the number of tokens that a target begins with.
        """
        options = self._generation_options(values, begins_with)
        if "stop_tokens" in options:
            embedding = getattr(self, "target_embedding", None) or self.embedding
            known = range(embedding.vocabulary_size)
            options["stop_tokens"] = tuple(token for token in options["stop_tokens"] if token in known)
        return options

    def _generation_options(self, values: dict[str, Any], begins_with: int) -> dict[str, Any]:
        """The keyword arguments of `generate`, as they stand in the file."""
        return {}

    def max_length(self, values: dict[str, Any], longest: int) -> int | None:
        """The most tokens of prompt and continuation together; None if generation_config.json limits the new ones.

        Args:
            values: those of generation_config.json.
            longest: the number of tokens of the longest prompt, or of the longest beginning of a target.
        """
        return None

    def strategy(self, values: dict[str, Any]) -> Strategy:
        """The strategy of generation_config.json, or of config.json in older checkpoints without that file.

        The defaults are those of transformers.

        Raises:
            ValueError: a setting is not supported; the message names it.
        """
        values = values or self.config.values
        if values.get("num_return_sequences") not in (None, 1):
            raise ValueError(
                "`num_return_sequences` of the generation config must be 1; for more, pass a `strategy`. Received: "
                f"num_return_sequences={values['num_return_sequences']!r:.200}"
            )
        if values.get("do_sample"):
            for name, off in _NOT_SAMPLED.items():
                if values.get(name) not in (None, off):
                    raise ValueError(
                        f"`{name}` of the generation config is not supported with `do_sample`. To sample without it, "
                        f"pass a `strategy`. Received: {name}={values[name]!r:.200}"
                    )
            given = {name: values[name] for name in ("temperature", "top_p", "min_p") if values.get(name) is not None}
            top_k = values.get("top_k")
            return generation.Sample(**given, top_k=50 if top_k is None else top_k or None)  # 0 means all tokens
        if (values.get("num_beams") or 1) > 1:
            names = ("length_penalty", "early_stopping")
            given = {name: values[name] for name in names if values.get(name) is not None}
            return generation.Beam(values["num_beams"], **given)
        return generation.Greedy()

    def architecture(self) -> str:
        """The architecture that config.json names for this task."""
        names = self.tasks[self.task]
        return names if isinstance(names, str) else names[self.model_types.index(self.config.take("model_type"))]

    def saved_values(self) -> dict[str, Any]:
        """The values of config.json that `save_pretrained` replaces."""
        values = {"architectures": [self.architecture()], **self.both_spellings()}
        labels = self.config.values.get("id2label") or range(self.config.values.get("num_labels") or 2)
        if self.task == "question_answering" and len(labels) != 2:  # those of another task
            values |= {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
        return values

    def both_spellings(self) -> dict[str, Any]:
        """Values for rotary embeddings, which have different names in transformers 4 and 5, under both names."""
        return {}

    @classmethod
    def task_of(cls, config: Config) -> str:
        """The task for the `architectures` of config.json.

        Raises:
            ValueError: there is none for them.
        """
        architectures = config.take("architectures", default=None) or [None]
        if not isinstance(architectures, list):
            raise ValueError(
                f"`architectures` in config.json must be a list. Received: architectures={architectures!r:.200}"
            )
        for task, names in cls.tasks.items():
            if architectures[0] in ((names,) if isinstance(names, str) else names):
                return task
        known = [name for names in cls.tasks.values() for name in ((names,) if isinstance(names, str) else names)]
        raise ValueError(
            f"`architectures` in config.json must begin with one of {known}; or pass `task`, one of "
            f"{list(cls.tasks)}. Received: architectures={config.values.get('architectures')!r:.200}"
        )

    @classmethod
    def check_task(cls, task: str) -> str:
        """Returns `task` if the family has it; raises otherwise."""
        if task not in cls.tasks:
            raise ValueError(
                f"`task` must be None or, for {cls.model_types}, one of {list(cls.tasks)}. Received: task={task!r}"
            )
        return task

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor may be in the checkpoint without being used."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def check_ignored(self, name: str, read: Callable[[], np.ndarray]) -> None:
        """Raises if an ignored tensor, which `read()` returns, contradicts what the model computes."""

    def is_of_head(self, name: str) -> bool:
        """Whether a tensor belongs to a head or an optional part, which may have new weights."""
        if not self.heads:
            return not name.startswith(self.prefix) if self.prefix else name == self.head_key
        return any(re.fullmatch(pattern, name) for pattern in self.heads)

    def is_of_other_task(self, name: str) -> bool:
        """Whether a tensor belongs to another task, so that this model does not need it."""
        return self.is_of_head(name)


@keras.saving.register_keras_serializable(package="keras_tx")
class PaddingMask(keras.layers.Layer):
    """Returns the attention mask (B, T) as booleans. Without a mask all tokens are real, as in transformers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, ids: Tensor, attention_mask: Tensor = None) -> Tensor:
        return ops.ones_like(ids, dtype="bool") if attention_mask is None else ops.cast(attention_mask, "bool")

    def compute_mask(self, ids: Tensor, mask: Tensor = None) -> None:
        return None

    def compute_output_spec(self, ids: Tensor, attention_mask: Tensor = None) -> Any:
        return keras.KerasTensor(ids.shape, dtype="bool")


@keras.saving.register_keras_serializable(package="keras_tx")
class Positions(keras.layers.Layer):
    """Returns the positions (B, T) that the caller gave, otherwise 0, 1, 2, ..., independent of the mask.

    Args:
        padding_id: if given, only other ids are counted, starting at `padding_id + 1`, and the position of this id is
            `padding_id`, as in RoBERTa.
    """

    def __init__(self, padding_id: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.padding_id = padding_id

    def call(self, ids: Tensor, positions: Tensor = None) -> Tensor:
        if positions is not None:
            return positions
        if self.padding_id is None:
            return ops.zeros_like(ids) + ops.arange(ops.shape(ids)[1], dtype=ids.dtype)
        counted = ops.cast(ops.not_equal(ids, self.padding_id), "int32")
        return ops.cumsum(counted, axis=1) * counted + self.padding_id

    def compute_mask(self, ids: Tensor, mask: Tensor = None) -> None:
        return None

    def compute_output_spec(self, ids: Tensor, positions: Tensor = None) -> Any:
        return keras.KerasTensor(ids.shape, dtype="int32")

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "padding_id": self.padding_id}


def attention_sizes(config: Config, hidden: str = "hidden_size", heads: str = "num_attention_heads") -> tuple[int, int]:
    """The hidden size and the number of heads. The hidden size must be divisible by the number of heads."""
    hidden_dim, num_heads = config.size(hidden), config.size(heads)
    if hidden_dim % num_heads:
        raise ValueError(
            f"`{hidden}` in config.json must be divisible by `{heads}`. Received: {hidden}={hidden_dim}, "
            f"{heads}={num_heads}"
        )
    return hidden_dim, num_heads


def split(stacked: Tensor) -> tuple[Tensor, ...]:
    """Splits the hidden states (B, L + 1, T, D) that our stacks return into a tuple of L + 1 tensors (B, T, D)."""
    return tuple(stacked[:, index] for index in range(stacked.shape[1]))

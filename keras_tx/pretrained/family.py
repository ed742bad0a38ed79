"""A family of checkpoints: config -> layers -> outputs by Hugging Face's names, and the rows of its table.

A file in families/ has classes for checkpoints that differ by their config alone. families/bert.py is the one to read
first. B batch, T tokens, D hidden, L layers.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx import generation
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

_NOT_SAMPLED = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "num_beams": 1}  # and the values that say so


class Family:
    """The base of all families. A subclass makes its layers in `__init__`, joins them in `outputs`, and names in `rows`
    the tensor of each variable. `outputs` is called once, `rows` when the layers are built.

    Attributes of the class:
        model_types: the `model_type`s of config.json.
        tasks: {task: architecture}, or {task: architectures}, one for each of `model_types`.
        inputs: the names of the inputs; `needed`: those that cannot be left out.
        prefix: what the names of the base model begin with in a checkpoint with a head, as "bert."; rows have it.
        other_prefix: what stands in place of `prefix` in the checkpoints of `other_tasks`.
        embedding_key: the name, without prefix, of the token table, by which a checkpoint without prefix is known.
        head_key: the name of the table of the logits, which a checkpoint with tied ones lacks, or has as a copy.
        tied_by_default: whether they are tied where config.json has no `tie_word_embeddings`.
        tied_by_file: whether they are tied unless the file has a table of the logits, whatever config.json says.
        copies: names of further copies of the token table; or {name: the name of the tensor that it must equal}.
        parts: {part: name without prefix}: parts of the base model that are left out if it lacks this tensor.
        ignored: {regular expression: reason} of tensors that may be there and have no place in the model.
        zeros: names of tensors that are zeros where the checkpoint lacks them.
        heads: regular expressions of the tensors of all heads, and of parts: a model of another task has no place for
            them, and they are new where a task is asked for whose head the checkpoint lacks.

    Args:
        config: what config.json says.
        task: one of `tasks`.
        tied: whether logits are products with the token table.
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a value in config.json that is missing or not supported.
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
    heads: tuple[str, ...] = ()

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        self.config, self.task, self.tied, self.dtype = config, task, tied, dtype

    def symbolic_inputs(self) -> dict:
        """The inputs by name, (B, T) integers; those that are not needed may be None in a call."""
        return {
            name: keras.Input((None,), dtype="int32", name=name, optional=name not in self.needed)
            for name in self.inputs
        }

    def outputs(self, inputs: dict, hidden_states: bool) -> dict:
        """The outputs by Hugging Face's names.

        Args:
            inputs: symbolic, by name. One that is not needed will be None in some calls: it may go into layers of this
                package, as an argument that may be None, and into nothing else.
            hidden_states: whether `hidden_states`, a tuple of L + 1, is among the outputs.
        """
        raise NotImplementedError

    def rows(self) -> Iterable[Row]:
        """Rows that fill every variable of the model."""
        raise NotImplementedError

    def computed(self) -> dict:
        """{name: array} of tensors that fill no variable and that transformers wants in a file of this task."""
        return {}

    def writing(self) -> keras.Model | None:
        """The same layers as a functional model over ids alone with logits as its output, for `generate`; or None."""
        return None

    def generation_options(self, values: dict) -> dict:
        """Keywords of `generation.generate` that generation_config.json asks for."""
        return {}

    def max_length(self, values: dict) -> int | None:
        """What generation_config.json allows for prompt and new tokens together, where it says nothing else."""
        return None

    def strategy(self, values: dict) -> generation.Strategy:
        """The strategy that generation_config.json asks for, or config.json of an older checkpoint that has no other.

        The defaults are those of transformers.

        Raises:
            ValueError: for sampling of a kind that there is not; the message has its name.
        """
        values = values or self.config.values
        if values.get("num_return_sequences") not in (None, 1):
            raise ValueError(
                "`num_return_sequences` of the generation config must be 1; for more, give a `strategy`. Received: "
                f"num_return_sequences={values['num_return_sequences']!r}"
            )
        if values.get("do_sample"):
            for name, off in _NOT_SAMPLED.items():
                if values.get(name) not in (None, off):
                    raise ValueError(
                        f"`{name}` of the generation config is not supported with `do_sample`; to go without, give a "
                        f"`strategy`. Received: {name}={values[name]!r}"
                    )
            given = {name: values[name] for name in ("temperature", "top_p", "min_p") if values.get(name) is not None}
            top_k = values.get("top_k")
            return generation.Sample(**given, top_k=50 if top_k is None else top_k or None)  # 0 is all of them
        if (values.get("num_beams") or 1) > 1:
            names = ("length_penalty", "early_stopping")
            given = {name: values[name] for name in names if values.get(name) is not None}
            return generation.Beam(values["num_beams"], **given)
        return generation.Greedy()

    def architecture(self) -> str:
        """The architecture of config.json that means this task."""
        names = self.tasks[self.task]
        return names if isinstance(names, str) else names[self.model_types.index(self.config.take("model_type"))]

    def saved_values(self) -> dict:
        """What config.json says anew when it is written."""
        return {"architectures": [self.architecture()], **self.both_spellings()}

    def both_spellings(self) -> dict:
        """What transformers 4 and 5 spell in two ways, in both: of families with rotary embedding."""
        return {}

    @classmethod
    def task_of(cls, config: Config) -> str:
        """The task that the `architectures` of config.json mean.

        Raises:
            ValueError: they mean none that is known.
        """
        architectures = config.take("architectures", default=None) or [None]
        if not isinstance(architectures, list):
            raise ValueError(
                f"`architectures` in config.json must be a list. Received: architectures={architectures!r}"
            )
        for task, names in cls.tasks.items():
            if architectures[0] in ((names,) if isinstance(names, str) else names):
                return task
        known = [name for names in cls.tasks.values() for name in ((names,) if isinstance(names, str) else names)]
        raise ValueError(
            f"`architectures` in config.json must begin with one of {known}; or give `task`, one of "
            f"{list(cls.tasks)}. Received: architectures={config.values.get('architectures')!r}"
        )

    @classmethod
    def check_task(cls, task: str) -> str:
        """Returns `task` if the family has it."""
        if task not in cls.tasks:
            raise ValueError(
                f"`task` must be None or, for {cls.model_types}, one of {list(cls.tasks)}. Received: task={task!r}"
            )
        return task

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor without a place in the model may be there."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)

    def check_ignored(self, name: str, read: Callable[[], np.ndarray]) -> None:
        """Raises if an ignored tensor, `read()`, says something else than the model does."""

    def is_of_head(self, name: str) -> bool:
        """Whether a tensor is of a part that is new where a task is asked for and the checkpoint lacks the part."""
        if not self.heads:
            return not name.startswith(self.prefix) if self.prefix else name == self.head_key
        return any(re.fullmatch(pattern, name) for pattern in self.heads)

    def is_of_other_task(self, name: str) -> bool:
        """Whether a tensor is of a head, so that a model of another task has no place for it."""
        return self.is_of_head(name)


@keras.saving.register_keras_serializable(package="keras_tx")
class PaddingMask(keras.layers.Layer):
    """Ids (B, T), and an attention mask (B, T) or None -> booleans (B, T); without a mask every token is real.

    That is so in Hugging Face's models for the padding token, too.
    """

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
    """Ids (B, T), and positions (B, T) or None -> the positions: those given, else 0, 1, 2, ... whatever is masked.

    Args:
        padding_id: if given, positions count the ids that are not this one, from `padding_id + 1` on; at this one they
            are `padding_id`. So RoBERTa has it.
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
    """The hidden size and the number of heads, of which it must be a multiple."""
    hidden_dim, num_heads = config.number(hidden), config.number(heads)
    if hidden_dim % num_heads:
        raise ValueError(
            f"`{hidden}` in config.json must be divisible by `{heads}`. Received: {hidden}={hidden_dim}, "
            f"{heads}={num_heads}"
        )
    return hidden_dim, num_heads


def split(stacked: Tensor) -> tuple:
    """Hidden states (B, L + 1, T, D), as our stacks return them -> a tuple of L + 1 tensors (B, T, D)."""
    return tuple(stacked[:, index] for index in range(stacked.shape[1]))

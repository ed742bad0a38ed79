"""Loads a checkpoint from a directory or the Hugging Face hub, and checks that every tensor is used."""

import functools
import hashlib
import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.pretrained import headers
from keras_tx.pretrained.config import Config, check_layers
from keras_tx.pretrained.family import Family
from keras_tx.pretrained.files import PICKLES, Tensors, open_tensors, pickled
from keras_tx.pretrained.model import PretrainedModel
from keras_tx.pretrained.registry import family_of
from keras_tx.pretrained.table import Row
from keras_tx.pretrained.variable_loader import VariableLoader
from keras_tx.types import DType

huggingface_hub = Lazy("huggingface_hub", "hub")

CONFIG, GENERATION = "config.json", "generation_config.json"
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in checkpoints that were converted from TensorFlow
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BESIDE = ["*.json", "*.txt", "*.model", "*.spm", "*.jinja"]


def from_pretrained(
    path: str | Path,
    *,
    task: str | None = None,
    dtype: Any = None,
    output_hidden_states: bool = False,
    skip_padding: bool = False,
    num_labels: int | None = None,
    labels: Sequence[str] | None = None,
) -> PretrainedModel:
    """Loads a Hugging Face checkpoint as a functional `keras.Model` of this package's layers.

    It reads config.json, generation_config.json, and safetensors or tf_model.h5, one tensor at a time. Neither torch
    nor transformers is needed, no pickle is loaded, and no code of the checkpoint is run.

    Args:
        path: a directory; or a model id of the Hugging Face hub, which `huggingface_hub` (the extra `hub`) downloads.
        task: "base", "sequence_classification", "token_classification", "question_answering", "masked_lm", "causal_lm",
            "conditional_generation", "encoder", "image_classification", ... None: the task that the checkpoint was
            saved for. If the checkpoint has no head for the task that you choose, the head gets random weights, and a
            warning names the new tensors.
        dtype: the dtype policy, such as "mixed_bfloat16". None: Keras' global dtype policy. With "float32", weights
            that are stored in half precision become float32.
        output_hidden_states: whether the outputs include `hidden_states`.
        skip_padding: as for `keras_tx.layers.Encoder`: whether to skip padding tokens; the outputs there are then 0.
        num_labels: the number of classes. If the checkpoint has a different number, the classification layer gets
            random weights.
        labels: the names of the classes, which are stored in the config (`id2label`). None: the names of the
            checkpoint, or LABEL_0, LABEL_1, ...

    Returns:
        A `PretrainedModel`. Its attribute `source` is the directory of the checkpoint, for `text.load_tokenizer`.

    Raises:
        ValueError: the model type or task is unknown; the config lacks a key or has an unsupported value; a tensor is
            unknown, missing, or does not have the shape that follows from the config; files are damaged; weights are
            pickled; `skip_padding` is set for a model without an `Encoder`. The message names the cause.

    Examples:
        >>> config = {"model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1}
        >>> config |= {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 16}
        >>> model = keras_tx.pretrained.PretrainedModel(config, "base")
        >>> keras_tx.pretrained.save_pretrained(model, "my-bert")
        >>> bert = keras_tx.pretrained.from_pretrained("my-bert", task="base")
        >>> ids = keras.Input((None,), dtype="int32")
        >>> bert(ids)["last_hidden_state"].shape
        (None, None, 8)
    """
    directory = _directory(path)
    values = _read_json(directory / CONFIG)
    if labels is not None:
        labels = _checked_labels(labels, num_labels)
    elif checks.positive_int("num_labels", num_labels, none=True) not in (None, _count(values.get("id2label"))):
        labels = [f"LABEL_{index}" for index in range(num_labels or 0)]
    if labels is not None:
        values["id2label"] = {str(index): label for index, label in enumerate(labels)}
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    config = Config(values)
    kind = family_of(config)
    tensors = open_tensors(directory)
    said_tied = kind.tied_by_file or bool(config.take("tie_word_embeddings", default=kind.tied_by_default))
    is_shared = config.values.get("share_encoder_decoder_embeddings") is not False
    names = _canonical(tensors.names, kind, said_tied, is_shared)
    tied = said_tied and _is_tied(kind, tensors, names)
    if not tied and isinstance(kind.copies, dict):  # older files store one tensor for both
        names |= {copy: names[name] for copy, name in kind.copies.items() if copy not in names and name in names}
    absent = [part for part, key in kind.parts.items() if kind.prefix + key not in names]
    check_layers(values, len(tensors))
    generation = directory / GENERATION
    loader = VariableLoader(tensors, names)
    with keras.StatelessScope():  # which initializes the variables when it ends
        model = PretrainedModel(
            values,
            task,
            output_hidden_states=output_hidden_states,
            skip_padding=skip_padding,
            tied=tied,
            absent=absent,
            generation_config=_read_json(generation) if generation.is_file() else None,
            dtype=dtype,
        )
        rows = list(model.family.rows())
        zeros = [name for name in kind.zeros if name not in names]
        new = _check(model, rows, tensors, names, zeros, asked=task is not None, relabeled=labels is not None)
        loader.prepare(row for row in rows if row.theirs not in (*new, *zeros))
    loader.finish()
    model.stored_dtypes.update(
        _stored_dtypes(tensors, {row.theirs: names.get(row.theirs) for row in rows}, [*new, *zeros])
    )
    if new:
        warnings.warn(
            f"The checkpoint lacks tensors of the task {model.task!r}. They are new and must be trained: {new}",
            stacklevel=2,
        )
    object.__setattr__(model, "source", directory)  # `save_pretrained` copies the tokenizer's files from it
    return model


def _count(labels: Any) -> int:
    return len(labels) if isinstance(labels, dict) else 0


def _directory(path: str | Path) -> Path:
    directory = Path(path)
    if directory.is_dir():
        return directory
    if directory.exists() or not _HUB_ID.fullmatch(str(path)):
        raise ValueError(f"`path` must be a directory, or a model id of the hub. Received: path={str(path)!r}")
    found = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=[*_BESIDE, "model*.safetensors"]))
    if not any(found.glob("model*.safetensors")):
        found = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=[*_BESIDE, "tf_model.h5"]))
    if not any(found.glob("model*.safetensors")) and not (found / "tf_model.h5").is_file():
        pickles = [name for name in huggingface_hub.list_repo_files(str(path)) if name.endswith(PICKLES)]
        if pickles:
            raise pickled(path, f"{path}/{pickles[0]}")
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"`path` must have a {path.name}. Received: path={str(path.parent)!r}")
    return headers.json_object(str(path), path.read_bytes())


def _checked_labels(labels: Any, num_labels: int | None) -> list[str]:
    given = [labels] if isinstance(labels, str) else list(labels)
    are_names = not isinstance(labels, str) and all(isinstance(label, str) and label for label in given)
    if not given or not are_names or len(set(given)) < len(given):
        raise ValueError(f"`labels` must be different non-empty strings, one for each class. Received: {labels=!r}")
    if num_labels not in (None, len(given)):
        raise ValueError(f"`labels` must have the length `num_labels`. Received: {labels=!r}, {num_labels=!r}")
    return given


def _canonical(file_names: Iterable[str], kind: type[Family], said_tied: bool, is_shared: bool) -> dict[str, str]:
    """Returns {name in the rows: name in the file}.

    Args:
        file_names: the names in the file.
        kind: the family.
        said_tied: whether the config says that logits are tied to the token table.
        is_shared: whether encoder and decoder share one token table.
    """
    prefixes = (kind.prefix,) if kind.other_prefix is None else (kind.prefix, kind.other_prefix)
    prefixed = any(name.startswith(prefixes) for name in file_names)
    names: dict[str, str] = {}
    for file_name in file_names:
        name = file_name
        for old, new in _OLD_NAMES.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if kind.other_prefix is not None and name.startswith(kind.other_prefix):
            name = kind.prefix + name.removeprefix(kind.other_prefix)
        if not prefixed and name != kind.head_key and not any(re.fullmatch(head, name) for head in kind.heads):
            name = kind.prefix + name
        if name in names:
            raise ValueError(f"A tensor must be stored under one name. Received: {names[name]!r} and {file_name!r}")
        names[name] = file_name
    shared = kind.prefix + kind.embedding_key
    copies = [] if isinstance(kind.copies, dict) else [*kind.copies]
    if kind.head_key and said_tied and not kind.tied_by_file:  # otherwise the table of the logits may be another one
        copies.append(kind.head_key)
    aliases = [name for name in copies if name in names]
    if is_shared and shared not in names and aliases:  # the shared table is stored under one of its other names
        names[shared] = names.pop(aliases[0])
    return names


def _is_tied(kind: type[Family], tensors: Tensors, names: dict[str, str]) -> bool:
    """Whether the logits are tied, by the rule of transformers: their table is missing or equals the token table."""
    own, shared = names.get(kind.head_key or ""), names.get(kind.prefix + kind.embedding_key)
    return own is None or (shared is not None and _digest(tensors, own) == _digest(tensors, shared))


def _digest(tensors: Tensors, file_name: str) -> tuple[Any, ...]:
    """A value that is equal for equal tensors. Comparing digests keeps only one of two large tables in memory."""
    array = np.ascontiguousarray(tensors.read(file_name))
    return array.dtype, array.shape, hashlib.blake2b(array.reshape(-1).view("uint8").data).digest()


def _check(
    model: PretrainedModel,
    rows: Iterable[Row],
    tensors: Tensors,
    names: dict[str, str],
    zeros: Collection[str],
    *,
    asked: bool,
    relabeled: bool,
) -> list[str]:
    """Returns the names of the new tensors; raises unless every tensor is used and every variable has a tensor."""
    wanted = [row for row in rows if row.theirs not in zeros]
    new = _check_rows(model.family, wanted, tensors, names, asked, relabeled)
    _check_left(model.family, {row.theirs for row in rows}, tensors, names)
    filled = {id(variable) for row in rows for variable in row.variables}
    empty = [one.path for one in model.weights if id(one) not in filled and "seed_generator" not in one.path]
    if empty:
        raise ValueError(f"Every variable must have a row in the table of its family. Received: {empty} without one")
    return new


def _stored_dtypes(tensors: Tensors, names: dict[str, Any], new: Collection[str]) -> dict[str, str]:
    """Returns the most frequent dtype under the key "*", and by name the dtypes of tensors with another one."""
    stored = {name: str(tensors.dtype(file_name)) for name, file_name in names.items() if name not in new}
    usual = max(sorted(set(stored.values())), key=list(stored.values()).count)
    return {"*": usual, **{name: dtype for name, dtype in stored.items() if dtype != usual}}


def _check_rows(
    family: Family, rows: Iterable[Row], tensors: Tensors, names: dict[str, str], asked: bool, relabeled: bool
) -> list[str]:
    """Returns the names of the rows that may be new; raises for other rows that the checkpoint cannot fill."""
    new: list[str] = []
    has_head = any(row.theirs in names and family.is_of_head(row.theirs) and not _is_part(family, row) for row in rows)
    for row in rows:
        file_name, of_head = names.get(row.theirs), family.is_of_head(row.theirs)
        if file_name is None:
            if not (
                asked and of_head and (_is_part(family, row) or not has_head)
            ):  # a head of which only some tensors are missing is an error
                advice = "; or pass `task`, and the head is new" if of_head and not asked else ""
                raise ValueError(
                    f"The checkpoint must have {row.theirs!r} of shape {row.shape}{advice}. Received: no such tensor"
                )
            new.append(row.theirs)
        elif tuple(tensors.shape(file_name)) != row.shape:
            if not (relabeled and of_head):
                raise ValueError(
                    f"{file_name!r} must have the shape {row.shape}. Received: {tuple(tensors.shape(file_name))}"
                )
            new.append(row.theirs)
        elif not _is_float(tensors.dtype(file_name)):
            raise ValueError(f"{file_name!r} must have a floating dtype. Received: {tensors.dtype(file_name)}")
    return new


def _is_part(family: Family, row: Row) -> bool:
    """Whether a row belongs to an optional part of the base model, such as the pooler."""
    return any(row.theirs.startswith(f"{family.prefix}{part}.") for part in family.parts)


def _is_float(dtype: DType) -> bool:
    return bool(dtype.kind == "f" or dtype == ml_dtypes.bfloat16)


def _check_left(family: Family, used: Collection[str], tensors: Tensors, names: dict[str, str]) -> None:
    """Raises for a tensor that the model does not use, unless it is ignored or an equal copy of another tensor."""
    shared = family.prefix + family.embedding_key
    copies = family.copies if isinstance(family.copies, dict) else dict.fromkeys(family.copies, shared)
    if family.tied and family.head_key is not None:
        copies = {**copies, family.head_key: shared}
    for name, file_name in names.items():
        if name in used:
            continue
        if family.is_ignored(name):
            family.check_ignored(name, functools.partial(tensors.read, file_name))
        elif copies.get(name) in used:
            if _digest(tensors, file_name) != _digest(tensors, names[copies[name]]):
                raise ValueError(
                    f"{file_name!r} must be equal to {names[copies[name]]!r}. Received: a different tensor"
                )
        elif not family.is_of_other_task(name) and name != family.head_key:
            raise ValueError(
                f"Every tensor must be used by a model of the task {family.task!r}. Received: {file_name!r}, "
                "which is not"
            )

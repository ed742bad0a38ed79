"""The audit of a checkpoint: the names of its tensors, and whether each is used and each variable has one."""

import functools
import hashlib
import re
from collections.abc import Collection, Iterable
from typing import Any

import ml_dtypes

from keras_tx.pretrained.family import Family
from keras_tx.pretrained.files import Tensors
from keras_tx.pretrained.model import PretrainedModel
from keras_tx.pretrained.table import Row
from keras_tx.types import DType

_PRETRAINING = ("pretraining", "masked_lm", "next_sentence_prediction")  # tasks with the same heads
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in checkpoints that were converted from TensorFlow


def canonical(file_names: Iterable[str], kind: type[Family], said_tied: bool, is_shared: bool) -> dict[str, str]:
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
            raise ValueError(
                f"A tensor must be stored under one name. Received: {names[name]!r:.200} and {file_name!r:.200}"
            )
        names[name] = file_name
    shared = kind.prefix + kind.embedding_key
    copies = [] if isinstance(kind.copies, dict) else [*kind.copies]
    if kind.head_key and said_tied and not kind.tied_by_file:  # otherwise the table of the logits may be another one
        copies.append(kind.head_key)
    aliases = [name for name in copies if name in names]
    if is_shared and shared not in names and aliases:  # the shared table is stored under one of its other names
        names[shared] = names.pop(aliases[0])
    return names


def is_tied(kind: type[Family], tensors: Tensors, names: dict[str, str]) -> bool:
    """Whether the logits are tied, by the rule of transformers: their table is missing or equals the token table."""
    own, shared = names.get(kind.head_key or ""), names.get(kind.prefix + kind.embedding_key)
    return own is None or (shared is not None and _digest(tensors, own) == _digest(tensors, shared))


def _digest(tensors: Tensors, file_name: str) -> tuple[Any, ...]:
    """A value that is equal for equal tensors. Comparing digests keeps only a piece of a large table in memory."""
    digest = hashlib.blake2b()
    for piece in tensors.pieces(file_name):
        digest.update(piece.data)
    return tensors.dtype(file_name), tensors.shape(file_name), digest.digest()


def new_tensors(
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


def stored_dtypes(tensors: Tensors, names: dict[str, Any], new: Collection[str]) -> dict[str, str]:
    """Returns the most frequent dtype under the key "*", and by name the dtypes of tensors with another one."""
    stored = {name: str(tensors.dtype(file_name)) for name, file_name in names.items() if name not in new}
    usual = max(sorted(set(stored.values())), key=list(stored.values()).count)
    return {"*": usual, **{name: dtype for name, dtype in stored.items() if dtype != usual}}


def _check_rows(
    family: Family, rows: Iterable[Row], tensors: Tensors, names: dict[str, str], asked: bool, relabeled: bool
) -> list[str]:
    """Returns the names of the rows that may be new; raises for other rows that the checkpoint cannot fill."""
    new: list[str] = []
    # A head of which only some tensors are missing is an error, unless it is that of another task.
    must_be_whole = other_task(family) is None and any(
        row.theirs in names and family.is_of_head(row.theirs) and not _is_part(family, row.theirs) for row in rows
    )
    for row in rows:
        file_name, of_head = names.get(row.theirs), family.is_of_head(row.theirs)
        if file_name is None:
            if not (asked and of_head and (_is_part(family, row.theirs) or not must_be_whole)):
                advice = "; or pass `task`, and the head is new" if of_head and not asked else ""
                raise ValueError(
                    f"The checkpoint must have {row.theirs!r} of shape {row.shape}{advice}. Received: no such tensor"
                )
            new.append(row.theirs)
        elif tuple(tensors.shape(file_name)) != row.shape:
            if not (relabeled and of_head):
                raise ValueError(
                    f"{file_name!r:.200} must have the shape {row.shape}. Received: {tuple(tensors.shape(file_name))}"
                )
            new.append(row.theirs)
        elif not _is_float(tensors.dtype(file_name)):
            raise ValueError(f"{file_name!r:.200} must have a floating dtype. Received: {tensors.dtype(file_name)}")
    return new


def other_task(family: Family) -> str | None:
    """The task that `architectures` in config.json names, if it is another one than that of the model; or None."""
    try:
        task = family.task_of(family.config)
    except ValueError:  # it names none
        return None
    return None if task == family.task else task


def reused(family: Family, rows: Iterable[Row], names: Collection[str], new: Collection[str]) -> dict[str, list[str]]:
    """Head tensors that were trained for another task: {"used": names, "unused": names}; or {} if none are used."""
    task, needed = other_task(family), {row.theirs for row in rows}
    of_head = [name for name in sorted(names) if family.is_of_head(name) and not _is_part(family, name)]
    used = [name for name in of_head if name in needed and name not in new]
    if task is None or not used or {task, family.task} <= {*_PRETRAINING}:
        return {}
    return {"used": used, "unused": [name for name in of_head if name not in needed]}


def _is_part(family: Family, name: str) -> bool:
    """Whether a tensor belongs to an optional part of the base model, such as the pooler."""
    return any(name.startswith(f"{family.prefix}{part}.") for part in family.parts)


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
                    f"{file_name!r:.200} must be equal to {names[copies[name]]!r:.200}. Received: a different tensor"
                )
        elif not family.is_of_other_task(name) and name != family.head_key:
            raise ValueError(
                f"Every tensor must be used by a model of the task {family.task!r}. Received: {file_name!r:.200}, "
                "which is not"
            )

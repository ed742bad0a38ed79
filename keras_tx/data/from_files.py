"""Reads examples (text, label) and class names from JSON lines, CSV, TSV and Parquet files."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from keras_tx.data import files

Example = tuple[str, str, Path, int]  # text, label, file, line


def is_path(name_or_path: Any) -> bool:
    """Whether this is a path, a list of paths, a pattern, or a name: with a known suffix, or of files that exist."""
    if isinstance(name_or_path, PathLike) or not isinstance(name_or_path, str) or files.is_pattern(name_or_path):
        return True
    place = Path(name_or_path)
    is_there = place.is_file() or bool(files.parquet_files(place))
    return name_or_path != "sample" and (files.ending(place) in files.TABLES or is_there)


def read(
    parts: Sequence[list[Path]], text_column: str, label_column: str, labels: Sequence[str] | None
) -> tuple[list[list[tuple[str, int]]], tuple[str, ...]]:
    """Reads labelled texts. The files of the first part determine the classes.

    Returns:
        The examples (text, label id) of each part, and the names of the classes.
    """
    found = [list(examples(paths, text_column, label_column)) for paths in parts]
    names = class_names((label for _, label, *_ in found[0]), parts[0], labels)
    to_id = label_ids(names)
    for paths, rows in zip(parts, found, strict=True):
        if not rows:
            raise ValueError(f"The file must hold at least one example. Received: {_listed(paths)}, which holds none")
    return [[(row[0], to_id(row)) for row in rows] for rows in found], names


def examples(paths: Sequence[Path], text_column: str, label_column: str) -> Iterator[Example]:
    """Yields the examples of files."""
    for path in paths:
        for line, row in files.rows(path, {"text_column": text_column, "label_column": label_column}):
            text, label, where = row[text_column], row[label_column], f"{str(path)!r}, line {line}"
            if not isinstance(text, str):
                raise ValueError(f"The text of an example must be a string. Received: {text!r} in {where}")
            if isinstance(label, bool) or not isinstance(label, (str, int)) or not str(label).strip():
                raise ValueError(
                    f"The label of an example must be a word or an integer. Received: {label!r} in {where}"
                )
            yield text, str(label).strip(), path, line


def class_names(found: Iterator[str], paths: Sequence[Path], labels: Sequence[str] | None) -> tuple[str, ...]:
    """The names of the classes: `labels` if they are given, or the sorted labels that are found in `paths`."""
    if labels is not None:
        names = [str(label) for label in labels]
        if isinstance(labels, str) or len(set(names)) < max(2, len(names)):
            raise ValueError(f"`labels` must be at least two different names of classes. Received: labels={labels!r}")
        return tuple(names)
    first = next(found, None)
    if first is None:
        raise ValueError(f"The file must hold at least one example. Received: {_listed(paths)}, which holds none")
    names = sorted(set(chain([first], found)))
    if all(re.fullmatch(r"[+-]?[0-9]+", name) for name in names):
        names.sort(key=int)
    if len(names) < 2:
        raise ValueError(f"The file must hold at least two classes. Received: {_listed(paths)} with {names}")
    return tuple(names)


def label_ids(names: Collection[str]) -> Callable[[Example], int]:
    """A function from an example to the id of its label."""
    ids = {name: index for index, name in enumerate(names)}

    def to_id(example: Example) -> int:
        _, label, path, line = example
        if label not in ids:
            raise ValueError(
                f"A label must be one of {list(names)}, the labels of the training split. Received: {label!r} in "
                f"{str(path)!r}, line {line}"
            )
        return ids[label]

    return to_id


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(repr(str(path)) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")

"""Reads examples (text, label id) and class names from JSON lines, CSV and TSV files, plain or gzipped."""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from keras_tx import json_text

SUFFIXES = (".jsonl", ".csv", ".tsv")
_BROKEN = (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error)


def is_path(name_or_path: str | PathLike[str]) -> bool:
    """Whether this is a path object, a name with a known suffix, or any file that exists."""
    if isinstance(name_or_path, PathLike):
        return True
    return name_or_path != "sample" and (_suffix(Path(name_or_path)) in SUFFIXES or Path(name_or_path).is_file())


def read(paths: list[Path], text_column: str, label_column: str) -> tuple[list[list[tuple[str, int]]], tuple[str, ...]]:
    """Reads labelled texts. The first file determines the classes.

    Returns:
        The examples (text, label id) of each file, and the names of the classes.
    """
    rows = [list(_examples(path, text_column, label_column)) for path in paths]
    for path, examples in zip(paths, rows, strict=True):
        if not examples:
            raise ValueError(f"The file must hold at least one example. Received: {str(path)!r}, which holds none")
    names = sorted({label for _, label, _ in rows[0]}, key=str)
    if all(re.fullmatch(r"[+-]?[0-9]+", name) for name in names):
        names.sort(key=int)
    if len(names) < 2:
        raise ValueError(f"The file must hold at least two classes. Received: {str(paths[0])!r} with {names}")
    ids = {name: index for index, name in enumerate(names)}
    for path, examples in zip(paths, rows, strict=True):
        for _, label, line in examples:
            if label not in ids:
                raise ValueError(
                    f"A label of the test file must be one of the train file's, {names}. Received: {label!r} in "
                    f"{str(path)!r}, line {line}"
                )
    return [[(text, ids[label]) for text, label, _ in examples] for examples in rows], tuple(names)


def _suffix(path: Path) -> str:
    """The suffix without ".gz", in lower case."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _examples(path: Path, text_column: str, label_column: str) -> Iterator[tuple[str, str, int]]:
    """Yields (text, label, line number) of each row."""
    if _suffix(path) not in SUFFIXES:
        raise ValueError(
            f"The file must end in one of {', '.join(SUFFIXES)}, or in one of them and .gz. Received: {path}"
        )
    if not path.is_file():
        raise FileNotFoundError(f"The file must exist. Received: {str(path)!r}")
    for line, row in _rows(path):
        where = f"{str(path)!r}, line {line}"
        for argument, column in (("text_column", text_column), ("label_column", label_column)):
            if column not in row:
                raise ValueError(
                    f"`{argument}` must name a column, one of {list(row)}. Received: {argument}={column!r} for {where}"
                )
        text, label = row[text_column], row[label_column]
        if not isinstance(text, str):
            raise ValueError(f"The text of an example must be a string. Received: {text!r} in {where}")
        if isinstance(label, bool) or not isinstance(label, (str, int)) or not str(label).strip():
            raise ValueError(f"The label of an example must be a word or an integer. Received: {label!r} in {where}")
        yield text, str(label).strip(), line


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, columns) of each row. An error names the line that cannot be read."""
    suffix, line = _suffix(path), 0
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", newline="" if suffix != ".jsonl" else "\n") as file:
        rows = _json_rows(file) if suffix == ".jsonl" else _table_rows(file, "\t" if suffix == ".tsv" else ",")
        try:
            for line, row in rows:
                yield line, row
        except _Malformed as error:
            raise ValueError(f"The file must be well-formed. Received: {str(path)!r}, {error}") from error
        except _BROKEN as error:
            raise ValueError(
                f"The file must be readable UTF-8 text. Received: {str(path)!r}, after line {line}: {error}"
            ) from error


class _Malformed(Exception):
    """A row that breaks the rules of its file format."""


def _json_rows(file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, content in enumerate(file, start=1):
        if not content.strip():
            continue
        try:
            row = json_text.parse(content)
            json.dumps(row, ensure_ascii=False).encode()  # UTF-8 cannot hold a lone surrogate
        except ValueError as error:
            raise _Malformed(f"line {line}: {error}") from error
        if not isinstance(row, dict):
            raise _Malformed(f"line {line}: {content.strip()[:80]} is not a JSON object")
        yield line, row


def _table_rows(file: Iterable[str], delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise _Malformed(f"line 1: the columns {header} are not all different")
        for row in reader:
            if row and len(row) != len(header):
                raise _Malformed(f"line {reader.line_num}: {len(row)} fields where the columns are {header}")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _Malformed(f"line {reader.line_num}: {error}") from error

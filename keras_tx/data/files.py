"""Finds text files by name or pattern, and reads their lines and rows one after the other, also from .gz and .zst."""

import contextlib
import csv
import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from keras_tx import json_text
from keras_tx.optional import Lazy

pyarrow = Lazy("pyarrow", extra="files")
parquet = Lazy("pyarrow.parquet", extra="files")

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
COMPRESSED = (".gz", ".zst")
NO_TEXT = (".bz2", ".xz", ".zip", ".7z", ".tar", ".tgz", ".lz4", ".br", ".arrow", ".npy", ".npz", ".pdf")
LONGEST_FIELD = 2**31 - 1  # characters; the C library takes no more on every system
CHUNK = 1 << 20  # bytes that are decoded at a time
ROWS = 1024  # rows of a Parquet file that are decoded at a time
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)

Names = str | PathLike[str] | Sequence[str | PathLike[str]]


def are_names(names: Any) -> bool:
    """Whether this is a string, a path, or a list of them."""
    kinds = (str, PathLike)
    return isinstance(names, kinds) or (isinstance(names, (list, tuple)) and all(isinstance(n, kinds) for n in names))


def is_pattern(name: Any) -> bool:
    """Whether this is a pattern such as "news-*.txt", and not the name of a file."""
    return isinstance(name, (str, PathLike)) and glob.has_magic(str(name)) and not Path(name).exists()


def expand(argument: str, names: Names) -> list[Path]:
    """The files that are named by a path, a pattern, or a list of these; those of a pattern in alphabetical order.

    A folder stands for the Parquet files in it, as Spark writes them.

    Raises:
        FileNotFoundError: a file does not exist, a pattern matches none, or a folder has no Parquet files.
        ValueError: the list is empty, or a file has an ending that no text has.
    """
    listed = [names] if isinstance(names, (str, PathLike)) else list(names)
    if not listed:
        raise ValueError(f"`{argument}` must name at least one file. Received: {argument}={names!r}")
    found: list[Path] = []
    for name in listed:
        if is_pattern(name):
            matches = [Path(match) for match in sorted(glob.glob(str(name), recursive=True)) if Path(match).is_file()]
            if not matches:
                raise FileNotFoundError(
                    f"`{argument}` must match at least one file. Received: {argument}={str(name)!r}"
                )
            found += matches
        elif Path(name).is_file():
            found.append(Path(name))
        elif Path(name).is_dir():
            parts = parquet_files(Path(name))
            if not parts:
                raise FileNotFoundError(
                    f"`{argument}` must name files, a pattern, or a folder of Parquet files. Received: {str(name)!r}, "
                    "a folder without a name that ends in .parquet"
                )
            found += parts
        else:
            raise FileNotFoundError(f"`{argument}` must name files that exist. Received: {str(name)!r}")
    for path in found:
        if path.suffix.lower() in NO_TEXT:
            raise ValueError(
                f"The file must be text, plain or compressed as {' or '.join(COMPRESSED)}, or one of "
                f"{', '.join(TABLES)}. Received: {str(path)!r}"
            )
    return found


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder, without hidden ones, in alphabetical order."""
    return [path for path in sorted(folder.glob("*.parquet")) if path.name[0] not in "._"] if folder.is_dir() else []


def ending(path: Path) -> str:
    """The suffix in lower case, without one of `COMPRESSED`."""
    return (path.with_suffix("") if path.suffix.lower() in COMPRESSED else path).suffix.lower()


def lines(path: Path) -> Iterator[list[str]]:
    """Yields the lines of a UTF-8 file in lists, without line breaks ("\\n" or "\\r\\n") and byte order mark."""
    number, pieces = 0, list[bytes]()
    for chunk in _chunks(path):
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            found = _decoded(path, b"".join([*pieces, head, newline]), number).split("\n")[:-1]
            number, pieces = number + len(found), []
            yield found
        pieces.append(tail)
    last = _decoded(path, b"".join(pieces), number)
    if last:
        yield [last]


def text(path: Path) -> str:
    """The whole text of a UTF-8 file, without byte order mark; "\\r\\n" becomes "\\n"."""
    return _decoded(path, b"".join(_chunks(path)), 0)


def column(path: Path, name: str, argument: str = "text_column") -> Iterator[list[str]]:
    """Yields the texts of a column in lists."""
    for _, (texts,) in columns(path, {argument: name}):
        yield texts


def columns(path: Path, names: dict[str, str]) -> Iterator[tuple[int, list[list[str]]]]:
    """Yields (line of the first, a list of texts for each column), a few rows at a time.

    Args:
        path: a file with one of the endings of `TABLES`.
        names: the columns, by the arguments that name them.
    """
    first = 1
    found: list[list[str]] = [[] for _ in names]
    for line, row in rows(path, names):
        for values, name in zip(found, names.values(), strict=True):
            if not isinstance(row[name], str):
                where = f"{str(path)!r}, line {line}"
                raise ValueError(f"The text of an example must be a string. Received: {row[name]!r} in {where}")
            values.append(row[name])
        if len(found[0]) == ROWS:
            yield first, found
            first, found = line + 1, [[] for _ in names]
    if found[0]:
        yield first, found


def rows(path: Path, names: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (line number, columns) of each row of a table. An error names the line that cannot be read.

    Args:
        path: a file with one of the endings of `TABLES`.
        names: the columns that every row must have, by the arguments that name them.
    """
    kind, line = ending(path), 0
    if kind not in TABLES:
        raise ValueError(
            f"The file must end in one of {', '.join(TABLES)}, or in one of them and {' or '.join(COMPRESSED)}. "
            f"Received: {path}"
        )
    if kind == ".parquet":
        yield from _parquet_rows(path, names)
        return
    with _opened(path) as file:
        newline = "\n" if kind == ".jsonl" else ""
        try:
            with io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as decoded:

                def check(row: Iterable[str], line: int) -> None:
                    _check_columns(row, names, f"{str(path)!r}, line {line}")

                found = _json_rows(decoded, check) if kind == ".jsonl" else _table_rows(decoded, kind, check)
                for line, row in found:
                    yield line, row
        except _Malformed as error:
            raise ValueError(f"The file must be well-formed. Received: {str(path)!r}, {error}") from error
        except UnicodeDecodeError as error:
            where = f"line {_undecodable_line(path)}"  # the lines before it were read ahead
            raise ValueError(
                f"The file must be readable UTF-8 text. Received: {str(path)!r}, {where}: {error}"
            ) from error
        except _damage(path) as error:
            raise ValueError(
                f"The file must be readable UTF-8 text. Received: {str(path)!r}, after line {line}: {error}"
            ) from error


def _undecodable_line(path: Path) -> int:
    """The number of the first line that is not UTF-8."""
    line, rest = 1, b""
    for chunk in _chunks(path):
        *whole, rest = (rest + chunk).split(b"\n")
        for content in whole:
            if not _is_utf_8(content):
                return line
            line += 1
    return line


def _is_utf_8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The bytes of a file, decompressed."""
    kind = path.suffix.lower()
    if kind == ".zst":
        with pyarrow.OSFile(str(path)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as file:
            yield file
    else:
        with (gzip.open if kind == ".gz" else open)(path, "rb") as file:
            yield file


def _damage(path: Path, *others: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors with which a file that is damaged is read."""
    zstd = (OSError, pyarrow.ArrowInvalid) if path.suffix.lower() == ".zst" else ()
    return (*DAMAGED, *zstd, *others)


def _chunks(path: Path) -> Iterator[bytes]:
    kind = path.suffix.lower()
    try:
        with _opened(path) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except _damage(path) as error:
        name = "zstd" if kind == ".zst" else "gzip"
        raise ValueError(f"The file must be a whole {name} file. Received: {str(path)!r}: {error}") from error


def _decoded(path: Path, content: bytes, before: int) -> str:
    """Decodes bytes of a file after `before` lines, without "\\r" at the end of lines."""
    try:
        return content.decode("utf-8" if before else "utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = before + error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"The file must be UTF-8 text. Received: {str(path)!r}, line {line}: {error}") from error


class _Malformed(Exception):
    """A row that breaks the rules of its file format."""


def _check_columns(row: Iterable[str], names: dict[str, str], where: str) -> None:
    for argument, name in names.items():
        if name not in row:
            raise ValueError(
                f"`{argument}` must name a column, one of {list(row)}. Received: {argument}={name!r} for {where}"
            )


def _json_rows(
    file: Iterable[str], check: Callable[[Iterable[str], int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
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
        check(row, line)
        yield line, row


def _table_rows(
    file: Iterable[str], kind: str, check: Callable[[Iterable[str], int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))  # the default is less than some texts have
    reader = csv.reader(file, delimiter="\t" if kind == ".tsv" else ",", strict=True)
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise _Malformed(f"line 1: the columns {header} are not all different")
        if header:
            check(header, 1)
        for row in reader:
            if row and len(row) != len(header):
                raise _Malformed(f"line {reader.line_num}: {len(row)} fields where the columns are {header}")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _Malformed(f"line {reader.line_num}: {error}") from error


def _parquet_rows(path: Path, names: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    line, source = 0, str(path)
    try:
        if path.suffix.lower() in COMPRESSED:  # Parquet is read from its end, so as a whole
            with _opened(path) as content:
                source = pyarrow.BufferReader(content.read())
        with parquet.ParquetFile(source, buffer_size=CHUNK) as file:
            _check_columns(file.schema_arrow.names, names, repr(str(path)))
            wanted = list(dict.fromkeys(names.values()))
            for batch in file.iter_batches(ROWS, columns=wanted):
                for row in _decoded_batch(path, batch, line):
                    line += 1
                    yield line, row
    except (pyarrow.ArrowException, OSError, *DAMAGED) as error:
        raise ValueError(
            f"The file must be a whole Parquet file. Received: {str(path)!r}, after row {line}: {error}"
        ) from error


def _decoded_batch(path: Path, batch: Any, before: int) -> list[dict[str, Any]]:
    """The rows of a batch of a Parquet file, after `before` others."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:  # one row after the other, up to the one that cannot be decoded
            return [_decoded_batch(path, batch.slice(i, 1), before + i)[0] for i in range(batch.num_rows)]
        raise ValueError(
            f"The file must hold UTF-8 text. Received: {str(path)!r}, line {before + 1}: {error}"
        ) from error

"""A text file, plain or gzipped -> one string, or two: what a language model learns from, and what it is judged by."""

import gzip
import zlib
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from keras_tx.data import sample_scenes, splits

_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


class PlainText(NamedTuple):
    """One text in two strings, cut at a character: the first part to train on, the rest to validate."""

    train: str
    validation: str


def load_text(name_or_path: str | PathLike = "sample", *, validation_fraction: float = 0.1) -> PlainText:
    """Loads a text for a language model and cuts it in two, the end of it for validation (as nanoGPT does).

    Args:
        name_or_path: "sample" (150 kB of little scenes that come with the package), or a text file in UTF-8, also .gz.
        validation_fraction: how much of the text, counted in characters, is kept for validation.

    Returns:
        `(train, validation)`: strings; one after the other they are the whole text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or not UTF-8 (the line is named), or too short to be cut in two.
    """
    splits.check_fraction("validation_fraction", validation_fraction)
    if not isinstance(name_or_path, (str, PathLike)):
        raise TypeError(f"`name_or_path` must be a string or a path. Received: name_or_path={name_or_path!r}")
    text = sample_scenes.scenes() if name_or_path == "sample" else read(Path(name_or_path))
    cut = int(len(text) * (1 - validation_fraction))
    if not 0 < cut < len(text):
        raise ValueError(
            "The text must have characters for both parts. Received: "
            f"{str(name_or_path)!r} of {len(text)} characters, validation_fraction={validation_fraction}"
        )
    return PlainText(text[:cut], text[cut:])


def read(path: Path) -> str:
    """The text of a UTF-8 file, plain or .gz, without byte order mark, each line ended by "\\n"."""
    if not path.is_file():
        raise FileNotFoundError(f"The file must exist. Received: {str(path)!r}")
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rb") as file:
            content = file.read()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"The file must be UTF-8 text. Received: {str(path)!r}, line {line}: {error}") from error
    except _DAMAGED as error:
        raise ValueError(f"The file must be a whole gzip file. Received: {str(path)!r}: {error}") from error

"""Reads a text file, plain or gzipped, as two strings: for the training and the validation of a language model."""

import gzip
import zlib
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from keras_tx.data import sample_scenes, splits

_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


class PlainText(NamedTuple):
    """A text for training a language model, in two parts, as `load_text` returns it.

    Attributes:
        train: the first part, to train on.
        validation: the rest.

    Examples:
        >>> text = keras_tx.data.load_text("sample")
        >>> text.train.splitlines()[0]
        "THE COOK'S HUNGRY DUCKLING"
        >>> len(text.validation) / len(text.train + text.validation)
        0.1...
    """

    train: str
    validation: str


def load_text(name_or_path: str | PathLike[str] = "sample", *, validation_fraction: float = 0.1) -> PlainText:
    """Loads a text for training a language model; its end is held out for validation, as in nanoGPT.

    Args:
        name_or_path: "sample" for 150 kB of short scenes that come with the package; or a text file in UTF-8, also with
            .gz.
        validation_fraction: the fraction of the characters that are held out for validation, between 0 and 1.

    Returns:
        A `PlainText`: `(train, validation)`, two strings that together are the whole text.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: `name_or_path` is neither a string nor a path.
        ValueError: the file is damaged, is not UTF-8 (the error names the line), or is too short to be cut in two.

    Examples:
        >>> import pathlib
        >>> _ = pathlib.Path("poem.txt").write_text("So they found it on the wall")
        >>> keras_tx.data.load_text("poem.txt", validation_fraction=0.25)
        PlainText(train='So they found it on t', validation='he wall')
    """
    validation_fraction = splits.check_fraction("validation_fraction", validation_fraction)
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
    """Reads a UTF-8 file, plain or .gz; removes the byte order mark and ends every line by "\\n"."""
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

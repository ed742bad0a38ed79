"""Reads text files as two strings, or as two streams of lines: for training and validating a language model."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from keras_tx.data import files, sample_scenes, splits, streams, workers


class PlainText(NamedTuple):
    """A text for training a language model, in two parts, as `load_text` returns it.

    Attributes:
        train: the first part, to train on. A `str`; or, if it is streamed, a `tf.data.Dataset` of lines.
        validation: the rest, in the same form.

    Examples:
        >>> text = keras_tx.data.load_text("sample")
        >>> text.train.splitlines()[0]
        "THE COOK'S HUNGRY DUCKLING"
        >>> len(text.validation) / len(text.train + text.validation)
        0.1...
    """

    train: Any
    validation: Any


def load_text(
    name_or_path: files.Names = "sample",
    *,
    validation_fraction: float = 0.1,
    text_column: str = "text",
    in_memory: bool = True,
    num_shards: int | None = None,
    shard_index: int | None = None,
) -> PlainText:
    """Loads text for training a language model; a part of it is held out for validation.

    In memory, that part is the end of the text, as in nanoGPT. A stream is read line by line, again in each epoch, and
    needs little memory however large the files are. Of its lines every n-th one is held out. `write_tokens` converts a
    stream to token ids once, so that they need not be computed in each epoch.

    Args:
        name_or_path: "sample" for 150 kB of short scenes that come with the package; or a file, a pattern such as
            "news/*.txt.gz", or a list of these. Files are text in UTF-8; or .jsonl, .csv, .tsv or Parquet files with a
            text in each row, which counts as one line; or a folder of Parquet files, as Spark writes it. All may be
            compressed as .gz or .zst. Parquet and .zst need pyarrow: `pip install keras-tx[files]`.
        validation_fraction: the fraction, above 0 and below 1, that is held out for validation: of the characters, or
            of the lines of a stream.
        text_column: the column with the texts in .jsonl, .csv, .tsv and Parquet files; only for those.
        in_memory: False gives two `tf.data.Dataset`s of lines instead of two strings.
        num_shards: for streams, the number of workers that share the lines. None: what TF_CONFIG says, or the number
            of processes of `torch.distributed` or JAX; otherwise one, as with a `keras.distribution` that shares each
            batch itself (`auto_shard_dataset=True`). Each worker reads all files and keeps its lines.
        shard_index: the part of this worker, from 0; given together with `num_shards`.

    Returns:
        A `PlainText`: `(train, validation)`, two strings that together are the whole text, or two datasets of scalar
        strings that together have all lines.

    Raises:
        FileNotFoundError: there is no such file, or no file matches a pattern.
        TypeError: `name_or_path` is neither a string nor a path nor a list of them.
        ValueError: a file is damaged, is not UTF-8 (the error names the line), lacks the column or has another ending,
            or the text is too short to be cut in two. While a stream is read, such an error is a
            `tf.errors.InvalidArgumentError` with the same message.

    Examples:
        >>> import pathlib
        >>> _ = pathlib.Path("poem.txt").write_text("So they found it on the wall")
        >>> keras_tx.data.load_text("poem.txt", validation_fraction=0.25)
        PlainText(train='So they found it on t', validation='he wall')
        >>> _ = pathlib.Path("more.txt").write_text("one\\ntwo\\nthree")
        >>> lines = keras_tx.data.load_text(["poem.txt", "m*.txt"], validation_fraction=0.5, in_memory=False)
        >>> [line.decode() for line in lines.train.as_numpy_iterator()]
        ['So they found it on the wall', 'two']
    """
    validation_fraction = splits.check_fraction("validation_fraction", validation_fraction)
    streams.check_arguments(in_memory, 0, num_shards, shard_index)
    if not files.are_names(name_or_path):
        raise TypeError(
            f"`name_or_path` must be a string or a path, or a list of them. Received: name_or_path={name_or_path!r}"
        )
    paths = [] if name_or_path == "sample" else files.expand("name_or_path", name_or_path)
    if text_column != "text" and not any(files.ending(path) in files.TABLES for path in paths):
        raise ValueError(
            f"`text_column` must be 'text', its default, unless `name_or_path` names {', '.join(files.TABLES)} files. "
            f"Received: text_column={text_column!r}, name_or_path={name_or_path!r}"
        )
    if in_memory:
        text = _whole(paths, text_column)
        cut = int(len(text) * (1 - validation_fraction))
        if not 0 < cut < len(text):
            raise ValueError(
                "The text must have characters for both parts. Received: "
                f"{_short(name_or_path)} of {len(text)} characters, validation_fraction={validation_fraction}"
            )
        return PlainText(text[:cut], text[cut:])
    share = workers.share(num_shards, shard_index)

    def rows(held_out: bool) -> Iterator[tuple[str]]:
        lines = chain.from_iterable(_batches(paths, text_column))
        return ((line,) for line in streams.part(lines, validation_fraction, held_out))

    return PlainText(*(streams.stream(partial(rows, held_out), ["string"], share) for held_out in (False, True)))


def _short(name_or_path: files.Names) -> str:
    return repr(str(name_or_path) if isinstance(name_or_path, PathLike) else name_or_path)


def _whole(paths: Sequence[Path], text_column: str) -> str:
    """The text of all files, the sample if there are none; each file but the last ends in a line break."""
    texts = [sample_scenes.scenes()] if not paths else []
    for path in paths:
        if files.ending(path) in files.TABLES:
            texts.append("\n".join(chain.from_iterable(files.column(path, text_column))))
        else:
            texts.append(files.text(path))
    texts = [text for text in texts if text] or [""]
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts[:-1]) + texts[-1]


def _batches(paths: Sequence[Path], text_column: str) -> Iterator[list[str]]:
    """The lines of all files, or of the sample, in lists."""
    if not paths:
        yield sample_scenes.scenes().splitlines()
    for path in paths:
        yield from files.column(path, text_column) if files.ending(path) in files.TABLES else files.lines(path)

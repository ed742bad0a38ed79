"""A name or a file -> labelled text, split in two: TFDS, JSON lines, CSV, TSV and the embedded sample."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_tx.data import from_files, from_tfds, sample, splits
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


class TextDataset(NamedTuple):
    """Two `tf.data.Dataset`s of (text, label), a string and an int32 scalar, unbatched; `labels[label]` is its name."""

    train: Any
    test: Any
    labels: tuple[str, ...]


def load_dataset(
    name_or_path: str | PathLike = "sample",
    *,
    test: str | PathLike | None = None,
    data_dir: str | PathLike | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> TextDataset:
    """Loads a text-classification dataset into memory, the train part in an order that `seed` decides.

    The order is mixed because prepared files are often sorted by class; it is the same at every call and epoch: add
    `.shuffle(...)` where epochs should differ. Examples without a label (-1 in TFDS) are left out.

    Args:
        name_or_path: "sample" (short film reviews that come with the package), the name of a TFDS dataset such as
            "imdb_reviews" or "glue/sst2", or a .jsonl, .csv or .tsv file (also .gz) with one example a row. The first
            row of .csv and .tsv names the columns. Labels are words or integers; sorted, they are `labels`.
        test: the file of the test part, for a `name_or_path` that is a file. Without it, `test_fraction` of each class
            is taken out of the file. TFDS: the split "test", else "validation", whichever has labels, else a part of
            "train".
        data_dir: where TFDS keeps prepared datasets; TFDS' own folder by default. What is there loads without network.
        text_column, label_column: the column of a file, "text" and "label" by default; the feature of a TFDS dataset,
            found by its type by default.
        test_fraction: how much to take out of the train part where there is no test part.
        seed: decides the order of the train part, and which examples are taken out of it.

    Returns:
        `(train, test, labels)`.

    Raises:
        FileNotFoundError: there is no such file, or TFDS has not prepared the dataset and cannot download it.
        ValueError: anything else that is wrong, with the line of the file, or with the names that are near.
    """
    rng = splits.generator(seed)
    splits.check_fraction("test_fraction", test_fraction)
    if not isinstance(name_or_path, (str, PathLike)):
        raise TypeError(f"`name_or_path` must be a string or a path. Received: name_or_path={name_or_path!r}")
    is_file = from_files.is_path(name_or_path)
    if test is not None and not is_file:
        raise ValueError(
            f"`test` must be None unless `name_or_path` is a file. Received: name_or_path={str(name_or_path)!r}, "
            f"test={str(test)!r}"
        )
    if name_or_path == "sample":
        parts, names = sample.reviews(), sample.LABELS
    elif is_file:
        columns = (text_column or "text", label_column or "label")
        paths = [Path(path) for path in (name_or_path, test) if path is not None]
        parts, names = from_files.read(paths, *columns)
    else:
        parts, names = from_tfds.read(str(name_or_path), data_dir, text_column, label_column)
    texts, labels = _columns(parts[0])
    if len(parts) == 2:
        order = rng.permutation(len(labels))
        return TextDataset(_dataset(texts, labels, order), _dataset(*_columns(parts[1])), tuple(names))
    order, held_out = splits.hold_out(labels, test_fraction, rng)
    if not len(held_out):
        raise ValueError(
            "`name_or_path` must hold two examples of some class, or come with `test`. Received: "
            f"name_or_path={str(name_or_path)!r} with {len(labels)} examples of {len(names)} classes"
        )
    return TextDataset(_dataset(texts, labels, order), _dataset(texts, labels, held_out), tuple(names))


def _columns(examples: Sequence[tuple]):
    texts, labels = zip(*examples, strict=True)
    return np.array(texts, dtype=object), np.array(labels, dtype="int32")


def _dataset(texts, labels, order=slice(None)):
    return tf.data.Dataset.from_tensor_slices((texts[order], labels[order]))

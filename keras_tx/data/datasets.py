"""Datasets for text classification, from TFDS, JSON lines, CSV or TSV files, or the built-in sample."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_tx.data import from_files, from_tfds, sample, splits
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


class TextDataset(NamedTuple):
    """A dataset for text classification, as `load_dataset` returns it.

    Attributes:
        train: a `tf.data.Dataset` of unbatched pairs (text, label), a string scalar and an int32 scalar.
        test: the same for the test part.
        labels: the names of the classes; `labels[label]` is the name of `label`.

    Examples:
        >>> dataset = keras_tx.data.load_dataset("sample")
        >>> dataset.labels
        ('negative', 'positive')
        >>> for text, label in dataset.test.take(1):
        ...     print(text.dtype, text.shape, label.dtype, label.shape)
        <dtype: 'string'> () <dtype: 'int32'> ()
    """

    train: Any
    test: Any
    labels: tuple[str, ...]


def load_dataset(
    name_or_path: str | PathLike[str] = "sample",
    *,
    test: str | PathLike[str] | None = None,
    data_dir: str | PathLike[str] | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
) -> TextDataset:
    """Loads a dataset for text classification into memory and shuffles its train part.

    The train part is shuffled because files are often sorted by class. The order is the same in every call and every
    epoch: add `.shuffle(...)` if epochs should differ. Examples without a label (-1 in TFDS) are left out.

    Args:
        name_or_path: "sample" for the built-in short film reviews; the name of a TFDS dataset such as "imdb_reviews" or
            "glue/sst2"; or a .jsonl, .csv or .tsv file, also with .gz, with one example in each row. The first row of a
            .csv or .tsv file names the columns. Labels are strings or integers; the sorted labels are the class names.
        test: the file of the test part, if `name_or_path` is a file. None: `test_fraction` of each class is held out
            from that file. With TFDS the test part is the first of the splits "test" and "validation" that has labels,
            otherwise a part of "train".
        data_dir: the folder in which TFDS keeps prepared datasets. None: the default of TFDS. A prepared dataset needs
            no network.
        text_column: the column or feature with the texts. None: "text" in files; with TFDS it is found by its type.
        label_column: the column or feature with the labels. None: "label" in files; with TFDS it is found by its type.
        test_fraction: the part of the examples, between 0 and 1, to hold out for testing if there is no test part.
        seed: an integer of at least 0 that decides the order of the train part and which examples are held out.

    Returns:
        A `TextDataset`: `(train, test, labels)`.

    Raises:
        FileNotFoundError: there is no such file, or TFDS has not prepared the dataset and cannot download it.
        TypeError: `name_or_path` is neither a string nor a path.
        ValueError: an argument or a file is not valid; the message has the line, or suggests similar names.

    Examples:
        >>> import pathlib
        >>> _ = pathlib.Path("reviews.csv").write_text("text,label\\ngood,1\\nbad,0\\nfine,1\\nawful,0\\n")
        >>> train, test, labels = keras_tx.data.load_dataset("reviews.csv", test_fraction=0.5)
        >>> int(train.cardinality()), int(test.cardinality()), labels
        (2, 2, ('0', '1'))
    """
    rng = splits.generator(seed)
    test_fraction = splits.check_fraction("test_fraction", test_fraction)
    if not isinstance(name_or_path, (str, PathLike)):
        raise TypeError(f"`name_or_path` must be a string or a path. Received: name_or_path={name_or_path!r}")
    is_file = from_files.is_path(name_or_path)
    if test is not None and not is_file:
        raise ValueError(
            f"`test` must be None unless `name_or_path` is a file. Received: name_or_path={str(name_or_path)!r}, "
            f"test={str(test)!r}"
        )
    parts: Sequence[list[tuple[Any, Any]]]
    names: tuple[str, ...]
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
            "`name_or_path` must have at least two examples of some class, or `test` must be given. Received: "
            f"name_or_path={str(name_or_path)!r} with {len(labels)} examples of {len(names)} classes"
        )
    return TextDataset(_dataset(texts, labels, order), _dataset(texts, labels, held_out), tuple(names))


def _columns(examples: Sequence[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    texts, labels = zip(*examples, strict=True)
    return np.array(texts, dtype=object), np.array(labels, dtype="int32")


def _dataset(texts: np.ndarray, labels: np.ndarray, order: Any = slice(None)) -> Any:
    return tf.data.Dataset.from_tensor_slices((texts[order], labels[order]))

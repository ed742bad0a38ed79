"""Datasets for text classification, from TFDS, JSON lines, CSV, TSV or Parquet files, or the built-in sample."""

from collections.abc import Iterator, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_tx.data import files, from_files, from_tfds, sample, splits, streams, workers
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


class TextDataset(NamedTuple):
    """A dataset for text classification, as `load_dataset` returns it.

    Attributes:
        train: a `tf.data.Dataset` of unbatched pairs (text, label), a string scalar and an int32 scalar.
        test: the same for the test split.
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
    name_or_path: files.Names = "sample",
    *,
    test: files.Names | None = None,
    data_dir: str | PathLike[str] | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    test_fraction: float = 0.1,
    labels: Sequence[str] | None = None,
    seed: int = 0,
    in_memory: bool = True,
    num_shards: int | None = None,
    shard_index: int | None = None,
) -> TextDataset:
    """Loads a dataset for text classification into memory and shuffles its training split, or streams it from files.

    In memory, the training split is shuffled because files are often sorted by class. The order is the same in every
    call and every epoch: add `.shuffle(...)` if epochs should differ. Examples of TFDS without a label (-1) are left
    out; in files a missing label is an error.

    A stream (`in_memory=False`) reads files row by row, again in each epoch, and needs little memory however large they
    are. The rows keep the order of the files. If they are sorted by class, shuffle them in the files:
    `.shuffle(...)` mixes only neighbours.

    Args:
        name_or_path: "sample" for the built-in short film reviews; the name of a TFDS dataset such as "imdb_reviews" or
            "glue/sst2"; or a .jsonl, .csv, .tsv or Parquet file, also with .gz or .zst, with one example in each row;
            or a pattern such as "reviews/*.jsonl.gz", a folder of Parquet files, as Spark writes it, or a list of
            these. The first row of a .csv or .tsv file names the columns; a .tsv file is a .csv file with tabs for
            commas, also as to quotation marks. Labels are strings or integers; the sorted labels are the class names.
            Parquet and .zst need pyarrow: `pip install keras-tx[files]`.
        test: the files of the test split, if `name_or_path` names files. None: `test_fraction` of each class is held
            out from those; from a stream, every n-th example of the class, with n = 1 / `test_fraction`, so a class
            with fewer than n has none. With TFDS the test split is the first of the splits "test" and "validation" that
            has labels, otherwise a part of "train".
        data_dir: the folder in which TFDS keeps prepared datasets, only for those. None: the default of TFDS. A
            prepared dataset needs no network.
        text_column: the column or feature with the texts. None: "text" in files; with TFDS it is found by its type. Not
            for the sample.
        label_column: the column or feature with the labels. None: "label" in files; with TFDS it is found by its type.
            Not for the sample.
        test_fraction: the part of the examples, above 0 and below 1, to hold out for testing if there is no test split.
        labels: the names of the classes in files, in the order of their ids. None: they are found, for which a stream
            is read once when it is loaded.
        seed: an integer of at least 0 that decides the order of the training split and which examples are held out. Not
            for streams.
        in_memory: False streams files.
        num_shards: for streams, the number of workers that share the examples. None: what TF_CONFIG says, or the number
            of processes of `torch.distributed` or JAX; otherwise one, as with a `keras.distribution` that shares each
            batch itself (`auto_shard_dataset=True`). Each worker reads all files and keeps its rows.
        shard_index: the part of this worker, from 0; given together with `num_shards`.

    Returns:
        A `TextDataset`: `(train, test, labels)`.

    Raises:
        FileNotFoundError: there is no such file, or TFDS has not prepared the dataset and cannot download it.
        TypeError: `name_or_path` is neither a string nor a path, nor a list of them.
        ValueError: an argument or a file is not valid; the message has the line, or suggests similar names. While a
            stream is read, such an error is a `tf.errors.InvalidArgumentError` with the same message.

    Examples:
        >>> import pathlib
        >>> _ = pathlib.Path("reviews.csv").write_text("text,label\\ngood,1\\nbad,0\\nfine,1\\nawful,0\\n")
        >>> train, test, labels = keras_tx.data.load_dataset("reviews.csv", test_fraction=0.5)
        >>> int(train.cardinality()), int(test.cardinality()), labels
        (2, 2, ('0', '1'))
        >>> stream = keras_tx.data.load_dataset("reviews.c*", test_fraction=0.5, in_memory=False)
        >>> [(text.decode(), int(label)) for text, label in stream.train.as_numpy_iterator()]
        [('good', 1), ('bad', 0)]
    """
    rng = splits.generator(seed)
    test_fraction = splits.check_fraction("test_fraction", test_fraction)
    streams.check_arguments(in_memory, seed, num_shards, shard_index)
    if not files.are_names(name_or_path):
        raise TypeError(
            f"`name_or_path` must be a string or a path, or a list of them. Received: name_or_path={name_or_path!r}"
        )
    is_file = from_files.is_path(name_or_path)
    is_sample = not is_file and name_or_path == "sample"
    if not is_file:
        streams.check_unread("files", name_or_path, test=test, labels=labels, in_memory=in_memory)
    if is_file or is_sample:
        streams.check_unread("a TFDS dataset", name_or_path, data_dir=data_dir)
    if is_sample:
        rule = "files or a TFDS dataset"
        streams.check_unread(rule, name_or_path, text_column=text_column, label_column=label_column)
    parts: Sequence[list[tuple[Any, Any]]]
    names: tuple[str, ...]
    if is_sample:
        parts, names = sample.reviews(), sample.LABELS
    elif is_file:
        columns = (text_column or "text", label_column or "label")
        named = {"name_or_path": name_or_path, "test": test}
        paths = [files.expand(name, given) for name, given in named.items() if given is not None]
        if not in_memory:
            return _streamed(paths, columns, labels, test_fraction, workers.share(num_shards, shard_index))
        parts, names = from_files.read(paths, *columns, labels)
    else:
        parts, names = from_tfds.read(str(name_or_path), data_dir, text_column, label_column)
    texts, ids = _columns(parts[0])
    if len(parts) == 2:
        order = rng.permutation(len(ids))
        return TextDataset(_dataset(texts, ids, order), _dataset(*_columns(parts[1])), tuple(names))
    order, held_out = splits.hold_out(ids, test_fraction, rng)
    if not len(held_out):
        raise ValueError(
            "`name_or_path` must have at least two examples of some class, or `test` must be given. Received: "
            f"name_or_path={str(name_or_path)!r} with {len(ids)} examples of {len(names)} classes"
        )
    return TextDataset(_dataset(texts, ids, order), _dataset(texts, ids, held_out), tuple(names))


def _streamed(
    paths: list[list[Path]],
    columns: tuple[str, str],
    labels: Sequence[str] | None,
    test_fraction: float,
    share: tuple[int, int],
) -> TextDataset:
    """The dataset of the files of the training split and, if there are any, those of the test split."""
    names = from_files.class_names((e[1] for e in from_files.examples(paths[0], *columns)), paths[0], labels)
    to_id = from_files.label_ids(names)

    def rows(held_out: bool) -> Iterator[tuple[str, int]]:
        found = from_files.examples(paths[-1] if held_out else paths[0], *columns)
        if len(paths) == 1:
            found = streams.part(found, test_fraction, held_out, key=lambda example: example[1])
        return ((example[0], to_id(example)) for example in found)

    train, tested = (streams.stream(partial(rows, part), ["string", "int32"], share) for part in (False, True))
    return TextDataset(train, tested, names)


def _columns(examples: Sequence[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    texts, labels = zip(*examples, strict=True)
    return np.array(texts, dtype=object), np.array(labels, dtype="int32")


def _dataset(texts: np.ndarray, labels: np.ndarray, order: Any = slice(None)) -> Any:
    return tf.data.Dataset.from_tensor_slices((texts[order], labels[order]))

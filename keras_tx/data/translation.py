"""Datasets of sentences and their translations, from parallel files, TFDS or the built-in sample."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from keras_tx.data import files, from_tfds, parallel_files, sample_pairs, splits, streams, workers
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

Parts = dict[str, list[tuple[Any, Any]]]  # "train", "validation" and "test" -> pairs
Readers = dict[str, Callable[[], Iterator[tuple[str, str]]]]  # the same -> a function that begins to read pairs


class TranslationDataset(NamedTuple):
    """A dataset of sentence pairs, as `load_translation` returns it.

    Attributes:
        train: a `tf.data.Dataset` of unbatched pairs (source, target), two string scalars.
        validation: the same for the validation split.
        test: the same for the test split.
        languages: the names of the source and the target language.

    Examples:
        >>> dataset = keras_tx.data.load_translation("sample")
        >>> dataset.languages, int(dataset.train.cardinality()), int(dataset.test.cardinality())
        (('english', 'tavic'), 6000, 300)
    """

    train: Any
    validation: Any
    test: Any
    languages: tuple[str, str]


def load_translation(
    name_or_path: files.Names | Sequence[files.Names] = "sample",
    *,
    source: str | None = None,
    target: str | None = None,
    data_dir: str | PathLike[str] | None = None,
    validation: files.Names | Sequence[files.Names] | None = None,
    test: files.Names | Sequence[files.Names] | None = None,
    test_fraction: float = 0.05,
    seed: int = 0,
    in_memory: bool = True,
    num_shards: int | None = None,
    shard_index: int | None = None,
) -> TranslationDataset:
    """Loads sentence pairs into memory and shuffles the training split, or streams them from files.

    Pairs with an empty sentence are left out of the training split, and a warning has their number. Validation and test
    keep every line in its place, because BLEU compares line by line.

    A stream (`in_memory=False`) reads files line by line, again in each epoch, and needs little memory however large
    they are. Its pairs keep the order of the files.

    Args:
        name_or_path: one of these. Files may be compressed as .gz or .zst; Parquet and .zst need pyarrow:
            `pip install keras-tx[files]`.

            - "sample": the built-in 6,600 pairs of English and Tavic, an invented language.
            - The name of a TFDS dataset, such as "ted_hrlr_translate/pt_to_en".
            - A folder of parallel files (UTF-8, one sentence per line) whose names consist of part and language, such
              as `train.en.gz`, `train.de.gz`, `val.en.gz` and `test_2016.en.gz`.
            - Such a folder and a prefix that the names begin with, such as "corpus/news.".
            - The two files of the training split, source and target; or two patterns, or two lists of files.
            - .jsonl, .csv, .tsv or Parquet files with a column for each language: one file, a pattern, a folder of
              Parquet files and no others, as Spark writes it, or a list.
        source: the source language: the last suffix of the files, the name of the column, or a language of the sample
            or the TFDS dataset. None: of two languages, the one that is not `target`; the sample and TFDS have a
            default direction.
        target: the target language, likewise.
        data_dir: the folder in which TFDS keeps prepared datasets, only for those. None: the default of TFDS. A
            prepared dataset needs no network.
        validation: the two files of the validation split, or its tables, or, with a folder, the prefix of their names.
        test: the two files of the test split, its tables, or the prefix of their names, such as "test_2017".
        test_fraction: the fraction of the pairs, above 0 and below 1, to hold out for validation if there are no files
            for it, and likewise for test. From a stream, every n-th pair is held out, with n = 1 / `test_fraction`;
            with fewer than n pairs none is.
        seed: an integer of at least 0 that decides the order of the training split and which pairs are held out. Not
            for streams.
        in_memory: False streams files.
        num_shards: for streams, the number of workers that share the pairs. None: what TF_CONFIG says, or the number
            of processes of `torch.distributed` or JAX; otherwise one, as with a `keras.distribution` that shares each
            batch itself (`auto_shard_dataset=True`). Each worker reads all files and keeps its pairs.
        shard_index: the part of this worker, from 0; given together with `num_shards`.

    Returns:
        A `TranslationDataset`: `(train, validation, test, languages)`.

    Raises:
        FileNotFoundError: a file is missing, or TFDS has not prepared the dataset and cannot download it.
        TypeError: `name_or_path` is neither a string, a path nor two of them.
        ValueError: an argument or a file is not valid; the message has the file and line. While a stream is read, such
            an error is a `tf.errors.InvalidArgumentError` with the same message.

    Examples:
        >>> import pathlib
        >>> for name, text in {"train.en": "a dog\\na cat", "train.de": "ein Hund\\neine Katze"}.items():
        ...     _ = pathlib.Path(name).write_text(text)
        >>> pair = ("train.en", "train.de")
        >>> dataset = keras_tx.data.load_translation(pair, validation=pair, test=pair)
        >>> for source, target in dataset.test:
        ...     print(source.numpy().decode(), "->", target.numpy().decode())
        a dog -> ein Hund
        a cat -> eine Katze
    """
    rng = splits.generator(seed)
    test_fraction = splits.check_fraction("test_fraction", test_fraction)
    streams.check_arguments(in_memory, seed, num_shards, shard_index)
    if source is not None and source == target:
        raise ValueError(f"`source` and `target` must differ. Received: source={source!r}, target={target!r}")
    chosen = {"validation": validation, "test": test}
    readers: Readers = {}
    parts: Parts = {}
    if parallel_files.are_tables(name_or_path):
        readers, languages = _of_tables({"train": name_or_path, **chosen}, source, target)
    elif _is_pair(name_or_path):
        readers, languages = _of_files({"train": name_or_path, **chosen}, source, target)
    elif not isinstance(name_or_path, (str, PathLike)):
        raise TypeError(
            "`name_or_path` must be a string, a path, or two of them for the two files of the training split. "
            f"Received: name_or_path={name_or_path!r}"
        )
    elif name_or_path != "sample" and parallel_files.has_files(name_or_path):
        prefixes: Any = {part: name for part, name in {"train": None, **chosen}.items() if not _is_pair(name)}
        found, languages = parallel_files.find(name_or_path, source, target, prefixes)
        readers, languages = _of_files({**chosen, **found}, *languages)
    else:
        streams.check_unread("files", name_or_path, **chosen, in_memory=in_memory)
        if name_or_path == "sample":
            pairs, both = sample_pairs.pairs(), sample_pairs.LANGUAGES
        else:
            pairs, both = from_tfds.read_pairs(str(name_or_path), data_dir)
        parts, languages = _directed(pairs, both, source, target)
    if readers or name_or_path == "sample":
        streams.check_unread("a TFDS dataset", name_or_path, data_dir=data_dir)
    if not in_memory:
        return _streamed(readers, languages, test_fraction, workers.share(num_shards, shard_index))
    parts |= {part: list(read()) for part, read in readers.items()}
    parts["train"] = list(_without_empty(parts["train"]))
    order = rng.permutation(len(parts["train"]))
    for part in ("test", "validation"):
        if part not in parts:
            count = max(1, round(len(parts["train"]) * test_fraction))
            held_out, order = np.sort(order[:count]), order[count:]
            parts[part] = [parts["train"][i] for i in held_out]
    if not len(order):
        raise ValueError(
            "`name_or_path` must hold pairs to train on. Received: "
            f"name_or_path={name_or_path!r} with {len(parts['train'])}, test_fraction={test_fraction}"
        )
    parts["train"] = [parts["train"][i] for i in order]
    train, held_out, tested = (_dataset(parts[part]) for part in ("train", "validation", "test"))
    return TranslationDataset(train, held_out, tested, languages)


def _is_pair(paths: Any) -> bool:
    return isinstance(paths, (tuple, list)) and len(paths) == 2


def _of_files(given: dict[str, Any], source: str | None, target: str | None) -> tuple[Readers, tuple[str, str]]:
    """Functions that read each split. The languages, if not given, are the last suffixes of the training files."""
    paths: dict[str, Any] = {}
    for part, names in given.items():
        if _is_pair(names):
            paths[part] = parallel_files.expand("name_or_path" if part == "train" else part, names)
        elif names is not None:
            raise ValueError(
                f"`{part}` must be two files, source and target, as `name_or_path` is. Received: {part}={names!r}"
            )
    suffixes = [parallel_files.language_of(side[0]) for side in paths["train"]]
    readers: Readers = {part: partial(parallel_files.read, both) for part, both in paths.items()}
    return readers, (source or suffixes[0], target or suffixes[1])


def _of_tables(given: dict[str, Any], source: str | None, target: str | None) -> tuple[Readers, tuple[str, str]]:
    """Functions that read each part from tables with columns `source` and `target`."""
    if source is None or target is None:
        raise ValueError(
            "`source` and `target` must be given for tables, the columns of the two languages. Received: "
            f"source={source!r}, target={target!r}, name_or_path={given['train']!r}"
        )
    readers: Readers = {}
    for part, names in given.items():
        if names is not None:
            paths = files.expand("name_or_path" if part == "train" else part, names)
            readers[part] = partial(parallel_files.read_tables, paths, (source, target))
    return readers, (source, target)


def _streamed(
    readers: Readers, languages: tuple[str, str], test_fraction: float, share: tuple[int, int]
) -> TranslationDataset:
    """The streams of train, validation and test."""

    def rows(part: str) -> Iterator[Any]:
        if part in readers and part != "train":
            return readers[part]()
        found: Iterator[Any] = _without_empty(readers["train"]())
        for other in ("test", "validation"):
            if other not in readers:
                if part == other:
                    return streams.part(found, test_fraction, held_out=True)
                found = streams.part(found, test_fraction, held_out=False)
        return found

    parts = ("train", "validation", "test")
    train, held_out, tested = (streams.stream(partial(rows, part), ["string", "string"], share) for part in parts)
    return TranslationDataset(train, held_out, tested, languages)


def _directed(
    parts: Parts, languages: tuple[str, str], source: str | None, target: str | None
) -> tuple[Parts, tuple[str, str]]:
    """Turns pairs of two `languages` so that they go from `source` to `target`; None keeps their order."""
    for name, language in (("source", source), ("target", target)):
        if language not in (None, *languages):
            raise ValueError(f"`{name}` must be one of {list(languages)}. Received: {name}={language!r}")
    if source in (None, languages[0]) and target in (None, languages[1]):
        return parts, languages
    turned = {part: [(second, first) for first, second in pairs] for part, pairs in parts.items()}
    return turned, (languages[1], languages[0])


def _without_empty(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    count, empty, first = 0, 0, 0
    for pair in pairs:
        count += 1
        if all(side.strip() for side in pair):
            yield pair
        else:
            empty, first = empty + 1, first or count
    if empty:
        warnings.warn(
            f"{empty} of {count} pairs have an empty side and are left out of the training split, the first in line "
            f"{first}",
            stacklevel=3,
        )


def _dataset(pairs: list[tuple[Any, Any]]) -> Any:
    sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
    return tf.data.Dataset.from_tensor_slices((np.array(sources, object), np.array(targets, object)))

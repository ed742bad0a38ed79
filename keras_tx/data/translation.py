"""Datasets of sentences and their translations, from parallel files, TFDS or the built-in sample."""

import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_tx.data import from_tfds, parallel_files, sample_pairs, splits
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

Parts = dict[str, list[tuple[Any, Any]]]  # "train", "validation" and "test" -> pairs


class TranslationDataset(NamedTuple):
    """A dataset of sentence pairs, as `load_translation` returns it.

    Attributes:
        train: a `tf.data.Dataset` of unbatched pairs (source, target), two string scalars.
        validation: the same for the validation part.
        test: the same for the test part.
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
    name_or_path: str | PathLike[str] | Sequence[str | PathLike[str]] = "sample",
    *,
    source: str | None = None,
    target: str | None = None,
    data_dir: str | PathLike[str] | None = None,
    validation: str | Sequence[str | PathLike[str]] | None = None,
    test: str | Sequence[str | PathLike[str]] | None = None,
    test_fraction: float = 0.05,
    seed: int = 0,
) -> TranslationDataset:
    """Loads sentence pairs into memory and shuffles the train part.

    Pairs with an empty sentence are left out of the train part, and a warning has their number. Validation and test
    keep every line in its place, because BLEU compares line by line.

    Args:
        name_or_path: "sample" for the built-in 6,600 pairs of English and Tavic, an invented language; the name of a
            TFDS dataset such as "ted_hrlr_translate/pt_to_en"; a folder of parallel files (UTF-8, one sentence per
            line) whose names consist of part and language, such as `train.en.gz`, `train.de.gz`, `val.en.gz` and
            `test_2016.en.gz`; such a folder and a prefix that the names begin with, such as "corpus/news."; or the two
            files of the train part, source and target.
        source: the source language: the last suffix of the files, or a language of the sample or the TFDS dataset.
            None: of two languages, the one that is not `target`; the sample and TFDS have a default direction.
        target: the target language, likewise.
        data_dir: the folder in which TFDS keeps prepared datasets. None: the default of TFDS. A prepared dataset needs
            no network.
        validation: the two files of the validation part, or, with a folder, the prefix of their names.
        test: the two files of the test part, or the prefix of their names, such as "test_2017".
        test_fraction: the fraction of the pairs, between 0 and 1, to hold out for validation if there are no files for
            it, and likewise for test.
        seed: an integer of at least 0 that decides the order of the train part and which pairs are held out.

    Returns:
        A `TranslationDataset`: `(train, validation, test, languages)`.

    Raises:
        FileNotFoundError: a file is missing, or TFDS has not prepared the dataset and cannot download it.
        TypeError: `name_or_path` is neither a string, a path nor two of them.
        ValueError: an argument or a file is not valid; the message has the file and line.

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
    chosen = {"validation": validation, "test": test}
    if _is_pair(name_or_path):
        parts, languages = _from_files({"train": name_or_path, **chosen}, source, target)
    elif not isinstance(name_or_path, (str, PathLike)):
        raise TypeError(
            "`name_or_path` must be a string, a path, or two of them for the two files of the train part. Received: "
            f"name_or_path={name_or_path!r}"
        )
    elif name_or_path != "sample" and parallel_files.has_files(name_or_path):
        prefixes: Any = {part: name for part, name in {"train": None, **chosen}.items() if not _is_pair(name)}
        files, languages = parallel_files.find(name_or_path, source, target, prefixes)
        parts, languages = _from_files({**chosen, **files}, *languages)
    elif validation is not None or test is not None:
        raise ValueError(
            "`validation` and `test` must be None unless `name_or_path` names files. Received: "
            f"name_or_path={name_or_path!r}, validation={validation!r}, test={test!r}"
        )
    elif name_or_path == "sample":
        parts, languages = _directed(sample_pairs.pairs(), sample_pairs.LANGUAGES, source, target)
    else:
        found, both = from_tfds.read_pairs(str(name_or_path), data_dir)
        parts, languages = _directed(found, both, source, target)
    parts["train"] = _without_empty(parts["train"])
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


def _from_files(files: dict[str, Any], source: str | None, target: str | None) -> tuple[Parts, tuple[str, str]]:
    """Reads the files of each part. The languages, if not given, are the last suffixes of the train part's files."""
    parts: Parts = {}
    for part, paths in files.items():
        if _is_pair(paths):
            parts[part] = parallel_files.read((Path(paths[0]), Path(paths[1])))
        elif paths is not None:
            raise ValueError(f"`{part}` must be two files where `name_or_path` is. Received: {part}={paths!r}")
    suffixes = [parallel_files.language_of(Path(path)) for path in files["train"]]
    return parts, (source or suffixes[0], target or suffixes[1])


def _directed(
    parts: Parts, languages: tuple[str, str], source: str | None, target: str | None
) -> tuple[Parts, tuple[str, str]]:
    """Turns pairs of two `languages` so that they go from `source` to `target`; None keeps their order."""
    for name, language in (("source", source), ("target", target)):
        if language not in (None, *languages):
            raise ValueError(f"`{name}` must be one of {list(languages)}. Received: {name}={language!r}")
    if source is not None and source == target:
        raise ValueError(f"`source` and `target` must differ. Received: source={source!r}, target={target!r}")
    if source in (None, languages[0]) and target in (None, languages[1]):
        return parts, languages
    turned = {part: [(second, first) for first, second in pairs] for part, pairs in parts.items()}
    return turned, (languages[1], languages[0])


def _without_empty(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    empty = [line for line, pair in enumerate(pairs, start=1) if not all(side.strip() for side in pair)]
    if empty:
        warnings.warn(
            f"{len(empty)} of {len(pairs)} pairs have an empty side and are left out of the train part, the first in "
            f"line {empty[0]}",
            stacklevel=3,
        )
    return [pair for pair in pairs if all(side.strip() for side in pair)]


def _dataset(pairs: list[tuple[Any, Any]]) -> Any:
    sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
    return tf.data.Dataset.from_tensor_slices((np.array(sources, object), np.array(targets, object)))

"""A name, a folder or two files -> sentences and their translations: parallel files, TFDS and the embedded sample."""

import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_tx.data import from_tfds, parallel_files, sample_pairs, splits
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


class TranslationDataset(NamedTuple):
    """Three `tf.data.Dataset`s of (source, target), scalar strings, unbatched; `languages` names the two."""

    train: Any
    validation: Any
    test: Any
    languages: tuple[str, str]


def load_translation(
    name_or_path: str | PathLike | Sequence[str | PathLike] = "sample",
    *,
    source: str | None = None,
    target: str | None = None,
    data_dir: str | PathLike | None = None,
    validation: str | Sequence[str | PathLike] | None = None,
    test: str | Sequence[str | PathLike] | None = None,
    test_fraction: float = 0.05,
    seed: int = 0,
) -> TranslationDataset:
    """Loads sentence pairs into memory, the train part in an order that `seed` decides.

    Pairs with an empty side teach nothing: they are left out of the train part, and a warning says how many they were.
    Validation and test keep every line in its place, for BLEU compares by line.

    Args:
        name_or_path: "sample" (6,000 pairs of English and Tavic, a language made for it, that come with the package);
            the name of a TFDS dataset such as "ted_hrlr_translate/pt_to_en"; a folder of parallel files named by part
            and language, such as `train.en.gz`, `train.de.gz`, `val.en.gz`, `test_2016.en.gz` (UTF-8, one sentence a
            line); a path with what such names begin with; or the two files of the train part, source and target.
        source, target: the languages: the last suffixes of the files, or two languages of the sample or TFDS dataset
            in the order wanted. Where there are but two, one says which the other is.
        data_dir: where TFDS keeps prepared datasets; TFDS' own folder by default. What is there loads without network.
        validation, test: for files, the two of the part; or, in a folder, what their names begin with: "test_2017".
        test_fraction: what is taken out of the train part for validation, and again for test, where there is none.
        seed: decides the order of the train part, and which pairs are taken out of it.

    Returns:
        `(train, validation, test, languages)`.

    Raises:
        FileNotFoundError: a file is missing, or TFDS has not prepared the dataset and cannot download it.
        ValueError: anything else that is wrong, with the file and line where there is one.
    """
    rng = splits.generator(seed)
    splits.check_fraction("test_fraction", test_fraction)
    chosen = {"validation": validation, "test": test}
    if _is_pair(name_or_path):
        parts, languages = _from_files({"train": name_or_path, **chosen}, source, target)
    elif not isinstance(name_or_path, (str, PathLike)):
        raise TypeError(
            "`name_or_path` must be a string, a path, or two of them for the two files of the train part. Received: "
            f"name_or_path={name_or_path!r}"
        )
    elif name_or_path != "sample" and parallel_files.is_place(name_or_path):
        begins: Any = {part: name for part, name in {"train": None, **chosen}.items() if not _is_pair(name)}
        found, languages = parallel_files.find(name_or_path, source, target, begins)
        parts, languages = _from_files({**chosen, **found}, *languages)
    elif validation is not None or test is not None:
        raise ValueError(
            "`validation` and `test` must be None unless `name_or_path` names files. Received: "
            f"name_or_path={name_or_path!r}, validation={validation!r}, test={test!r}"
        )
    elif name_or_path == "sample":
        parts, languages = _directed(sample_pairs.pairs(), sample_pairs.LANGUAGES, source, target)
    else:
        found, both = from_tfds.read_pairs(name_or_path, data_dir)
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


def _is_pair(paths):
    return isinstance(paths, (tuple, list)) and len(paths) == 2


def _from_files(files, source, target):
    """Two files of each part -> its pairs. The languages are the last suffixes of the train part's unless given."""
    parts = {}
    for part, paths in files.items():
        if _is_pair(paths):
            parts[part] = parallel_files.read((Path(paths[0]), Path(paths[1])))
        elif paths is not None:
            raise ValueError(f"`{part}` must be two files where `name_or_path` is. Received: {part}={paths!r}")
    suffixes = (parallel_files.language_of(Path(path)) for path in files["train"])
    return parts, tuple(given or suffix for given, suffix in zip((source, target), suffixes, strict=True))


def _directed(parts, languages, source, target):
    """The pairs from `source` to `target`, two of `languages`; from the first to the second where nothing is said."""
    for name, language in (("source", source), ("target", target)):
        if language not in (None, *languages):
            raise ValueError(f"`{name}` must be one of {list(languages)}. Received: {name}={language!r}")
    if source is not None and source == target:
        raise ValueError(f"`source` and `target` must differ. Received: source={source!r}, target={target!r}")
    if source in (None, languages[0]) and target in (None, languages[1]):
        return parts, tuple(languages)
    return {part: [pair[::-1] for pair in pairs] for part, pairs in parts.items()}, tuple(languages[::-1])


def _without_empty(pairs):
    empty = [line for line, pair in enumerate(pairs, start=1) if not all(side.strip() for side in pair)]
    if empty:
        warnings.warn(
            f"{len(empty)} of {len(pairs)} pairs have an empty side and are left out of the train part, the first in "
            f"line {empty[0]}",
            stacklevel=3,
        )
    return [pair for pair in pairs if all(side.strip() for side in pair)]


def _dataset(pairs):
    sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
    return tf.data.Dataset.from_tensor_slices((np.array(sources, object), np.array(targets, object)))

"""Reads sentence pairs from parallel files: line 7 of `train.de.gz` is the translation of line 7 of `train.en.gz`.

Also from tables (.jsonl, .csv, .tsv, Parquet), which have a column for each language.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from os import PathLike
from pathlib import Path
from typing import Any

from keras_tx.data import files

PARTS = {
    "train": ("train",),
    "validation": ("val", "dev"),
    "test": ("test",),
}  # the usual prefixes of the file names of each part


def has_files(name_or_path: str | PathLike[str]) -> bool:
    """Whether this is a path object, a folder that exists, or a prefix of the paths of files."""
    place = Path(name_or_path)
    return isinstance(name_or_path, PathLike) or place.is_dir() or any(_listed(place))


def are_tables(names: Any) -> bool:
    """Whether these are names or patterns of tables, or folders of Parquet files alone."""
    listed = names if isinstance(names, (list, tuple)) else [names]
    return files.are_names(names) and all(
        files.ending(Path(name)) in files.TABLES or _has_only_parquet(Path(name)) for name in listed
    )


def _has_only_parquet(place: Path) -> bool:
    """Whether this is a folder of Parquet files without parallel files or anything else that is not hidden."""
    found = [path for path in place.iterdir() if path.name[0] not in "._"] if place.is_dir() else []
    return bool(found) and sorted(found) == files.parquet_files(place)


def find(
    place: str | PathLike[str], source: str | None, target: str | None, prefixes: dict[str, str | None]
) -> tuple[dict[str, tuple[Path, Path]], tuple[str, str]]:
    """Finds the two files of each part.

    Args:
        place: a folder, or a folder and the prefix with which the names of the files begin.
        source, target: the suffixes of the names, without ".gz" and ".zst". One may be None if the folder has only two.
        prefixes: for each wanted part, the prefix of the names of its files; None is the usual one.

    Returns:
        A dictionary from parts to (source file, target file), and (source, target). A part without files is left
        out.

    Raises:
        FileNotFoundError: there are no files for "train", or for a part whose prefix is given.
        ValueError: the languages are not clear, or several files fit.
    """
    by_stem: dict[str, dict[str, Path]] = defaultdict(dict)  # by the name without suffix, and language
    twice: dict[tuple[str, str], list[str]] = {}  # the names of files for which that is the same
    for stem, language, path in _listed(Path(place)):
        if language in by_stem[stem]:
            twice[stem, language] = [by_stem[stem][language].name, path.name]
        by_stem[stem][language] = path
    languages = _languages(place, by_stem, source, target)
    found: dict[str, tuple[Path, Path]] = {}
    for part, prefix in prefixes.items():
        stems = [stem for stem in by_stem if _belongs(stem, part, prefix) and set(languages) & set(by_stem[stem])]
        whole = [stem for stem in stems if set(languages) <= set(by_stem[stem])]
        if prefix in whole:
            whole = [prefix]
        if len(whole) > 1:
            raise ValueError(
                f"There must be two files for {part!r}; choose them by a prefix of their names. Received: "
                f"{str(place)!r} with {whole}"
            )
        for language in languages:
            if whole and (whole[0], language) in twice:
                raise ValueError(
                    f"There must be one file for {part!r} in {language!r}, compressed or not. Received: {str(place)!r} "
                    f"with {twice[whole[0], language]}"
                )
        if whole:
            found[part] = (by_stem[whole[0]][languages[0]], by_stem[whole[0]][languages[1]])
        elif stems or prefix or part == "train":
            names = [path.name for stem in stems for path in by_stem[stem].values()]
            raise FileNotFoundError(
                f"The files of {part!r} must exist in {languages[0]!r} and {languages[1]!r}. Received: "
                f"{str(place)!r} with {names}"
            )
    return found, languages


def expand(argument: str, names: Sequence[files.Names]) -> tuple[list[Path], list[Path]]:
    """The files of the sources and of the targets, as many of each; `names` has a path, pattern or list for each."""
    sources, targets = (files.expand(argument, side) for side in names)
    if len(sources) != len(targets):
        raise ValueError(
            f"`{argument}` must name as many files of sources as of targets. Received: {argument}={names!r} with "
            f"{len(sources)} and {len(targets)}"
        )
    return sources, targets


def read(paths: tuple[list[Path], list[Path]]) -> Iterator[tuple[str, str]]:
    """Yields the sentence pairs of parallel files, in their order."""
    for both in zip(*paths, strict=True):
        counts = [0, 0]
        sides = [chain.from_iterable(files.lines(path)) for path in both]
        for source, target in zip_longest(*sides):
            if source is None or target is None:
                counts = [number + sum(1 for _ in side) for number, side in zip(counts, sides, strict=True)]
                counts[source is None] += 1
                pairs = zip(both, counts, strict=True)
                received = " and ".join(f"{str(path)!r} with {count}" for path, count in pairs)
                raise ValueError(f"Parallel files must have the same number of lines. Received: {received}")
            counts = [number + 1 for number in counts]
            yield source, target


def read_tables(paths: list[Path], languages: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the sentence pairs of tables, in the order of their rows."""
    for path in paths:
        for _, sides in files.columns(path, dict(zip(("source", "target"), languages, strict=True))):
            yield from zip(*sides, strict=True)


def language_of(path: Path) -> str:
    """The last suffix without ".gz" and ".zst": "de" for "train.tok.de.gz"."""
    return (path.stem if path.suffix.lower() in files.COMPRESSED else path.name).rpartition(".")[2]


def _listed(place: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields (stem, language, path) of all files that may be meant."""
    folder, start = (place, "") if place.is_dir() else (place.parent, place.name)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(start) and path.is_file():
            language = language_of(path)
            compressed = path.suffix if path.suffix.lower() in files.COMPRESSED else ""
            name = path.name[len(start) :].removesuffix(compressed).removesuffix(language)
            yield name.strip("._-"), language, path


def _belongs(stem: str, part: str, prefix: str | None = None) -> bool:
    return stem.startswith(prefix or PARTS[part]) or (part == "train" and not stem)


def _languages(
    place: str | PathLike[str], by_stem: dict[str, dict[str, Path]], source: str | None, target: str | None
) -> tuple[str, str]:
    """Returns (source, target). If one is None and the files have two languages, it is the other one."""
    if source is None or target is None:
        pairs = [languages for stem, languages in by_stem.items() if _belongs(stem, "train")]
        known = sorted({language for languages in pairs if len(languages) > 1 for language in languages})
        others = [language for language in known if language not in (source, target)]
        if len(known) != 2 or len(others) != 1:
            raise ValueError(
                "`source` and `target` must be given, the last suffixes of the files. Received: "
                f"source={source!r}, target={target!r} for {str(place)!r} with {known}"
            )
        source, target = source or others[0], target or others[0]
    return source, target

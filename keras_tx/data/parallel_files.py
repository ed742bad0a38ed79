"""Reads sentence pairs from parallel files: line 7 of `train.de.gz` is the translation of line 7 of `train.en.gz`."""

from collections import defaultdict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from keras_tx.data import plain_text

PARTS = {
    "train": ("train",),
    "validation": ("val", "dev"),
    "test": ("test",),
}  # the usual prefixes of the file names of each part


def has_files(name_or_path: str | PathLike[str]) -> bool:
    """Whether this is a path object, a folder that exists, or a prefix of the paths of files."""
    place = Path(name_or_path)
    return isinstance(name_or_path, PathLike) or place.is_dir() or any(_listed(place))


def find(
    place: str | PathLike[str], source: str | None, target: str | None, prefixes: dict[str, str | None]
) -> tuple[dict[str, tuple[Path, Path]], tuple[str, str]]:
    """Finds the two files of each part.

    Args:
        place: a folder, or a folder and the prefix with which the names of the files begin.
        source, target: the suffixes of the names, without ".gz". One may be None if the folder has only two.
        prefixes: for each wanted part, the prefix of the names of its files; None is the usual one.

    Returns:
        A dictionary from parts to (source file, target file), and (source, target). A part without files is left
        out.

    Raises:
        FileNotFoundError: there are no files for "train", or for a part whose prefix is given.
        ValueError: the languages are not clear, or several files fit.
    """
    files: dict[str, dict[str, Path]] = defaultdict(dict)  # by the name without suffix, and language
    for stem, language, path in _listed(Path(place)):
        files[stem][language] = path
    languages = _languages(place, files, source, target)
    found: dict[str, tuple[Path, Path]] = {}
    for part, prefix in prefixes.items():
        stems = [stem for stem in files if _belongs(stem, part, prefix) and set(languages) & set(files[stem])]
        whole = [stem for stem in stems if set(languages) <= set(files[stem])]
        if prefix in whole:
            whole = [prefix]
        if len(whole) > 1:
            raise ValueError(
                f"There must be two files for {part!r}; choose them by a prefix of their names. Received: "
                f"{str(place)!r} with {whole}"
            )
        if whole:
            found[part] = (files[whole[0]][languages[0]], files[whole[0]][languages[1]])
        elif stems or prefix or part == "train":
            names = [path.name for stem in stems for path in files[stem].values()]
            raise FileNotFoundError(
                f"The files of {part!r} must exist in {languages[0]!r} and {languages[1]!r}. Received: "
                f"{str(place)!r} with {names}"
            )
    return found, languages


def read(paths: tuple[Path, Path]) -> list[tuple[str, str]]:
    """Reads the sentence pairs of two files, in their order."""
    sides = [plain_text.read(path).split("\n") for path in paths]
    sides = [lines[:-1] if lines[-1] == "" else lines for lines in sides]  # the last line may have no line break
    if len(sides[0]) != len(sides[1]):
        counts = " and ".join(f"{str(path)!r} with {len(lines)}" for path, lines in zip(paths, sides, strict=True))
        raise ValueError(f"Parallel files must have as many lines as each other. Received: {counts}")
    return list(zip(sides[0], sides[1], strict=True))


def language_of(path: Path) -> str:
    """The last suffix without ".gz": "de" for "train.tok.de.gz"."""
    return (path.stem if path.suffix.lower() == ".gz" else path.name).rpartition(".")[2]


def _listed(place: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields (stem, language, path) of all files that may be meant."""
    folder, start = (place, "") if place.is_dir() else (place.parent, place.name)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(start) and path.is_file():
            language = language_of(path)
            name = path.name[len(start) :].removesuffix(".gz").removesuffix(language)
            yield name.strip("._-"), language, path


def _belongs(stem: str, part: str, prefix: str | None = None) -> bool:
    return stem.startswith(prefix or PARTS[part]) or (part == "train" and not stem)


def _languages(
    place: str | PathLike[str], files: dict[str, dict[str, Path]], source: str | None, target: str | None
) -> tuple[str, str]:
    """Returns (source, target). If one is None and the files have two languages, it is the other one."""
    if source is None or target is None:
        pairs = [languages for stem, languages in files.items() if _belongs(stem, "train")]
        known = sorted({language for languages in pairs if len(languages) > 1 for language in languages})
        others = [language for language in known if language not in (source, target)]
        if len(known) != 2 or len(others) != 1:
            raise ValueError(
                "`source` and `target` must be given, the last suffixes of the files. Received: "
                f"source={source!r}, target={target!r} for {str(place)!r} with {known}"
            )
        source, target = source or others[0], target or others[0]
    return source, target

"""Parallel files -> sentence pairs: line 7 of `train.de.gz` translates line 7 of `train.en.gz`."""

from collections import defaultdict
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from keras_tx.data import plain_text

PARTS = {"train": ("train",), "validation": ("val", "dev"), "test": ("test",)}  # how the names of the files begin


def is_place(name_or_path) -> bool:
    """True for a path object, a folder that is there, and whatever the names of files that are there begin with."""
    place = Path(name_or_path)
    return isinstance(name_or_path, PathLike) or place.is_dir() or any(_listed(place))


def find(place: str | PathLike, source: str | None, target: str | None, begins: dict[str, str | None]):
    """Finds the two files of each part.

    Args:
        place: a folder; or a path of which the last part is what the names of the files begin with.
        source, target: what the names end with, ".gz" apart. One may be None if the folder knows but two.
        begins: for each part wanted, what the names of its files begin with; None is the usual.

    Returns:
        ({part: (source file, target file)}, (source, target)); a part without files is left out, unless it is train or
        its files were named.
    """
    files: dict[str, dict[str, Path]] = defaultdict(dict)  # by stem and language
    for stem, language, path in _listed(Path(place)):
        files[stem][language] = path
    languages = _languages(place, files, source, target)
    found = {}
    for part, named in begins.items():
        stems = [stem for stem in files if _fits(stem, part, named) and set(languages) & set(files[stem])]
        whole = [stem for stem in stems if set(languages) <= set(files[stem])]
        if named in whole:
            whole = [named]
        if len(whole) > 1:
            raise ValueError(
                f"The files of {part!r} must be the only ones, or be chosen by what their names begin with. Received: "
                f"{str(place)!r} with {whole}"
            )
        if whole:
            found[part] = tuple(files[whole[0]][language] for language in languages)
        elif stems or named or part == "train":
            names = [path.name for stem in stems for path in files[stem].values()]
            raise FileNotFoundError(
                f"The files of {part!r} must be there in {languages[0]!r} and {languages[1]!r}. Received: "
                f"{str(place)!r} with {names}"
            )
    return found, languages


def read(paths: tuple[Path, Path]) -> list[tuple[str, str]]:
    """The pairs of two files, in their order."""
    sides = [plain_text.read(path).split("\n") for path in paths]
    sides = [lines[:-1] if lines[-1] == "" else lines for lines in sides]  # the last line need not end
    if len(sides[0]) != len(sides[1]):
        counts = " and ".join(f"{str(path)!r} with {len(lines)}" for path, lines in zip(paths, sides, strict=True))
        raise ValueError(f"Parallel files must have as many lines as each other. Received: {counts}")
    return list(zip(*sides, strict=True))


def language_of(path: Path) -> str:
    """The last suffix, ".gz" apart: "de" of "train.tok.de.gz"."""
    return (path.stem if path.suffix.lower() == ".gz" else path.name).rpartition(".")[2]


def _listed(place: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields (stem, language, path) of what may be one of the files."""
    folder, start = (place, "") if place.is_dir() else (place.parent, place.name)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(start) and path.is_file():
            language = language_of(path)
            name = path.name[len(start) :].removesuffix(".gz").removesuffix(language)
            yield name.strip("._-"), language, path


def _fits(stem, part, named=None):
    return stem.startswith(named or PARTS[part]) or (part == "train" and not stem)


def _languages(place, files, source, target):
    """(source, target); the one that is None is the other one of the two that the files have."""
    if source is None or target is None:
        pairs = [languages for stem, languages in files.items() if _fits(stem, "train")]
        known = sorted({language for languages in pairs if len(languages) > 1 for language in languages})
        others = [language for language in known if language not in (source, target)]
        if len(known) != 2 or len(others) != 1:
            raise ValueError(
                "`source` and `target` must be given, the last suffixes of the files. Received: "
                f"source={source!r}, target={target!r} for {str(place)!r} with {known}"
            )
        source, target = source or others[0], target or others[0]
    return source, target

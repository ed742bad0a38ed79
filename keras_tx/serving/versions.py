"""Writes saved_models/NAME/VERSION so that a server never sees an incomplete version.

TensorFlow Serving polls the folder and loads every entry whose name is a number. So a version is written under another
name in that folder, flushed to the disk, and renamed when it is complete, under a lock on the folder.
https://www.tensorflow.org/tfx/serving/serving_config
"""

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from keras_tx import disk

PREFIX = "incomplete-"
UNFINISHED = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # the names that `tempfile.mkdtemp` gives
MARKER = ".keras_tx_export"  # in a folder that an export writes; it has the folder's name
FILES = {"tf_saved_model": "saved_model.pb", "onnx": "model.onnx"}  # what a version of each format has
LARGEST = 2**63 - 1  # the largest version that a server accepts


def versions_in(base: Path, *, complete: bool = False) -> list[Path]:
    """The numbered entries of a model's folder, the highest last; if `complete`, those with a saved_model.pb."""
    entries = [entry for entry in base.iterdir() if entry.name.isdecimal()] if base.is_dir() else []
    found = [entry for entry in entries if not complete or (entry / "saved_model.pb").is_file()]
    return sorted(found, key=lambda entry: int(entry.name))


def model_name(base: str | Path) -> str:
    """The name of a model's folder, also if that is given as "." or ".."."""
    return os.path.basename(os.path.abspath(base))


def check_characters(name: str, path: str | Path, patterns: bool = True) -> None:
    """Checks that TensorFlow can load a model from `path`, the argument `name`.

    Args:
        name: the name of the argument.
        path: the path that TensorFlow would get.
        patterns: whether TensorFlow would take the path for a pattern, as it does in a SavedModel. As patterns, `*` and
            `?` also match themselves, but brackets and backslashes do not.

    Raises:
        ValueError: it cannot.
    """
    signs = {"[": "a square bracket", "\\": "a backslash"}
    found = [words for sign, words in signs.items() if sign in str(path) and sign != os.sep]
    if patterns and found:
        raise ValueError(
            f"`{name}` must not contain {found[0]}, because TensorFlow takes such a path for a pattern when it loads "
            f"weights. Received: {name}={str(path)!r}"
        )
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"`{name}` must be a path in UTF-8, as TensorFlow needs it. Received: {name}={str(path)!r}"
        ) from None


def check_path(base: Path, format: str) -> None:
    """Checks that `base` can be the folder of a model whose versions have this `format` of `export`.

    Raises:
        ValueError: it is a version, or its name is a number; it has versions of another format; or their files could
            not be loaded because of its name.
    """
    check_characters("path", os.path.abspath(base), patterns=format == "tf_saved_model")
    if (base / FILES["tf_saved_model"]).exists():
        raise ValueError(
            "`path` must be the model's folder, below which versions are numbers, and not a version. Received: "
            f"path={str(base)!r}, which has a {FILES['tf_saved_model']}"
        )
    if model_name(base).isdecimal():
        raise ValueError(
            "`path` must be the model's folder, below which versions are numbers, and not a number itself. Received: "
            f"path={str(base)!r}"
        )
    others = [file for name, file in FILES.items() if name != format]
    for version in versions_in(base):
        found = [file for file in others if (version / file).is_file()]
        if found:
            raise ValueError(
                "`path` must be a folder whose versions have one format, because a server loads the highest number. "
                f"Received: path={str(base)!r}, format={format!r}, and version {version.name}, which has a {found[0]}"
            )


def next_version(base: Path) -> int:
    """Returns one more than the highest version in `base`, or 1.

    Raises:
        ValueError: the highest version is the largest that a server accepts.
    """
    latest = max([int(entry.name) for entry in versions_in(base)], default=0)
    if latest >= LARGEST:
        raise ValueError(f"`path` must have versions below {LARGEST}. Received: version {latest} in {str(base)!r}")
    return latest + 1


def write_version(base: Path, write: Callable[[Path], None]) -> Path:
    """Calls `write(folder)`, and makes the folder the next version of `base`.

    If `write` raises, the folder is removed. If the process is killed, a folder `incomplete-...` stays, which no server
    looks at, until the next call for `base` removes it. Nothing else is ever removed: such a folder has a file that
    names it, which this function wrote. Folders that are still being written are recognized by a lock, which is
    released when its process ends. Where folders cannot be locked (Windows, some network file systems), no incomplete
    folder is removed, and two exports that end at the same moment get their numbers in either order.

    Returns:
        The version's folder.

    Raises:
        OSError: `base` cannot be created or written; the message has its path.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        with disk.locked(base):
            _remove_stale(base)
            folder, lock = _new_folder(base)
    except OSError as error:
        raise OSError(f"`path` must be a folder that can be written. Received: path={str(base)!r} ({error})") from error
    try:
        write(folder)
        folder.chmod(0o755)  # mkdtemp gives access to the owner only, and a server is often another user
        disk.flush_all(folder)
        with disk.locked(base):
            version = _rename(folder, base)
        (version / MARKER).unlink(missing_ok=True)  # after the renaming, so that every folder with another name has it
        disk.flush(base)
        return version
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        disk.unlock(lock)


def _new_folder(base: Path) -> tuple[Path, int | None]:
    """A new folder with its marker, and the lock on it."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    try:
        lock = disk.lock(folder, wait=False)
        (folder / MARKER).write_text(folder.name, encoding="utf-8")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def _rename(folder: Path, base: Path) -> Path:
    while True:
        version = base / str(next_version(base))
        try:
            return folder.rename(version)
        except OSError:
            if not version.exists():
                raise
            # Another export took that number in the meantime: try the next one.


def _remove_stale(base: Path) -> None:
    """Removes the folders of exports that were killed: those that an export made and that no process has locked."""
    for folder in base.glob(f"{PREFIX}*"):
        if not UNFINISHED.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            lock = disk.lock(folder, wait=False)
        except (FileNotFoundError, PermissionError):  # its export has just failed, or belongs to another user
            continue
        if lock is not None:
            if _is_of_an_export(folder):
                shutil.rmtree(folder, ignore_errors=True)
            disk.unlock(lock)


def _is_of_an_export(folder: Path) -> bool:
    """Whether `write_version` made the folder: its marker names it, or it was killed before the marker was written."""
    try:
        marker = folder / MARKER
        names = [path.name for path in folder.iterdir()]
        return names in ([], [MARKER]) or marker.read_text(encoding="utf-8") == folder.name
    except (OSError, UnicodeDecodeError):
        return False

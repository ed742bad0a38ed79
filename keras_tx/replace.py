"""Replaces several files of a folder at one moment: a reader finds all of the old ones, or all of the new ones.

The new files are written and flushed in a work folder inside. Each name then becomes a symbolic link that leads through
the link `now` of the work folder, first to the old file; one renaming turns `now`, and with it all names, to the new
files:

    config.json -> .keras_tx-save-0123456789abcdef/now/config.json
    .keras_tx-save-0123456789abcdef/now -> old, from one moment on -> new

At the end the new files are moved to their names, in place of the links. A process that is killed leaves names that all
lead to old files, or all to new ones; the next call puts these in place and removes the work folder. Other files in the
folder stay, links are replaced instead of followed, and the folder itself may be a link or a mount point.

Where there are no symbolic links (some network drives; Windows without the privilege), names change one after the
other. The first name, `gate`, is removed before and comes back last, so that other programs find no checkpoint instead
of a mixed one, and `located` finds the new files from the moment at which the work folder has the list `REMOVED`.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keras_tx import disk

_NAME = re.compile(r"\.keras_tx-save-[0-9a-f]{16}")
_MARK, _TEXT = "about.txt", b"keras_tx is saving files here. If no process is, the next save removes this folder.\n"
OLD, NEW, NOW, REMOVED = "old", "new", "now", "removed.json"


@contextmanager
def replacing(
    directory: Path, is_outdated: Callable[[str, Collection[str]], bool], *, gate: str | None = None
) -> Iterator[Path]:
    """Yields an empty folder. At the end the files in it take their places in `directory`, all at one moment.

    If the body raises, `directory` stays as it is. Writers in several processes wait for each other, where the system
    can lock folders.

    Args:
        directory: the folder, which is created if it does not exist.
        is_outdated: a function of the name of a file in `directory`, and of the names of all new files: whether the
            old file is removed.
        gate: the file without which no program reads the others.

    Raises:
        OSError: a file cannot be written, or `directory` has a folder in the place of a file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with disk.locked(directory):
        remove_leftovers(directory)
        work = directory / f".keras_tx-save-{secrets.token_hex(8)}"
        work.mkdir()
        held = disk.lock(work, wait=False)  # shows that this process lives
    try:
        (work / _MARK).write_bytes(_TEXT)
        (work / NEW).mkdir()
        yield work / NEW
        disk.flush_all(work / NEW)
        with disk.locked(directory):
            try:
                _replace(directory, work, is_outdated, gate)
            finally:  # after an error the names lead to the old files again
                _settle(directory, work)
    finally:
        _remove(directory, work)
        disk.unlock(held)


def remove_leftovers(directory: Path) -> None:
    """Puts the files that killed processes left in work folders in place, and removes the folders.

    It removes only folders that `replacing` wrote and that no process has locked. To be called with `directory` locked.
    """
    for work in _work_folders(directory):
        with suppress(FileNotFoundError, PermissionError):  # its process just ended, or belongs to another user
            held = disk.lock(work, wait=False)
            if held is not None:
                _settle(directory, work)
                _remove(directory, work)
                disk.unlock(held)


def located(directory: Path) -> Callable[[str], Path]:
    """Returns a function from the name of a file of `directory` to its path at this moment.

    That is another path only where there are no symbolic links, during the last moment of saving or after a kill there.
    """
    overlays = [(work / NEW, _record(work)[1]) for work in _work_folders(directory) if (work / REMOVED).is_file()]

    def path(name: str) -> Path:
        for new, removed in overlays:
            if (new / name).is_file() or name in removed:
                return new / name
        return directory / name

    return path


def _replace(
    directory: Path, work: Path, is_outdated: Callable[[str, Collection[str]], bool], gate: str | None
) -> None:
    new = _files(work / NEW)
    found = [entry.name for entry in directory.iterdir() if entry.is_file() or entry.is_symlink()]
    names = [*new, *(name for name in found if name not in new and is_outdated(name, new))]
    for name in names:
        if (directory / name).is_dir():
            raise IsADirectoryError(f"`directory` must have no folder named {name!r}. Received: {str(directory)!r}")
    try:
        (work / NOW).symlink_to(OLD, target_is_directory=True)
    except (OSError, NotImplementedError):  # there are no symbolic links
        _replace_one_by_one(directory, work, [name for name in names if name not in new], gate)
        return
    old = [name for name in names if (directory / name).is_file()]
    for name in old:
        _keep(directory / name, work / OLD / name)
    (work / OLD).mkdir(exist_ok=True)
    _flush_parents(work / OLD, _files(work / OLD))
    disk.flush(work)
    linked = [name for name in names if name in new or name in old]
    for name in linked:
        _link(_leading(work, name), directory / name, work)
    _flush_parents(directory, names)
    _link(NEW, work / NOW, work)  # the moment at which all names change
    disk.flush(work)
    for name in names:
        if name not in linked:  # a link that leads nowhere
            (directory / name).unlink()


def _keep(path: Path, kept: Path) -> None:
    """Gives the file that `path` leads to a second name. Where there are no hard links, a file in place is copied."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    file = path.resolve()
    try:
        os.link(file, kept)
    except OSError:
        if file.parent != path.parent.resolve():
            kept.symlink_to(file)
        else:
            shutil.copy2(file, kept)
            disk.flush(kept)


def _link(target: str, path: Path, work: Path) -> None:
    """Makes `path` a symbolic link at one moment, whatever it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = work / "link"
    made.symlink_to(target)
    os.replace(made, path)


def _leading(work: Path, name: str) -> str:
    """The target of the link with this name, relative to the link."""
    return f"{'../' * name.count('/')}{work.name}/{NOW}/{name}"


def _settle(directory: Path, work: Path) -> None:
    """Moves the files that the names of `directory` lead to from the work folder to their names."""
    if (work / REMOVED).is_file():
        _move(directory, work)
        return
    names = _links(directory, work)
    for name in names:
        if (work / NOW / name).is_file():
            os.replace(work / NOW / name, directory / name)
        else:  # a removed file, or a new one that does not come
            (directory / name).unlink()
    _flush_parents(directory, names)


def _links(directory: Path, work: Path) -> list[str]:
    """The names in `directory` that are links into the work folder."""
    return [
        name
        for name in {*_files(work / OLD), *_files(work / NEW)}
        if (directory / name).is_symlink() and Path(os.readlink(directory / name)).as_posix() == _leading(work, name)
    ]


def _replace_one_by_one(directory: Path, work: Path, removed: Collection[str], gate: str | None) -> None:
    written = work / "removed"
    written.write_text(json.dumps({"removed": list(removed), "gate": gate}), encoding="utf-8")
    disk.flush(written)
    os.replace(written, work / REMOVED)  # the moment at which all files change for `located`
    disk.flush(work)


def _move(directory: Path, work: Path) -> None:
    """Moves the new files to their names one after the other; what an earlier call has moved is not there any more."""
    names, (gate, removed) = _files(work / NEW), _record(work)
    for name in [*([gate] if gate in names else []), *removed]:
        (directory / name).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: name == gate):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(work / NEW / name, directory / name)
    _flush_parents(directory, names)
    (work / REMOVED).unlink()


def _record(work: Path) -> tuple[str | None, list[str]]:
    """The gate and the removed files of a work folder on a system without symbolic links."""
    try:
        record = json.loads((work / REMOVED).read_text(encoding="utf-8"))
        gate, removed = record["gate"], record["removed"]
    except (OSError, ValueError, LookupError, TypeError):  # its process has just ended; or another program wrote it
        return None, []
    return gate, [name for name in removed if isinstance(name, str) and Path(name).name == name]


def _work_folders(directory: Path) -> list[Path]:
    """The work folders in `directory`: empty ones, and those that have the mark and lead nowhere else."""
    return [work for work in sorted(directory.glob(".keras_tx-save-*")) if _is_ours(work)]


def _is_ours(work: Path) -> bool:
    with suppress(OSError):
        if _NAME.fullmatch(work.name) and work.is_dir() and not work.is_symlink():
            names, now = os.listdir(work), work / NOW
            if any((work / name).is_symlink() for name in names if name not in (NOW, "link")):
                return False
            is_marked = _MARK in names and _TEXT.startswith((work / _MARK).read_bytes())
            return not names or (is_marked and (not now.is_symlink() or os.readlink(now) in (OLD, NEW)))
    return False


def _remove(directory: Path, work: Path) -> None:
    """Removes a work folder, the mark last, unless names of `directory` still need it. Other files in it stay."""
    if (work / REMOVED).is_file() or _links(directory, work):
        return  # an error while the files were moved; the next call goes on with it
    for name in (OLD, NEW):
        shutil.rmtree(work / name, ignore_errors=True)
    for name in (NOW, "link", "removed", REMOVED, _MARK):
        with suppress(OSError):
            (work / name).unlink()
    with suppress(OSError):
        work.rmdir()


def _files(folder: Path) -> list[str]:
    """The names of all files in a folder and below it, relative to it, with slashes."""
    return [
        (Path(parent) / name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder)
        for name in sorted(names)
    ]


def _flush_parents(directory: Path, names: Iterable[str]) -> None:
    for parent in {(directory / name).parent for name in names}:
        disk.flush(parent)

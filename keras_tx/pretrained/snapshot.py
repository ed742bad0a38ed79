"""Opens the files of a folder as they were at one moment, also while another process saves into the folder."""

import errno
import io
import os
import stat
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from keras_tx.replace import located

Result = TypeVar("Result")
Identity = tuple[int, ...] | None

TRIES, PAUSE = 20, 0.01  # an attempt takes milliseconds, and saving takes longer


class OpenFile:
    """A file that is open until the object is deleted, so that it can be read whole after it has been replaced.

    Args:
        path: the path of the file.

    Attributes:
        size: the number of bytes.
        identity: what tells the file from every other one, and from itself with another content.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.close: Callable[[], Any] = weakref.finalize(self, os.close, descriptor)
        self._descriptor, self.identity = descriptor, _identity(os.fstat(descriptor))
        self.size = os.fstat(descriptor).st_size

    def stream(self) -> io.FileIO:
        """A stream of the bytes from the first one on. All streams of a file share one position."""
        stream = io.FileIO(self._descriptor, closefd=False)
        stream.seek(0)
        return stream

    def check_unchanged(self) -> None:
        """Raises if another program wrote into the file since it was opened.

        Raises:
            ValueError: the size or the time of the last change is another one.
        """
        now = _identity(os.fstat(self._descriptor))
        if now != self.identity:
            raise ValueError(f"{self.path} must not change while it is read. Received: a file that was written into")


class Snapshot:
    """The files of a folder. `is_current` says whether all that was asked for is there as it was found.

    Args:
        folder: a directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = located(folder)
        self._found: dict[str, tuple[Path, Identity]] = {}
        self._has_changed = False

    def __contains__(self, name: str) -> bool:
        """Whether the folder has a file with this name."""
        return self._look(name)[1] is not None

    def open(self, name: str) -> OpenFile:
        """Opens a file of the folder."""
        path, found = self._look(name)
        try:
            file = OpenFile(path)
        except FileNotFoundError:
            self._has_changed |= found is not None
            raise
        self._has_changed |= found not in (None, file.identity)
        return file

    def is_current(self) -> bool:
        """Whether all files that were found are at their places, and those that were missing are missing.

        If so, all of them were there at one moment: the one before this call.
        """
        if self._has_changed:  # even if what was found is back at its place by now
            return False
        path = located(self.folder)
        return all((path(name), _look(path(name))) == found for name, found in self._found.items())

    def _look(self, name: str) -> tuple[Path, Identity]:
        if name not in self._found:
            path = self._path(name)
            self._found[name] = path, _look(path)
        return self._found[name]


def consistent(folder: Path, read: Callable[[Snapshot], Result]) -> Result:
    """Returns `read(snapshot)` for files that were all in the folder at one moment.

    Raises:
        OSError: the files changed during each of several attempts.
    """
    for _ in range(TRIES):
        snapshot = Snapshot(folder)
        try:
            result = read(snapshot)
        except (OSError, ValueError):
            if snapshot.is_current():
                raise
        else:
            if snapshot.is_current():
                return result
        time.sleep(PAUSE)
    raise OSError(f"The files of {folder} must not change while they are opened. Received: changes at {TRIES} attempts")


def _look(path: Path) -> Identity:
    """What tells a file from every other one and from itself with another content; None if there is no file."""
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None
    return _identity(found) if stat.S_ISREG(found.st_mode) else None


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

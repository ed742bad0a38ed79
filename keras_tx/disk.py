"""Locks folders, and flushes files to the disk, where the system can do that."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system that flushes no folders
NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without locks, such as some NFS


def lock(folder: Path, *, wait: bool) -> int | None:
    """Locks the folder itself, without a lock file, until `unlock` or the end of the process.

    Returns:
        The lock; None if another process holds it, or there are no locks here.
    """
    try:
        return _lock(folder, wait)
    except BlockingIOError:
        return None


def unlock(held: int | None) -> None:
    """Releases what `lock` returned."""
    if held is not None:
        os.close(held)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, for which it waits."""
    held = lock(folder, wait=True)
    try:
        yield
    finally:
        unlock(held)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder. Raises BlockingIOError at once if another process holds it."""
    held = _lock(folder, wait=False)
    try:
        yield
    finally:
        unlock(held)


def _lock(folder: Path, wait: bool) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError) and error.errno in NO_LOCKS:
            return None
        raise


def replace(path: Path, content: bytes) -> None:
    """Writes a file at one moment: whoever reads it finds the old content or the new one, after a loss of power too."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flushes a file, or the names in a folder but not its files, so that they survive a loss of power."""
    if fcntl is None:
        return  # Windows flushes only what is opened for writing
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FLUSH:
            raise
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Flushes a folder and everything in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))

"""Locks folders, and flushes files to the disk, where the system can do that."""

import errno
import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

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


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields an open file. At the end it takes the place of `path` at one moment; after an error it is removed.

    Each writer has a file of its own, so that two of them leave the file of one of them, whole. Files that killed
    processes left are removed, where the system has locks.
    """
    with locked(path.parent):
        for part in path.parent.glob(f"{glob.escape(path.name)}-*.part"):
            with suppress(FileNotFoundError, PermissionError):  # its process just ended, or belongs to another user
                held = lock(part, wait=False)
                if held is not None:
                    part.unlink()
                    unlock(held)
        part = path.with_name(f"{path.name}-{secrets.token_hex(8)}.part")
        file = open(part, "xb")
        held = lock(part, wait=False)  # shows that this process lives
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        unlock(held)
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

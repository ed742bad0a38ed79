"""saved_models/NAME -> saved_models/NAME/VERSION, which a server sees whole or not at all.

TensorFlow Serving polls the folder and loads every entry whose name is a number: a version is written under another
name beside them, brought to the disk, and renamed when it is complete, under a lock on the folder.
https://www.tensorflow.org/tfx/serving/serving_config
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None

PREFIX = "incomplete-"
LARGEST = 2**63 - 1  # a server has no greater version
NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without them, as some NFS


def next_version(base: Path) -> int:
    """One more than the highest version in `base`, or 1.

    Raises:
        ValueError: there is none above the highest.
    """
    versions = [int(entry.name) for entry in base.iterdir() if entry.name.isdecimal()] if base.is_dir() else []
    latest = max(versions, default=0)
    if latest >= LARGEST:
        raise ValueError(f"`path` must have versions below {LARGEST}. Received: version {latest} in {str(base)!r}")
    return latest + 1


def write_version(base: Path, write: Callable[[Path], None]) -> Path:
    """Calls `write(folder)`, and makes what it wrote the next version of `base`.

    If `write` raises, its folder goes. If the process is killed, a folder `incomplete-...` stays, which no server looks
    at, until the next call for `base` removes it: a lock, which ends with its process, tells those that are still being
    written. Where folders cannot be locked (Windows, some network file systems), no such folder is removed, and two
    exports that end at the same moment may get their numbers in either order.

    Returns:
        The version's folder.

    Raises:
        OSError: `base` cannot be made or written; the message has its path.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        with _locked(base):
            _remove_stale(base)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            lock = _lock(folder, wait=False)
    except OSError as error:
        raise OSError(f"`path` must be a folder that can be written. Received: path={str(base)!r} ({error})") from error
    try:
        write(folder)
        folder.chmod(0o755)  # mkdtemp lets only the owner in, and a server is often another user
        _to_disk(folder)
        with _locked(base):
            version = _rename(folder, base)
        _sync(base)
        return version
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        _unlock(lock)


def _rename(folder: Path, base: Path) -> Path:
    while True:
        version = base / str(next_version(base))
        try:
            return folder.rename(version)
        except OSError:
            if not version.exists():
                raise
            # Another export took that number in the meantime.


def _remove_stale(base: Path) -> None:
    """Removes what exports that were killed left: nobody holds a lock on it."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            lock = _lock(folder, wait=False)
        except (FileNotFoundError, PermissionError):  # its export failed just now, or is that of another user
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            _unlock(lock)


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    lock = _lock(base, wait=True)
    try:
        yield
    finally:
        _unlock(lock)


def _lock(folder: Path, wait: bool) -> int | None:
    """A lock on the folder itself, so that no file is left; None if another has it or there are no locks."""
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError) or error.errno in NO_LOCKS:
            return None
        raise


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _to_disk(folder: Path) -> None:
    """A version that a server can see survives a loss of power."""
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    if fcntl is None:
        return  # Windows brings only to the disk what may be written
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""saved_models/NAME -> saved_models/NAME/VERSION, which a server sees whole or not at all.

TensorFlow Serving polls the folder and loads every entry whose name is a number: a version is written under another
name beside them, and renamed when it is complete. https://www.tensorflow.org/tfx/serving/serving_config
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def next_version(base: Path) -> int:
    """One more than the highest version in `base`, or 1."""
    versions = [int(entry.name) for entry in base.iterdir() if entry.name.isdecimal()] if base.is_dir() else []
    return max(versions, default=0) + 1


def write_version(base: Path, write: Callable[[Path], None]) -> Path:
    """Calls `write(folder)`, and makes what it wrote the next version of `base`.

    If `write` raises, its folder goes. If the process is killed, a folder `incomplete-...` stays, which no server
    looks at.

    Returns:
        The version's folder.

    Raises:
        OSError: `base` cannot be made or written; the message has its path.
    """
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="incomplete-", dir=base))
    except OSError as error:
        raise OSError(f"`path` must be a folder that can be written. Received: path={str(base)!r} ({error})") from error
    try:
        write(folder)
        folder.chmod(0o755)  # mkdtemp lets only the owner in, and a server is often another user
        return _rename(folder, base)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _rename(folder: Path, base: Path) -> Path:
    while True:
        version = base / str(next_version(base))
        try:
            return folder.rename(version)
        except OSError:
            if not version.exists():
                raise
            # Another export took that number in the meantime.

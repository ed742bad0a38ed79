"""The backup that all workers of one training begin with."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx.training import backups
from keras_tx.training.workers import Workers


def agreed_backup(path: Path, workers: Workers) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The content of the chief's backup; None if there is none.

    Args:
        path: the file of the backup, which may be on a disk of this worker alone.
        workers: the workers, each of which calls this function.

    Raises:
        ValueError: for a damaged backup, or if the chief has none, but another worker knows of one.
    """
    if len(workers.names) == 1:
        return backups.read(path) if path.exists() else None
    found = [json.loads(one) for one in workers.gather(json.dumps(_own(path, workers)).encode())]
    if found[0]["error"]:
        raise ValueError(found[0]["error"])
    if not found[0]["digest"]:
        if all(one["found"] == "none" for one in found):
            return None
        listed = "; ".join(f"{name}: {one['found']}" for name, one in zip(workers.names, found, strict=True))
        raise ValueError(
            f"The chief, {workers.names[0]}, must have the backup {str(path)!r}, which other workers know of. Give it "
            f"that file, or delete the directory of every worker to begin anew. Received: {listed}"
        )
    if all(one["digest"] == found[0]["digest"] for one in found):
        return backups.read(path)
    content = workers.from_chief(path.read_bytes() if workers.index == 0 else b"")
    return backups.read(path, io.BytesIO(content))


def _own(path: Path, workers: Workers) -> dict[str, str]:
    """What this worker has of the backup."""
    own = {"digest": "", "found": "none", "error": ""}
    if path.exists():
        with open(path, "rb") as file:
            own["digest"] = hashlib.file_digest(file, "sha256").hexdigest()
        try:
            own["found"] = f"a backup {after(backups.read(path)[0])}"
        except (ValueError, LookupError, TypeError) as error:
            own["found"], own["error"] = "a damaged backup", str(error)
    elif _note(path, workers).exists():
        own["found"] = f"the note that {_note(path, workers).read_text()}"
    return own


def write_note(path: Path, workers: Workers, state: dict[str, Any]) -> None:
    """Writes, as a worker that is not the chief, which backup there is."""
    backups.write_text(_note(path, workers), f"{workers.names[0]} has a backup {after(state)}")


def _note(path: Path, workers: Workers) -> Path:
    return path.with_name(f"worker-{workers.index}.txt")


def after(state: dict[str, Any]) -> str:
    """The position of a backup in words."""
    position, epochs = state["position"], len(state["epochs"])
    counts = [(epochs, "epoch")] + ([(position["steps"], "step")] if position is not None else [])
    return "after " + " and ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in counts)

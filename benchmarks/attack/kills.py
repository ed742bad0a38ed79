"""Kills processes while they write, and reads and writes beside them.

What writes is a function without arguments. It runs in a child that is forked from this process, which has imported and
loaded everything: a kill costs some hundredths of a second. The child should not compute with TensorFlow, whose threads
do not survive a fork; `checkpoint_writer` prepares the tensors before. PyTorch and NumPy on one thread do.

    writers = [checkpoint_writer(folder, model) for model in (old, new)]
    known = {name: ...}                                     # what `state_of` returns after each of the writers alone
    for step in range(steps_of(writers[1])):
        writers[0]()
        killed_before(writers[1], step)
        assert state_of(folder) in known
"""

import contextlib
import hashlib
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np

from keras_tx.pretrained import PretrainedModel, load, save, save_pretrained
from keras_tx.pretrained.snapshot import consistent

Write = Callable[[], object]
CALLS = ("fsync", "link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink")  # that change what others see
FAILED = 3  # the exit status of a child whose function raised


def forked(function: Write) -> int:
    """Starts a child that calls `function` and ends; returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of threads, which the child does not use
        child = os.fork()
    if child:
        return child
    try:
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(FAILED)


def ended(child: int) -> bool:
    """Waits for a child: whether it was killed.

    Raises:
        RuntimeError: its function raised.
    """
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the child ended with the exit status {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status)


@contextlib.contextmanager
def before_each_call(function: Callable[[int], object]) -> Iterator[None]:
    """Calls `function` with 0, 1, 2, ... before each call of the functions of `os` that are in `CALLS`."""
    count = 0

    def hooked(original: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal count
            function(count)
            count += 1
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, hooked(getattr(os, name))))
        yield


def steps_of(write: Write) -> int:
    """The number of moments at which `killed_before` can kill `write`, which runs once, in a child."""
    reading, writing = os.pipe()

    def counted() -> None:
        with before_each_call(lambda step: os.write(writing, b".")):
            write()

    ended(forked(counted))
    os.close(writing)
    with open(reading, "rb") as pipe:
        return len(pipe.read())


def killed_before(write: Write, step: int) -> bool:
    """Calls `write` in a child that is killed before a call of the file system, the one with the number `step`."""

    def die(now: int) -> None:
        if now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def until_killed() -> None:
        with before_each_call(die):
            write()

    return ended(forked(until_killed))


def killed_after(writes: Sequence[Write], seconds: float) -> bool:
    """Calls the functions in turn, again and again, in a child that is killed after some time."""
    child = forked(lambda: in_turn(writes))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return ended(child)


def in_turn(writes: Sequence[Write], rounds: int | None = None) -> None:
    """Calls the functions in turn, `rounds` times or for ever."""
    while rounds is None or rounds > 0:
        for write in writes:
            write()
        rounds = None if rounds is None else rounds - 1


@contextlib.contextmanager
def writing_beside(*writers: Sequence[Write]) -> Iterator[None]:
    """While the body runs, children write without a pause, one for each list of functions; they are killed at the end.

    Raises:
        RuntimeError: a function raised.
    """
    children = [forked(lambda writes=writes: in_turn(writes)) for writes in writers]
    try:
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            ended(child)


# Checkpoints


def checkpoint_writer(folder: Path, model: PretrainedModel, **options) -> Write:
    """A function that saves a model into `folder`, with the options of `save_pretrained`, and computes nothing."""
    tensors = list(save._tensors(model, options.get("dtype")))

    def write() -> None:
        with mock.patch.object(save, "_tensors", lambda model, dtype: iter(tensors)):
            save_pretrained(model, folder, **options)

    return write


def state_of(folder: Path) -> str:
    """A digest of all that `from_pretrained` reads in a folder; "nothing" if there is no checkpoint."""
    if not folder.is_dir():
        return "nothing"
    try:
        config, generation, tensors = consistent(folder, load.read_files)
    except ValueError as error:
        if "must have a config.json" in str(error):
            return "nothing"
        raise
    return _digest(config, generation, {name: tensors.read(name) for name in tensors})


def seen_by_others(folder: Path) -> str:
    """As `state_of`, read as other programs do: by the usual names, one file after the other."""
    from safetensors.numpy import load_file

    if not (folder / "config.json").is_file():
        return "nothing"
    config, generation = (
        json.loads((folder / name).read_text()) if (folder / name).is_file() else None
        for name in ("config.json", "generation_config.json")
    )
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    shards = (
        [single] if single.is_file() else {folder / x for x in json.loads(index.read_text())["weight_map"].values()}
    )
    return _digest(config, generation, {name: array for shard in shards for name, array in load_file(shard).items()})


def _digest(config: dict, generation: dict | None, tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(json.dumps([config, generation], sort_keys=True).encode(), digest_size=8)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tensors[name].shape}".encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()

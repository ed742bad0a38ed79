"""Kills, two writers at once and full disks: what is left is the old state whole or the new one whole."""

import contextlib
import multiprocessing
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.attack import kills
from benchmarks.attack.outcome import Outcome
from benchmarks.killed import Watcher, export_in_a_loop, kill_exports, tiny_model
from keras_tx import pretrained, serving, training
from keras_tx.training import backups
from tests.pretrained import tiny

EPOCHS = 6
SECONDS = 60  # for a process to begin or to end
SPACES = [0, 1, 4, 10, 20, 40, 60, 80, 100, 120, 160, 200, 250, 300, 400, 600, 900, 2000]  # KiB


@contextlib.contextmanager
def folder_of(prefix: str = "attack-") -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


# save_pretrained


def two_writers(folder: Path) -> tuple[list[kills.Write], set[str]]:
    """Functions that save two checkpoints of different architectures in one folder, and the two states of it."""
    writes, states = [], set()
    for name, options in (("bert", {"max_shard_bytes": 20_000}), ("gpt2", {})):
        model = pretrained.from_pretrained(tiny.checkpoint(name))
        write = kills.checkpoint_writer(folder, model, **options)
        write()
        writes.append(write)
        states.add(kills.state_of(folder))
    return writes, states


def state(folder: Path, known: set[str], what: str) -> Outcome:
    """Whether the folder has one of the known states, for this package and for other programs."""
    try:
        found, seen = kills.state_of(folder), kills.seen_by_others(folder)
    except Exception as error:
        return Outcome("lost", f"{type(error).__name__}: {error}", what)
    right = found in known and seen == found
    return Outcome(
        "right" if right else "lost", "one of the two" if right else f"state {found}, for others {seen}", what
    )


def kills_of_save(count: int, seed: int) -> list[Outcome]:
    """Kills `save_pretrained` before a call of the file system, or at a random time."""
    random, found = np.random.default_rng(seed), []
    with folder_of() as folder:
        writes, states = two_writers(folder / "checkpoint")
        steps = [kills.steps_of(write) for write in writes]
        bar = keras.utils.Progbar(count)
        for turn in range(count):
            which = turn % 2
            if turn % 3:
                writes[1 - which]()
                step = int(random.integers(steps[which]))
                kills.killed_before(writes[which], step)
                what = f"killed before call {step} of {steps[which]}"
            else:
                kills.killed_after(writes, random.uniform(0, 0.3))
                what = "killed at a random time"
            found.append(state(folder / "checkpoint", states, what))
            bar.update(turn + 1)
    return found


def two_writers_of_save(count: int, seed: int) -> list[Outcome]:
    """Reads beside two processes that call `save_pretrained`."""
    del seed
    with folder_of() as folder:
        place = folder / "checkpoint"
        (one, two), states = two_writers(place)
        found, bar = [], keras.utils.Progbar(count)
        with kills.writing_beside([one, two], [two, one]):
            for turn in range(count):
                try:
                    right = kills.state_of(place) in states
                    found.append(Outcome("right" if right else "lost", "" if right else "mixed", "read beside"))
                except OSError as error:  # the files changed at each attempt
                    found.append(Outcome("refused", str(error), "read beside"))
                bar.update(turn + 1)
        one()
        return [*found, state(place, states, "afterwards")]


# export


def kills_of_export(count: int, seed: int) -> list[Outcome]:
    """Kills exports; a watcher loads each version that it sees."""
    with folder_of() as folder:
        with Watcher(folder / "model") as watcher:
            stages = kill_exports(folder / "model", count, seed)
        lost = [Outcome("lost", problem) for problem in watcher.problems]
        right = [Outcome("right", stage) for stage, times in stages.items() for _ in range(times)]
        return lost + right[len(lost) :]


def two_writers_of_export(count: int, seed: int) -> list[Outcome]:
    """Two processes export to one folder; a watcher loads each version."""
    del seed
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.killed"])
    with folder_of() as folder, Watcher(folder / "model") as watcher:
        begun = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=export_in_a_loop, args=(str(folder / "model"), theirs), daemon=True)
            process.start()
            begun.append((process, ours))
        until = time.monotonic() + 5 * SECONDS
        while len(watcher.seen) < count and time.monotonic() < until:
            time.sleep(0.01)
        for process, _ in begun:
            process.kill()
            process.join()
    found = [Outcome("right", "a version that loads and answers") for _ in range(watcher.loaded)]
    return found + [Outcome("lost", problem) for problem in watcher.problems]


# Resume


def train(folder: str, connection: Any) -> None:
    """Trains with `Resume`, and saves the model after each epoch."""
    keras.utils.set_random_seed(7)
    tf.config.experimental.enable_op_determinism()
    layers = [keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    x = np.random.default_rng(7).standard_normal((16, 4)).astype("float32")
    save = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.save(Path(folder) / "model.keras"))
    resume = training.Resume(Path(folder) / "backup")
    connection.send("begins")
    model.fit(x, x[:, :1], epochs=EPOCHS, batch_size=4, shuffle=False, verbose=0, callbacks=[save, resume])
    model.save(Path(folder) / "model.keras")
    np.save(Path(folder) / "whole.npy", _weights(model))
    connection.send("ends")


def _weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([value.ravel() for value in model.get_weights()])


def kills_of_training(count: int, seed: int) -> list[Outcome]:
    """Kills trainings with `Resume` and `model.save`; each goes on until it ends, with the weights of a whole run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.attack.interrupted"])
    random, found, bar = np.random.default_rng(seed), [], keras.utils.Progbar(count)
    with folder_of() as folder:
        _train_in_a_process(context, folder / "whole")
        expected = np.load(folder / "whole" / "whole.npy")
        duration = max(0.2, _train_in_a_process(context, folder / "whole again"))
        place, part = folder / "0", 0
        while len(found) < count:
            _train_in_a_process(context, place, kill_after=random.uniform(0, duration))
            found.append(_backup(place))
            bar.update(len(found))
            if (place / "whole.npy").is_file():
                same = _file_is(place / "whole.npy", expected) and _saved_is(place / "model.keras", expected)
                found[-1] = Outcome("right" if same else "lost", "ended with the weights of a whole run" * same)
                part += 1
                place = folder / str(part)
        if place.exists():
            _train_in_a_process(context, place)
            if not _file_is(place / "whole.npy", expected):
                found[-1] = Outcome("lost", "did not end with the weights of a whole run")
    return found


def _train_in_a_process(context: Any, folder: Path, kill_after: float | None = None) -> float:
    """Trains in a process, which is killed some seconds after it began; returns the time that it took."""
    folder.mkdir(exist_ok=True)
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(str(folder), theirs), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(SECONDS) or ours.recv() != "begins":
        raise RuntimeError("The training does not begin.")
    begun = time.perf_counter()
    if kill_after is not None:
        process.join(kill_after)
        process.kill()
    process.join(SECONDS)
    if process.exitcode not in (0, -9) or (kill_after is None and process.exitcode):
        raise RuntimeError(f"The training ended with the exit status {process.exitcode}.")
    return time.perf_counter() - begun


def _backup(folder: Path) -> Outcome:
    path = folder / "backup" / "backup.npz"
    if not path.is_file():
        return Outcome("right", "killed before the first backup")
    try:
        state, _ = backups.read(path)
    except ValueError as error:
        return Outcome("lost", str(error))
    return Outcome("right", f"a whole backup, {len(state)} values")


def _file_is(path: Path, expected: np.ndarray) -> bool:
    return bool(np.array_equal(np.load(path), expected))


def _saved_is(path: Path, expected: np.ndarray) -> bool:
    return bool(np.array_equal(_weights(keras.saving.load_model(path)), expected))


# Full disks


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, Callable[[int], Any]]]:
    """A folder, and a function that gives it so many bytes: on a disk of its own, or as a limit of each file."""
    with folder_of("attack-disk-") as folder:
        mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)], capture_output=True, check=False
        ).returncode
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            yield folder, lambda space: _leave(folder, space, mounted, limits)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            if mounted:
                subprocess.run(["umount", "-l", str(folder)], check=True)


def _leave(folder: Path, space: int | None, mounted: bool, limits: tuple[int, int]) -> None:
    """Leaves so much space; None: as much as there is."""
    filler = folder / "filler"
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits if space is None else (space, limits[1]))
        return
    filler.unlink(missing_ok=True)
    if space is None:
        return
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with open(filler, "r+b") as file:
        file.truncate(max(0, filler.stat().st_size - space))


def full_disk(count: int, seed: int) -> list[Outcome]:
    """Saves, exports and trains on disks of all sizes: it works, or raises OSError and the old state is whole."""
    del seed
    spaces = SPACES[:: max(1, 3 * len(SPACES) // max(3, count))]
    found, bar = [], keras.utils.Progbar(3 * len(spaces))
    with small_disk() as (folder, leave):
        (old, new), states = two_writers(folder / "checkpoint")
        model = tiny_model(11)
        base = folder / "export"

        def exported() -> None:
            serving.export(model, base)

        def versions() -> bool:
            whole = [path for path in base.glob("*") if path.name.isdecimal()]
            return all((path / "MODEL_CARD.json").is_file() for path in whole) and not list(base.glob("incomplete-*"))

        for index, space in enumerate(spaces):
            for what, begin, attack, is_whole in (
                ("save_pretrained", old, new, lambda: state(folder / "checkpoint", states, "").result == "right"),
                ("export", lambda: None, exported, versions),
                ("Resume", lambda: _fit(folder, 1), lambda: _fit(folder, 2), lambda: _backup(folder).result == "right"),
            ):
                leave(None)
                begin()
                leave(space * 1024)
                changed = f"{what} with {space} KiB left"
                try:
                    attack()
                    outcome = Outcome("right", "enough space", changed)
                except OSError as error:
                    outcome = Outcome("refused", f"OSError: {error}", changed)
                except Exception as error:
                    outcome = Outcome("wrong", f"{type(error).__name__}: {error}", changed)
                leave(None)
                if not is_whole():
                    outcome = Outcome("lost", f"what is left is not whole; {outcome.told}", changed)
                found.append(outcome)
                bar.update(min(len(found), 3 * index + 3))
    return found


def _fit(folder: Path, epochs: int) -> None:
    if epochs == 1:
        (folder / "backup" / "backup.npz").unlink(missing_ok=True)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(512), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.zeros((2, 2), "float32")
    model.fit(x, x[:, :1], epochs=epochs, verbose=0, callbacks=[training.Resume(folder / "backup")])

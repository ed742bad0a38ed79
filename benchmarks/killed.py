"""Kills exports at random moments while a watcher loads every version that it sees, as a server does."""

import collections
import multiprocessing
import threading
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tensorflow_text  # noqa: F401  # registers operations that the exported graphs use

from benchmarks import servables
from benchmarks.loaded import LABELS, TOLERANCE, difference
from keras_tx import serving

ALL_FILES = ["saved_model.pb", "variables/variables.index", "MODEL_CARD.json", "batching_params.pbtxt"]


def export_in_a_loop(base: str, connection) -> None:
    """Exports the same tiny model again and again, and says when each export begins. This process is killed."""
    tokenizer = servables.tokenizer(200, max_length=16)
    model = tiny_model(tokenizer.vocabulary_size)
    while True:
        connection.send("begins")
        serving.export(model, base, tokenizer=tokenizer, labels=LABELS, warmup=["A short one."], max_batch=2)


def tiny_model(vocabulary_size: int) -> keras.Model:
    """A bag of words, since how a version is written does not depend on the layers, and the time of an export does."""
    keras.utils.set_random_seed(7)
    layers = [
        keras.Input((None,), dtype="int32"),
        keras.layers.Embedding(vocabulary_size, 4, mask_zero=True),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(len(LABELS), activation="softmax"),
    ]
    return keras.Sequential(layers)


class Watcher:
    """Polls a folder as a server does: loads each version as soon as it is there, and sends it a request."""

    def __init__(self, base: Path, interval: float = 0.002):
        self.base, self.interval = base, interval
        self.seen: list[str] = []
        self.loaded = 0
        self.problems: list[str] = []
        self._answer: dict[str, np.ndarray] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()

    def _watch(self):
        while True:
            last = self._done.is_set()
            entries = list(self.base.iterdir()) if self.base.is_dir() else []
            new = [one for one in entries if one.name.isdecimal() and one.name not in self.seen]
            for version in new:
                missing = [name for name in ALL_FILES if not (version / name).is_file()]
                if missing:
                    self.problems.append(f"version {version.name} was seen without {missing}")
                self.seen.append(version.name)
            for version in new:
                self._load(version)
            if last and not new:
                return
            time.sleep(self.interval)

    def _load(self, version: Path) -> None:
        try:
            signature = tf.saved_model.load(str(version)).signatures["serving_default"]
            outputs = signature(text=tf.constant(["A short one.", ""]))
            found = {name: value.numpy() for name, value in outputs.items()}
        except Exception as error:  # damaged files may raise anything
            self.problems.append(f"version {version.name} does not load and answer: {error}")
            return
        self.loaded += 1
        self._answer = found if self._answer is None else self._answer
        if not difference(found, self._answer) <= TOLERANCE:
            self.problems.append(f"version {version.name} answers otherwise than the first")


def versions(base: Path) -> int:
    return sum(path.name.isdecimal() for path in base.iterdir()) if base.is_dir() else 0


def stage(base: Path) -> str:
    """Says how far an export had come, judged by the files that are left."""
    incomplete = list(base.glob("incomplete-*"))
    if not incomplete:
        return "nothing on the disk"
    names = {path.name for path in incomplete[-1].rglob("*")}
    for name, told in (
        ("MODEL_CARD.json", "all files written"),
        ("tf_serving_warmup_requests", "warm-up written"),
        ("keras_tx_parity.json", "answers of the Keras model written"),
        ("saved_model.pb", "graph written"),
        ("variables", "weights being written"),
    ):
        if name in names:
            return told
    return "folder made"


def kill_exports(base: Path, count: int, seed: int = 7) -> collections.Counter:
    """Kills a process that exports, `count` times, each at a random moment; returns how far the exports were.

    Every third is killed within 20 ms after the last file is there: where it gets its name.
    """
    context = multiprocessing.get_context("forkserver")  # Keras and TensorFlow are imported once
    context.set_forkserver_preload(["benchmarks.killed"])
    random, stages = np.random.default_rng(seed), collections.Counter()
    bar = keras.utils.Progbar(count)
    duration = None
    for turn in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=export_in_a_loop, args=(str(base), theirs), daemon=True)
        process.start()
        theirs.close()
        ours.recv()
        started = time.perf_counter()
        if duration is None:
            ours.recv()  # the second begins
            duration = time.perf_counter() - started
        before = versions(base)
        if turn % 3 == 2:
            while process.is_alive() and not any(base.glob("incomplete-*/MODEL_CARD.json")):
                time.sleep(0.0005)
            time.sleep(random.uniform(0, 0.02))
        else:
            time.sleep(random.uniform(0, duration))
        process.kill()
        process.join()
        stages["version there" if versions(base) > before else stage(base)] += 1
        if process.exitcode != -9:
            raise RuntimeError(f"the export ended by itself, with exit code {process.exitcode}")
        bar.update(turn + 1)
    return stages

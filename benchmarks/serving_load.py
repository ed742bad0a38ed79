"""Exported models under load: 5,000 requests from 8 threads, 1,000 unusual texts, and 100 exports that are killed.

python -m benchmarks serving_load
python -m benchmarks serving_load --requests 500 --fuzzed 0 --kills 0

The exit status is 1 if an answer differs from the single-threaded one, has a wrong shape or is an error, if memory
grows, or if a version in the export folder does not load.
"""

import argparse
import faulthandler
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

from benchmarks import servables
from benchmarks.fuzzed import fuzz, fuzzed
from benchmarks.killed import Watcher, kill_exports, tiny_model
from benchmarks.loaded import (
    LABELS,
    MEBIBYTE,
    TOLERANCE,
    Servable,
    answer,
    exported,
    mixed_requests,
    resident_mebibytes,
    under_load,
)
from keras_tx import serving

GROWTH = 0.05  # memory may grow by this share
DISTINCT = 500  # different requests; the load repeats them


def load_part(loaded: Mapping[str, Servable], count: int, threads: int) -> bool:
    print(f"\n{count:,} requests from {threads} threads; {resident_mebibytes():,.0f} MiB at the start")
    requests = mixed_requests(loaded, min(count, DISTINCT))
    expected = [answer(loaded, request) for request in requests]
    written = {one["text"].tobytes() for one in expected if "text" in one}
    print(
        f"{len(requests)} different requests, {len(written)} different texts written; {resident_mebibytes():,.0f} MiB "
        "after their single-threaded answers"
    )
    started = time.perf_counter()
    order = np.random.default_rng(7).permutation(np.arange(count) % len(requests))
    load = under_load(loaded, requests, expected, order, threads)
    took = time.perf_counter() - started
    for error in load.errors[:5]:
        print(f"  error: {error[:300]}")
    wrong = sum(one > TOLERANCE for one in load.differences)
    exact = sum(one == 0 for one in load.differences)
    print(
        f"load: {len(load.errors)} errors, {wrong} answers differ, {exact:,} of {count:,} are equal to the last bit, "
        f"largest difference {max(load.differences, default=np.inf):.1e}; {count / took:.1f} requests/s\n"
        f"memory: {load.memory[0]:,.0f} MiB before, {load.memory[len(load.memory) // 5]:,.0f} after a fifth, "
        f"{load.memory[len(load.memory) // 2]:,.0f} after half, {load.memory[-1]:,.0f} at the end: grew by "
        f"{load.growth:.1%} since the first fifth"
    )
    return not load.errors and not wrong and load.growth <= GROWTH


def fuzz_part(loaded: Mapping[str, Servable], count: int) -> bool:
    texts = fuzzed(count)
    signatures = sum(name != "tokens" for servable in loaded.values() for name in servable.signatures)
    print(f"\n{count:,} fuzzed texts, {sum(map(len, texts)) / MEBIBYTE:,.1f} MiB, by {signatures} signatures")
    wrong = fuzz(loaded, texts)
    for line in wrong[:5]:
        print(f"  {line}")
    print(f"fuzzed: {len(wrong)} answers are errors or of a wrong shape, no crash")
    return not wrong


def kill_part(folder: Path, count: int) -> bool:
    base = folder / "killed"
    print(f"\n{count} exports killed")
    with Watcher(base) as watcher:
        stages = kill_exports(base, count)
        tokenizer = servables.tokenizer(200, max_length=16)
        last = serving.export(tiny_model(tokenizer.vocabulary_size), base, tokenizer=tokenizer, labels=LABELS)
    for problem in watcher.problems[:5]:
        print(f"  {problem[:300]}")
    left = [path.name for path in base.iterdir() if not path.name.isdecimal()]
    print("  killed with " + ", ".join(f"{told}: {times}" for told, times in stages.most_common()))
    print(
        f"killed: {len(watcher.seen)} versions seen, {watcher.loaded} of them loaded and answered alike; after a last "
        f"export, version {last.name}, {len(left)} incomplete ones are left"
    )
    return not watcher.problems and watcher.loaded == len(watcher.seen) > 0 and not left


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--requests", type=int, default=5000, help="requests under load; 0 leaves the load out")
    parser.add_argument("--fuzzed", type=int, default=1000, help="unusual texts; 0 leaves them out")
    parser.add_argument("--kills", type=int, default=100, help="exports that are killed; 0 leaves them out")
    arguments = parser.parse_args()
    if keras.backend.backend() != "tensorflow":
        parser.error("it must run on the TensorFlow backend")
    faulthandler.enable()  # prints where an operation crashes
    keras.utils.set_random_seed(7)
    right = []
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kills:  # first, while the process that the exports are forked from is small
            right.append(kill_part(Path(folder), arguments.kills))
        if arguments.requests or arguments.fuzzed:
            loaded = exported(Path(folder))
        if arguments.requests:
            right.append(load_part(loaded, arguments.requests, arguments.threads))
        if arguments.fuzzed:
            right.append(fuzz_part(loaded, arguments.fuzzed))
    print("\nall right" if all(right) else "\nNOT RIGHT")
    raise SystemExit(not all(right))


if __name__ == "__main__":
    main()

"""Memory and speed of data larger than memory: a vocabulary, write_tokens, read_tokens, and training from the files.

python -m benchmarks.distribution.data                      # 3 GB of generated text, about half an hour on 2 cores
python -m benchmarks.distribution.data --megabytes 30

Each row is a process of its own. Memory is the peak beyond what the imports take. The text has 200,000 words by Zipf's
law, and one word in 200 occurs nowhere else, as in real text: the vocabulary of 3 GB has millions of different words.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import alternating

VOCABULARY, LENGTH, BATCH, STEPS = 30_000, 256, 16, 12
WORDS, RARE = 200_000, 200


def generate(path: Path, size: int) -> dict[str, Any]:
    """Writes `size` bytes of text in lines."""
    import numpy as np

    random = np.random.default_rng(7)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(random.choice(letters, n)) for n in random.integers(2, 11, WORDS)], object)
    limits = np.cumsum(1 / np.arange(1, WORDS + 1) ** 1.05)
    written = lines = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            places = np.searchsorted(limits, random.random(200_000) * limits[-1])
            chosen = words[places]
            rare = random.integers(0, len(chosen), len(chosen) // RARE)
            chosen[rare] = [f"{number:x}" for number in random.integers(16**7, 16**8, len(rare)).tolist()]
            ends = np.cumsum(random.integers(5, 110, len(chosen) // 50))
            pieces = np.split(chosen, ends[ends < len(chosen)])
            text = "".join(" ".join(piece) + ".\n" for piece in pieces if len(piece))
            written, lines = written + file.write(text), lines + len(pieces)
    return {"MB": written / 1e6, "lines": lines}


def lines_of(arguments: argparse.Namespace) -> Any:
    from keras_tx import data

    return data.load_text(arguments.folder / "text.txt", validation_fraction=1e-4, in_memory=False).train


def train_vocabulary(arguments: argparse.Namespace) -> dict[str, Any]:
    from keras_tx import text

    tokenizer = text.BertTokenizer.train(lines_of(arguments), VOCABULARY)
    tokenizer.save(arguments.folder / "tokenizer")
    return {"MB": arguments.megabytes, "tokens in the vocabulary": tokenizer.vocabulary_size}


def write(arguments: argparse.Namespace) -> dict[str, Any]:
    from keras_tx import data, text

    tokenizer = text.load_tokenizer(arguments.folder / "tokenizer")
    index = data.write_tokens(lines_of(arguments), tokenizer, arguments.folder / "tokens", num_shards=8, verbose=0)
    return {"MB": arguments.megabytes, "million tokens": index["tokens"]["token_ids"] / 1e6}


def batches(arguments: argparse.Namespace, **options: Any) -> Any:
    from keras_tx import data

    return data.read_tokens(arguments.folder / "tokens", **options)


def tokens_of(batches: Iterator[Any], most: int) -> int:
    count = 0
    for features, _ in batches:
        count += features["token_ids"].shape.num_elements()
        if count >= most:
            break
    return count


def read(arguments: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """Reads up to 200 million tokens; the first 5 million, in which threads and memory are made, are not timed."""
    reader = iter(batches(arguments, **options))
    tokens_of(reader, 5_000_000 if arguments.megabytes > 100 else 100_000)
    start, cpu = time.perf_counter(), time.process_time()
    count = tokens_of(reader, 200_000_000)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"million tokens": count / 1e6, "million tokens/s": count / seconds / 1e6, "CPU": cpu / seconds}


def read_packed(arguments: argparse.Namespace) -> dict[str, Any]:
    return read(arguments, batch_size=BATCH, length=LENGTH)


def read_bucketed(arguments: argparse.Namespace) -> dict[str, Any]:
    return read(arguments, max_tokens=BATCH * LENGTH)


def start_late(arguments: argparse.Namespace) -> dict[str, Any]:
    """How long the first batch takes if nine tenths of the epoch are left out."""
    whole = len(batches(arguments, batch_size=BATCH, length=LENGTH))
    start = time.perf_counter()
    next(iter(batches(arguments, batch_size=BATCH, length=LENGTH, start=whole * 9 // 10)))
    return {"batches": whole, "seconds to the first batch": time.perf_counter() - start}


def fit(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains from the files and, alternating, on one batch in memory."""
    import keras
    import numpy as np

    from keras_tx import models, training

    sizes = {"num_layers": 2, "hidden_dim": 128, "num_heads": 4, "dropout": 0.0}
    model = models.CausalLM(VOCABULARY, packed=True, **sizes)
    model.compile("adam", training.PaddedCrossentropy(chunk_size=256), jit_compile=False)
    reader = iter(batches(arguments, batch_size=BATCH, length=LENGTH))
    keras.utils.set_random_seed(7)
    fixed = next(reader)
    model.train_on_batch(*fixed)
    times: dict[str, list[float]] = {"files": [], "memory": [], "reader": []}
    for _ in range(STEPS):
        times["memory"].append(alternating.seconds(lambda: model.train_on_batch(*fixed)))
        times["files"].append(alternating.seconds(lambda: model.train_on_batch(*next(reader))))
    many = iter(batches(arguments, batch_size=BATCH, length=LENGTH, epoch=1))
    next(many)
    count = min(1000, len(batches(arguments, batch_size=BATCH, length=LENGTH)) - 2)
    seconds = alternating.seconds(lambda: [next(many) for _ in range(count)]) / count
    step = float(np.median(times["memory"]))
    found = {"s a step": step, "s a step from files": float(np.median(times["files"]))}
    return found | {"reader, % of a step": 100 * seconds / step}


WORK = [train_vocabulary, write, read_packed, read_bucketed, start_late, fit]


def child(arguments: argparse.Namespace) -> None:
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    from keras_tx import data, models, text, training  # noqa: F401

    tf.constant(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        imported = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    start = time.perf_counter()
    found = next(work for work in WORK if work.__name__ == arguments.child)(arguments)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - imported
    print(json.dumps({"MiB over the import": peak, "seconds": seconds, **found}))


def main() -> None:
    parser = alternating.parser(__doc__, rounds=1)
    parser.add_argument("--megabytes", type=float, default=3000)
    parser.add_argument("--only", nargs="+", choices=[work.__name__ for work in WORK], help="the text must be there")
    parser.add_argument("--folder", type=Path, help="where text and tokens go, and stay; a temporary folder otherwise")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    folder = arguments.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "text.txt").exists():
            print(generate(folder / "text.txt", int(arguments.megabytes * 1e6)), flush=True)
        for work in WORK:
            if arguments.only and work.__name__ not in arguments.only:
                continue
            command = [sys.executable, "-m", "benchmarks.distribution.data", "--child", work.__name__]
            command += ["--megabytes", str(arguments.megabytes), "--folder", str(folder)]
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
            root = Path(__file__).resolve().parents[2]
            run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
            if run.returncode:
                print(f"{work.__name__:18} fails: {(run.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)
                continue
            row = json.loads(run.stdout.splitlines()[-1])
            numbers = ", ".join(f"{value:,.4g} {name}" for name, value in row.items())
            print(f"{work.__name__:18} {numbers}", flush=True)
            alternating.write(arguments.json, {"run": work.__name__, **row})
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()

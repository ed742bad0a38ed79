"""Exports and loads a classifier and a translator, and sends them requests from one thread or from several."""

import itertools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import servables
from keras_tx import models, serving
from keras_tx.generation import Beam
from keras_tx.serving.warmup import serialized

LABELS = ["bad", "good"]
TOLERANCE = 1e-6  # absolute for numbers up to 1, relative for larger ones
MEBIBYTE = 1 << 20


@dataclass
class Servable:
    """A loaded version, and what its requests need."""

    signatures: Mapping[str, Any]
    tokenizer: Any
    new_tokens: int = 0
    labels: Sequence[str] = ()


@dataclass
class Request:
    model: str
    signature: str
    inputs: dict[str, tf.Tensor]


def exported(folder: Path, vocabulary_size: int = 2000, new_tokens: int = 16, **sizes) -> dict[str, Servable]:
    """A classifier and a translator, exported and loaded."""
    tokenizer = servables.tokenizer(vocabulary_size)
    sizes = {"num_layers": 2, "hidden_dim": 64, "num_heads": 2, **sizes}
    made = {
        "classifier": (models.TextClassifier(vocabulary_size, len(LABELS), **sizes), {"labels": LABELS}),
        "translator": (
            models.Seq2Seq(vocabulary_size, **sizes),
            {"generation": {"max_new_tokens": new_tokens, "strategy": Beam(2)}},
        ),
    }
    loaded = {}
    for name, (model, options) in made.items():
        version = serving.export(servables.with_noise(model), folder / name, tokenizer=tokenizer, **options)
        signatures = tf.saved_model.load(str(version)).signatures
        loaded[name] = Servable(signatures, tokenizer, new_tokens, options.get("labels", ()))
    return loaded


def inputs_for(
    servable: Servable, signature: str, texts: Sequence, random: np.random.Generator
) -> dict[str, tf.Tensor]:
    """The inputs of a signature for these texts, one row a text."""
    rows, tokenizer = len(texts), servable.tokenizer
    ids = tokenizer(texts)["token_ids"].numpy()
    known = {
        "text": texts,
        "target": servables.texts(rows, int(random.integers(1000)), most=2),
        "inputs": [serialized(text) for text in texts],
        "token_ids": ids,
        "lengths": (ids != tokenizer.pad_id).sum(1),
        "max_new_tokens": random.integers(1, servable.new_tokens + 1, rows),
        "temperature": random.choice([0.0, 0.7, 1.5], rows),
        "top_k": random.choice([0, 1, 20], rows),
        "top_p": random.choice([0.5, 1.0], rows),
        "seed": random.integers(-(2**40), 2**40, rows),
    }
    specs = servable.signatures[signature].structured_input_signature[1]
    return {name: tf.constant(known[name], spec.dtype) for name, spec in specs.items()}


def mixed_requests(loaded: Mapping[str, Servable], count: int, seed: int = 7) -> list[Request]:
    """Requests of 1 to 4 texts of mixed length, all signatures of all models in turn."""
    random = np.random.default_rng(seed)
    asked = itertools.cycle([(name, one) for name, servable in loaded.items() for one in servable.signatures])
    requests = []
    for index, (name, signature) in zip(range(count), asked, strict=False):
        texts = servables.texts(int(random.integers(1, 5)), seed=seed + index)
        requests.append(Request(name, signature, inputs_for(loaded[name], signature, texts, random)))
    return requests


def answer(loaded: Mapping[str, Servable], request: Request) -> dict[str, np.ndarray]:
    outputs = loaded[request.model].signatures[request.signature](**request.inputs)
    return {name: value.numpy() for name, value in outputs.items()}


def difference(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest difference, relative for numbers over 1; infinite where strings, integers or shapes differ."""
    if set(got) != set(expected):
        return np.inf
    largest = 0.0
    for name, value in expected.items():
        if got[name].shape != value.shape or got[name].dtype != value.dtype:
            return np.inf
        if value.dtype.kind != "f":
            largest = max(largest, 0.0 if np.array_equal(got[name], value) else np.inf)
        elif not np.array_equal(got[name], value):
            apart = np.abs(got[name].astype("float64") - value) / np.maximum(1, np.abs(value))
            largest = max(largest, float(np.nan_to_num(apart, nan=np.inf).max()))
    return largest


def resident_mebibytes() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / MEBIBYTE


@dataclass
class Load:
    """The result of a load: differences from the single-threaded answers, errors, and the memory after each part."""

    differences: list[float]
    errors: list[str]
    memory: list[float]

    @property
    def growth(self) -> float:
        """From the first fifth, which warms up, to the end."""
        return self.memory[-1] / self.memory[len(self.memory) // 5] - 1


def under_load(
    loaded: Mapping[str, Servable],
    requests: Sequence[Request],
    expected: Sequence[Mapping[str, np.ndarray]],
    order: Iterable[int],
    threads: int,
    parts: int = 20,
) -> Load:
    """Asks requests, by their indices in `order`, from several threads at once."""
    order = list(order)
    load = Load([], [], [resident_mebibytes()])
    bar = keras.utils.Progbar(len(order), stateful_metrics=["MiB"])
    for part in np.array_split(order, parts):
        waiting = iter(part.tolist())
        lock = threading.Lock()

        def client(waiting=waiting, lock=lock):
            while True:
                with lock:
                    index = next(waiting, None)
                if index is None:
                    return
                try:
                    load.differences.append(difference(answer(loaded, requests[index]), expected[index]))
                except Exception as error:  # an operation may raise anything
                    load.errors.append(f"{requests[index].model}, {requests[index].signature}: {error}")

        clients = [threading.Thread(target=client) for _ in range(threads)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        load.memory.append(resident_mebibytes())
        bar.update(len(load.differences) + len(load.errors), values=[("MiB", load.memory[-1])])
    return load

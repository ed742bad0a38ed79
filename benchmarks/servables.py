"""What the benchmarks of serving export: a tokenizer, texts of mixed length, and models with random weights."""

import contextlib
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.clean_server import CleanServer
from keras_tx import data, serving
from keras_tx.text import BertTokenizer

NEW_TOKENS = 32  # the most that a generative model generates


@functools.cache
def sentences() -> list[str]:
    """The reviews of the sample."""
    return [text.decode() for text, _ in data.load_dataset("sample").train.as_numpy_iterator()]


def texts(count: int, seed: int = 7, most: int = 6) -> list[str]:
    """Texts of 1 to `most` sentences."""
    random, known = np.random.default_rng(seed), sentences()
    return [" ".join(random.choice(known, random.integers(1, most + 1))) for _ in range(count)]


def tokenizer(vocabulary_size: int, max_length: int = 64) -> BertTokenizer:
    """A tokenizer trained on the sample; [unused0] and so on fill the vocabulary, as in BERT's."""
    trained = BertTokenizer.train(sentences()[:2000], vocabulary_size).vocabulary
    unused = [f"[unused{index}]" for index in range(vocabulary_size - len(trained))]
    return BertTokenizer(trained + unused, max_length=max_length)


def with_noise(model: keras.Model, seed: int = 1, scale: float = 0.1) -> keras.Model:
    """Adds noise to every weight: with fresh weights the answers to different texts are nearly alike."""
    random = np.random.default_rng(seed)
    model.set_weights([one + scale * random.normal(size=one.shape).astype(one.dtype) for one in model.get_weights()])
    return model


def exported(
    stack: contextlib.ExitStack, model: keras.Model, precision: str, ids: np.ndarray, generation: dict[str, Any]
) -> Callable[[], np.ndarray]:
    """A generative model exported in a precision, in a server's process that ends with `stack`.

    Returns:
        A function that sends the ids (B, T) and returns the new tokens.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    version = serving.export(model, Path(folder) / "model", generation=generation, precision=precision)
    server = stack.enter_context(CleanServer(version, TF_ONEDNN_ASSUME_FROZEN_WEIGHTS="1"))
    server.answer("tokens", token_ids=ids[:1, :8].tolist(), lengths=[8])  # a server's first request is often one text
    request = {"token_ids": ids.tolist(), "lengths": [ids.shape[1]] * len(ids)}
    return lambda: np.asarray(server.answer("tokens", **request)["token_ids"])

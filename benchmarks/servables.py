"""What the benchmarks of serving export: a tokenizer, texts of mixed length, and models with random weights."""

import functools

import keras
import numpy as np

from keras_tx import data
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

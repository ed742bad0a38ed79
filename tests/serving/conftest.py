"""A small tokenizer, tiny classifiers, and one of them exported."""

from types import SimpleNamespace

import numpy as np
import pytest

from keras_tx.models import TextClassifier
from keras_tx.serving import export
from keras_tx.text import BertTokenizer
from tests.tools import randomize, to_numpy

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["the", "cat", "sat", "not", "wonderful", "but", "dull", "one", "two", "three", "café", "!", ",", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *WORDS, *LETTERS, *("##" + letter for letter in LETTERS)]
LABELS = ["bad", "so-so", "good"]
WARMUP = ["the cat sat", "", {"signature_name": "tokens", "inputs": {"token_ids": [[2, 6, 3]], "lengths": [3]}}]


@pytest.fixture(scope="session")
def tokenizer():
    return BertTokenizer(VOCABULARY, max_length=16)


@pytest.fixture(scope="session")
def make():
    """A classifier whose three probabilities are well apart."""

    def make(**kwargs):
        sizes = dict(num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=5)
        return randomize(TextClassifier(len(VOCABULARY), len(LABELS), **(sizes | kwargs)), seed=3)

    return make


@pytest.fixture(scope="session")
def live():
    """What a model answers to one row of ids, by Keras; softmax by NumPy in float64."""

    def live(model, **row):
        outputs = model({name: np.asarray(ids, "int32")[None] for name, ids in row.items()}, training=False)
        outputs = to_numpy(outputs)[0].astype("float64")
        exponentials = np.exp(outputs - outputs.max())
        return outputs if model.activation.__name__ == "softmax" else exponentials / exponentials.sum()

    return live


@pytest.fixture(scope="session")
def exported(make, tokenizer, tmp_path_factory):
    """A classifier of two layers with an optimizer, and its first version."""
    import tensorflow as tf

    model = make(num_layers=2)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    path = export(
        model,
        tmp_path_factory.mktemp("saved_models") / "reviews",
        tokenizer=tokenizer,
        labels=LABELS,
        warmup=WARMUP,
        max_batch=5,
    )
    return SimpleNamespace(model=model, path=path, signatures=tf.saved_model.load(str(path)).signatures)

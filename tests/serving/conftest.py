"""A small tokenizer, tiny models, and their exports, shared by all tests that only read them."""

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_tx.generation import Beam
from keras_tx.models import CausalLM, TextClassifier
from keras_tx.serving import export, exporters
from keras_tx.serving.encoder_signatures import encoder_signatures
from keras_tx.serving.generator_signatures import generator_signatures
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
        keras.utils.set_random_seed(5)  # every worker of a run must make the model that one of them has exported
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
def once(tmp_path_factory):
    """Exports a version once for all processes of a run, since nothing here takes longer."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    base = Path(os.environ.get("KERAS_TX_TEST_EXPORTS", base))  # of `scripts/check`
    base.mkdir(exist_ok=True)

    def once(name, write):
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            folder = base / "saved_models" / name
            versions = [path for path in folder.glob("*") if path.name.isdecimal()]
            return versions[0] if versions else write(folder)

    return once


@pytest.fixture(scope="session")
def exported(make, tokenizer, once):
    """A classifier of two layers with an optimizer, and its first version."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401  # has the operations of the graph

    model = make(num_layers=2)
    model.compile("adam", "sparse_categorical_crossentropy")
    model.optimizer.build(model.trainable_variables)
    options = {"tokenizer": tokenizer, "labels": LABELS, "warmup": WARMUP, "max_batch": 5}
    path = once("reviews", lambda folder: export(model, folder, **options))
    return SimpleNamespace(model=model, path=path, signatures=tf.saved_model.load(str(path)).signatures)


@pytest.fixture(scope="session")
def multi_label(make, tokenizer, once):
    """A classifier whose texts have several labels, or none, and its version."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    model = make()
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    options = {"tokenizer": tokenizer, "labels": LABELS, "max_batch": 2}
    path = once("topics", lambda folder: export(model, folder, **options))
    return SimpleNamespace(model=model, path=path, signatures=tf.saved_model.load(str(path)).signatures)


@pytest.fixture(scope="session")
def pairs(make, tokenizer, once):
    """A classifier of pairs of texts, and its version."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    model = make(embedding_options={"num_segments": 2})
    options = {"tokenizer": tokenizer, "labels": LABELS, "warmup": [("the cat", "sat"), ("", "dull")], "max_batch": 3}
    path = once("pairs", lambda folder: export(model, folder, text_pairs=True, **options))
    return SimpleNamespace(model=model, path=path, signatures=tf.saved_model.load(str(path)).signatures)


BEAM = {"strategy": Beam(2, num_return_sequences=2), "max_new_tokens": 3, "min_new_tokens": 2}


def small_generator(**options):
    sizes = dict(num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=5)
    keras.utils.set_random_seed(5)
    return randomize(CausalLM(len(VOCABULARY), **sizes, **options), seed=1)


@contextmanager
def only_signatures(*names):
    """Exports get these signatures alone, since tracing all takes long."""

    def some(signatures):
        def made(*arguments, **options):
            all_of_them = signatures(*arguments, **options)
            return {name: all_of_them[name] for name in names}

        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporters, "generator_signatures", some(generator_signatures))
        patch.setattr(exporters, "encoder_signatures", some(encoder_signatures))
        yield


@pytest.fixture(scope="session")
def generator(tokenizer, once):
    """A small language model, and its version with some of its signatures."""
    with only_signatures("serving_default", "generate", "tokens", "score"):
        options = {"tokenizer": tokenizer, "generation": BEAM, "warmup": ["the cat"], "max_batch": 2}
        model = small_generator()
        return SimpleNamespace(model=model, path=once("generator", lambda folder: export(model, folder, **options)))


@pytest.fixture(scope="session")
def generative_models():
    """A language model, a translator, and a model that a user put together."""
    from tests.serving.generative import MODELS

    keras.utils.set_random_seed(7)  # before that of `seeded`, which each test has
    return {name: randomize(make(), scale=0.6) for name, make in MODELS.items()}

"""Exports models on the backend of this process, and writes down what they answer.

other_backend.py FOLDER PART..., where all parts except `classifier` start FOLDER/python instead of a Python with
TensorFlow.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

from keras_tx.generation import Greedy
from keras_tx.models import CausalLM, TextClassifier
from keras_tx.serving import export, other_backends
from keras_tx.text import BertTokenizer
from tests.serving.conftest import LABELS, VOCABULARY
from tests.tools import randomize, to_numpy

IDS = [[2, 6, 7, 3], [2, 9, 3, 0]]


@keras.saving.register_keras_serializable(package="of_main")
class Mine(keras.layers.Layer):
    """A layer that only this process has."""

    def call(self, x):
        return x + 1


TOKENIZER = BertTokenizer(VOCABULARY, max_length=16)
SIZES = dict(num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=5)


def classifier(folder):
    """A classifier, and its logits here."""
    model = randomize(TextClassifier(len(VOCABULARY), len(LABELS), **SIZES), seed=3)
    request = {"signature_name": "tokens", "inputs": {"token_ids": [*np.array(IDS)], "lengths": [np.int32(4), 3]}}
    warmup = ["the cat", b"\xff", request]
    path = export(model, folder / "reviews", tokenizer=TOKENIZER, labels=LABELS, warmup=warmup, max_batch=3)
    return {"path": str(path), "logits": to_numpy(model(np.array(IDS), training=False)).tolist()}


def language_model(folder):
    """A language model over ids, and what it generates here."""
    model = randomize(CausalLM(len(VOCABULARY), **SIZES), seed=1)
    options = {"strategy": Greedy(), "max_new_tokens": 3, "forced_tokens": {0: 12}, "stop_tokens": (3,)}
    path = export(model, folder / "language_model", generation=options)
    return {"path": str(path), "ids": model.generate(IDS[0][:3], **options)}


def refused(folder):
    """The errors for a model that sees padding, and for a model of a class that another process cannot import."""
    ids, errors = keras.Input((None,), dtype="int32"), []
    for head in (keras.layers.GlobalAveragePooling1D(), Mine()):
        try:
            x = keras.layers.Embedding(len(VOCABULARY), 3)(ids)
            export(keras.Model(ids, head(x)), folder / "refused", tokenizer=TOKENIZER)
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    return errors


PARTS = {"classifier": classifier, "language_model": language_model, "refused": refused}


def answers(folder, names):
    python, found = sys.executable, {}
    for name in names:
        other_backends.sys.executable = python if name == "classifier" else str(folder / "python")
        found[name] = PARTS[name](folder)
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "answers.json").write_text(json.dumps(answers(folder, sys.argv[2:])))

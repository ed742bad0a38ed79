"""A trained model -> saved_models/NAME/VERSION, a SavedModel that TensorFlow Serving answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_tx.models import TextClassifier
from keras_tx.serving.signatures import classifier_signatures
from keras_tx.serving.versions import write_version
from keras_tx.text import BertTokenizer

# What the live model says of these is written beside the graph, for `check` to compare with.
PARITY_TEXTS = (
    "",
    "A short one.",
    "Not wonderful but dull, café 電影 🎬 [SEP] " * 9,
    "\x00\ufffd ��",
    "one two three " * 30,
)
PARITY_FILE = "assets.extra/keras_tx_parity.json"
# How far an exported probability may be from the live one: eight roundings of 1 in the precision of the layers.
TOLERANCES = {"float16": 8 * 2**-10, "bfloat16": 8 * 2**-7}


def export(model: keras.Model, path: str | Path, *, tokenizer: Any = None, labels: Sequence[str] | None = None) -> Path:
    """Writes the next version of a model for TensorFlow Serving.

    The version is written beside and renamed into place, so a server that watches the folder never sees half of it.
    Signatures, all with the batch B as first axis:

    - `serving_default`: `text` (B,) -> `label` (B,), `probabilities` (B, C).
    - `explain`: `text` (B,) -> these, `tokens` (B, T) and attention `scores` (B, L, N, T, T).
    - `tokens`: `token_ids` (B, T), `lengths` (B,) -> as `serving_default`, and in its place without a tokenizer.

    Args:
        model: a `TextClassifier` with a padding id, that returns logits or, by `activation="softmax"`, probabilities.
        path: the model's folder, such as "saved_models/reviews"; versions are numbers below it.
        tokenizer: a `BertTokenizer` of the model's vocabulary, which goes into the graph.
        labels: the names of the classes; "0", "1", ... if None.

    Returns:
        The version's folder.

    Raises:
        TypeError: the model or the tokenizer is of another kind.
        ValueError: the model's outputs are neither logits nor probabilities, or it has no padding id; labels or
            tokenizer do not fit it.
        OSError: the folder cannot be written.
        RuntimeError: Keras runs on another backend than TensorFlow.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "`export` needs the TensorFlow backend: save the model, and load it with KERAS_BACKEND=tensorflow. "
            f"Received: the backend {keras.backend.backend()}"
        )
    if not isinstance(model, TextClassifier):
        raise TypeError(f"`model` must be a TextClassifier. Received: model of type {type(model).__name__}")
    _check_model(model)
    labels = _check_labels(model, labels)
    if tokenizer is not None:
        _check_tokenizer(model, tokenizer)
    signatures = classifier_signatures(model, tokenizer, labels)

    def write(folder):
        archive = keras.export.ExportArchive()  # its endpoints bring the weights; `track` would write each twice
        for name, function in signatures.items():
            archive.add_endpoint(name, function)
        archive.write_out(str(folder), verbose=False)
        if tokenizer is not None:
            answers = _answers(model, tokenizer, labels)
            (folder / PARITY_FILE).parent.mkdir(exist_ok=True)
            (folder / PARITY_FILE).write_text(json.dumps(answers), encoding="utf-8")

    return write_version(Path(path), write)


def _answers(model, tokenizer, labels):
    """What the live model answers to `PARITY_TEXTS`, one text at a time, by Keras alone."""
    is_probability = model.activation is keras.activations.softmax
    rows = []
    for text in PARITY_TEXTS:
        with keras.device("cpu:0"):  # where `check` computes: a GPU rounds otherwise
            outputs = model({name: ids[None] for name, ids in tokenizer(text).items()}, training=False)
            probabilities = outputs if is_probability else keras.ops.softmax(outputs)
        rows.append(keras.ops.convert_to_numpy(probabilities)[0].tolist())
    best = [labels[max(range(len(row)), key=row.__getitem__)] for row in rows]
    tolerance = TOLERANCES.get(model.embedding.compute_dtype, 1e-6)
    return {"text": list(PARITY_TEXTS), "label": best, "probabilities": rows, "tolerance": tolerance}


def _check_model(model):
    if model.activation not in (keras.activations.linear, keras.activations.softmax):
        raise ValueError(
            "`model` must return logits or probabilities: its `activation` must be None or 'softmax'. Received: "
            f"activation={getattr(model.activation, '__name__', model.activation)}"
        )
    if model.embedding.padding_id is None:
        raise ValueError(
            "`model` must have a padding id, or rows of different lengths could not share a batch. Received: "
            "padding_id=None"
        )


def _check_labels(model, labels):
    if labels is None:
        return [str(index) for index in range(model.num_classes)]
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str)
    if (
        not is_list
        or not all(isinstance(label, str) for label in labels)
        or len(set(labels)) != model.num_classes
        or len(labels) != model.num_classes
    ):
        raise ValueError(
            f"`labels` must be a list of {model.num_classes} different strings, one for each class of the model. "
            f"Received: labels={labels!r}"
        )
    return list(labels)


def _check_tokenizer(model, tokenizer):
    if not isinstance(tokenizer, BertTokenizer):
        raise TypeError(f"`tokenizer` must be a BertTokenizer. Received: tokenizer of type {type(tokenizer).__name__}")
    padding_id, max_length = model.embedding.padding_id, getattr(model.embedding.positions, "max_length", None)
    if tokenizer.vocabulary_size > model.vocabulary_size:
        raise ValueError(
            "`tokenizer` must not have more tokens than the model. Received: "
            f"tokenizer.vocabulary_size={tokenizer.vocabulary_size}, model.vocabulary_size={model.vocabulary_size}"
        )
    if tokenizer.pad_id != padding_id:
        raise ValueError(
            "`tokenizer` must pad with the id that the model takes for padding. Received: "
            f"tokenizer.pad_id={tokenizer.pad_id}, padding_id={padding_id}"
        )
    if max_length is not None and tokenizer.max_length > max_length:
        raise ValueError(
            "`tokenizer` must not make rows longer than the positions that the model has. Received: "
            f"tokenizer.max_length={tokenizer.max_length}, max_length={max_length}"
        )

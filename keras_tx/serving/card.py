"""A version -> its MODEL_CARD.json and batching_params.pbtxt: what it answers, what it is made with, how it batches."""

import datetime
import json
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path

import keras
import numpy as np

from keras_tx.keras_internals import layers_within
from keras_tx.version import __version__

FILE = "MODEL_CARD.json"
BATCHING = "batching_params.pbtxt"


def write_card(folder: Path, name, model, signatures, *, tokenizers, labels, generation, parity, warmup, backend):
    """Writes the card of the version in `folder`.

    Args:
        folder: of the version.
        name: of the model, that of its folder.
        model: the live model.
        signatures: {name: function} of the loaded version.
        tokenizers: {argument: tokenizer}; None where there is none.
        labels, generation: arguments of `export`, or None.
        parity: figures by signature.
        warmup: the number of warm-up requests.
        backend: that the model ran on.
    """
    card = {
        "name": name,
        "model": {
            "kind": type(model).__name__,
            "parameters": model.count_params(),
            "dtypes": sorted({layer.dtype_policy.name for layer in layers_within(model) if layer.weights}),
            "backend": backend,
        },
        "signatures": {key: _sides(function) for key, function in signatures.items()},
        **{argument: _tokenizer(tokenizer) for argument, tokenizer in tokenizers.items() if tokenizer is not None},
        **({} if labels is None else {"labels": labels}),
        **({} if generation is None else {"generation": {key: _plain(value) for key, value in generation.items()}}),
        "parity": parity,
        "warmup_requests": warmup,
        "versions": _versions(),
        "exported": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    (folder / FILE).write_text(_lines(card, levels=2) + "\n", encoding="utf-8")


def write_batching(folder: Path, max_batch: int):
    """Writes how a server batches; it reads it with --enable_batching --enable_per_model_batching_parameters.

    A request waits for no other: what is there when a thread gets free goes together. Ids of different widths are
    filled up by the server, with whatever value, for which `lengths` are an input.
    """
    lines = [
        f"max_batch_size {{ value: {max_batch} }}",
        "batch_timeout_micros { value: 0 }",
        "max_enqueued_batches { value: 1000 }",
        "pad_variable_length_inputs: true",
    ]
    (folder / BATCHING).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(value, levels, indent=""):
    """JSON with a line for each entry of the first `levels` dicts."""
    if not isinstance(value, dict) or not value or not levels:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + "  "
    entries = [f"{inner}{json.dumps(key)}: {_lines(one, levels - 1, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _sides(function):
    sides = {"inputs": function.structured_input_signature[1], "outputs": function.structured_outputs}
    return {
        side: {
            key: {"dtype": spec.dtype.name, "shape": None if spec.shape.rank is None else spec.shape.as_list()}
            for key, spec in sorted(specs.items())
        }
        for side, specs in sides.items()
    }


def _tokenizer(tokenizer):
    config = tokenizer.get_config() if hasattr(tokenizer, "get_config") else {}
    options = {key: _plain(value) for key, value in config.items() if _is_small(value)}
    return {"kind": type(tokenizer).__name__, "vocabulary_size": tokenizer.vocabulary_size, "options": options}


def _is_small(value):
    """Not a vocabulary or a definition."""
    return not isinstance(value, (list, tuple, dict, bytes, str)) or len(value) <= 64


def _plain(value):
    """What JSON can hold; of a strategy its arguments."""
    if is_dataclass(value):
        options = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"kind": type(value).__name__, **options}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _versions():
    installed = {"keras_tx": __version__, "keras": keras.version()}
    for package in ("tensorflow", "tensorflow-text"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # or under another name, such as tensorflow-cpu
            installed[package] = None
    return installed

"""A model that lives on JAX or PyTorch -> the same export, by TensorFlow in a process of its own.

JAX models leave as one operation that needs XLA, which a stock server has not; PyTorch ones not at all. So the model is
saved, opened by Keras on TensorFlow, compared with what it answers here, and exported there.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx import generation as strategies
from keras_tx.functional_graph import is_optional_input
from keras_tx.generation.strategy import Strategy
from keras_tx.keras_internals import layers_within
from keras_tx.serving.parity import raw, written

STRATEGIES = ("Greedy", "Sample", "Beam")
ERRORS = {error.__name__: error for error in (ValueError, TypeError, OSError, ImportError, RuntimeError)}
CODE = (
    "import sys; from keras_tx.serving.other_backends import main; from keras_tx.serving.export import export_here; "
    "main(sys.argv[1], export_here)"
)


def export_elsewhere(model, path, *, tokenizers, generation, labels, warmup, max_batch):
    """Exports by TensorFlow in a subprocess: the arguments and what comes back are those of `export`.

    Classes of a model's layers are found again if they are registered with Keras and in a module that can be imported.

    Raises:
        ValueError: classes that only this process has, a strategy or tokenizer that cannot be saved, or a model that
            answers otherwise on TensorFlow.
        RuntimeError: the process ended without a word.
        As `export`: what that raised there.
    """
    parts = [*layers_within(model), *[one for one in tokenizers.values() if one is not None]]
    modules = {type(one).__module__ for one in parts}
    if "__main__" in modules:
        names = sorted({type(one).__name__ for one in parts if type(one).__module__ == "__main__"})
        raise ValueError(
            "`model` and tokenizers must be of classes in modules that the process of TensorFlow can import. "
            f"Received: {names} of __main__"
        )
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder)
        model.save(job / "model.keras")
        np.savez(job / "probe.npz", *_answers(model))
        given = {
            "path": str(Path(path).absolute()),
            "modules": sorted(modules),
            "tokenizers": {name: saved("tokenizer", one) for name, one in tokenizers.items() if one is not None},
            "generation": None if generation is None else saved_options(generation),
            "labels": labels,
            "warmup": [_saved_request(entry) for entry in warmup],
            "max_batch": max_batch,
            "backend": keras.backend.backend(),
        }
        (job / "job.json").write_text(json.dumps(given), encoding="utf-8")
        environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",  # this process may hold all of its memory
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
        }
        run = subprocess.run([sys.executable, "-c", CODE, folder], capture_output=True, text=True, env=environment)
        result = job / "result.json"
        if not result.exists():
            lines = [line for line in run.stderr.strip().splitlines() if line.strip()] or ["no message"]
            raise RuntimeError(
                "`export` needs TensorFlow in a process of its own, which ended. Received: exit code "
                f"{run.returncode}: {lines[-1].strip()}"
            )
        found = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise_again(found)
    return Path(found["path"])


def main(folder, export):
    """What the subprocess does: opens the job in `folder`, calls `export`, and leaves result.json."""
    job = Path(folder)
    try:
        found = {"path": str(_export(job, export))}
    except Exception as error:  # is raised in the process that asked
        found = described(error)
    (job / "result.json").write_text(json.dumps(found), encoding="utf-8")


def described(error):
    """An error as JSON: the nearest of its kinds that every process has, and its message."""
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in ERRORS), "RuntimeError")
    return {
        "error": kind,
        "message": str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}",
    }


def raise_again(found):
    """Raises what `described` described."""
    raise ERRORS[found["error"]](found["message"])


def _export(job, export):
    given = json.loads((job / "job.json").read_text(encoding="utf-8"))
    for module in given["modules"]:  # their classes register themselves
        importlib.import_module(module)
    model = keras.saving.load_model(job / "model.keras", compile=False)
    with np.load(job / "probe.npz") as file:
        compare(given["backend"], [file[name] for name in file.files], _answers(model))
    return export(
        model,
        given["path"],
        tokenizers={name: keras.saving.deserialize_keras_object(one) for name, one in given["tokenizers"].items()},
        generation=None if given["generation"] is None else opened_options(given["generation"]),
        labels=given["labels"],
        warmup=[_opened_request(entry) for entry in given["warmup"]],
        max_batch=given["max_batch"],
        backend=given["backend"],
    )


def _answers(model):
    """What a model answers to rows of zeros and ones, which every vocabulary has."""
    rows = []
    for tensor in model.inputs:
        width = tensor.shape[1] or 5
        row = np.resize([1, 0, 1, 1, 0, 1, 1], 2 * width).reshape(2, width)
        rows.append(None if is_optional_input(tensor) else keras.ops.convert_to_tensor(row, dtype=tensor.dtype))
    outputs = model(keras.tree.pack_sequence_as(model.input, rows), training=False)
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in keras.tree.flatten(outputs)]


def compare(backend, expected, got):
    """Raises unless the numbers are those of the model that was saved."""
    for one, other in zip(expected, got, strict=True):
        scale = max(1.0, float(np.max(np.abs(one), initial=0)))
        error = float(np.max(np.abs(one - other), initial=0)) / scale if one.shape == other.shape else np.inf
        if not error <= 0.05:  # half precision rounds otherwise on each backend
            raise ValueError(
                f"`model` must answer on TensorFlow as it does on {backend}. Received: outputs that differ by "
                f"{error:.1e}"
            )


def saved(name, thing):
    """A tokenizer as JSON."""
    if not hasattr(thing, "get_config"):
        raise ValueError(
            f"`{name}` must have `get_config` and `from_config`, to be taken to TensorFlow. Received: {name} of type "
            f"{type(thing).__name__}"
        )
    return keras.saving.serialize_keras_object(thing)


def saved_options(options):
    """The options of `generate` as JSON; no pickle is ever written or read."""
    saved: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Strategy):
            kind = type(value).__name__
            of_ours = kind in STRATEGIES and type(value) is getattr(strategies, kind)
            if not (of_ours and is_dataclass(value)):
                raise ValueError(
                    "`generation` must have a strategy of keras_tx, to be taken to TensorFlow. Received: strategy of "
                    f"type {kind}"
                )
            config = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
            saved[name] = {"kind": kind, "config": config}
        elif isinstance(value, dict):  # forced_tokens; the keys of JSON are strings
            saved[name] = {"pairs": [[int(key), int(token)] for key, token in value.items()]}
        else:
            saved[name] = _listed(value)
    return saved


def _listed(value):
    """Numbers, and rows of them of any lengths, as JSON can hold them."""
    if isinstance(value, (list, tuple)):
        return [_listed(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def opened_options(saved):
    opened = {}
    for name, value in saved.items():
        if isinstance(value, dict) and "kind" in value:
            opened[name] = getattr(strategies, value["kind"])(**value["config"])
        else:
            opened[name] = dict(value["pairs"]) if isinstance(value, dict) else value
    return opened


def _saved_request(entry):
    """An entry of `warmup` as JSON."""
    if not isinstance(entry, dict):
        return written(entry)
    inputs = {
        key: written(value.tolist() if hasattr(value, "tolist") else value) for key, value in entry["inputs"].items()
    }
    return {**entry, "inputs": inputs}


def _opened_request(saved):
    if not (isinstance(saved, dict) and "inputs" in saved):
        return raw(saved)
    return {**saved, "inputs": {key: raw(value) for key, value in saved["inputs"].items()}}

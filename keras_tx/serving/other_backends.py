"""Exports a model on the JAX or PyTorch backend, by a separate process in which Keras runs on TensorFlow.

From JAX, Keras exports a single operation that needs XLA, which an unmodified server does not have; from PyTorch it
cannot export. So the model is saved here, and the process loads it, compares its outputs with those of this backend,
and exports it.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import keras
import numpy as np

from keras_tx import generation as strategies
from keras_tx.functional_graph import is_optional_input
from keras_tx.generation.strategy import Strategy
from keras_tx.internals.keras_models import is_unsafe_deserialization_enabled, layers_within
from keras_tx.models.checked_data import CheckedModel
from keras_tx.serving.parity import from_json, to_json
from keras_tx.serving.text_encoder import fewest_positions, one_line

STRATEGIES = ("Greedy", "Sample", "Beam", "Speculative")
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TypeError, OSError, ImportError, RuntimeError)
}
CODE = (
    "import sys; from keras_tx.serving.other_backends import main; "
    "from keras_tx.serving.export import export_on_tensorflow; main(sys.argv[1], export_on_tensorflow)"
)


def export_in_subprocess(
    model: keras.Model,
    path: str | Path,
    *,
    tokenizers: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    labels: Sequence[str] | None,
    warmup: Sequence[Any],
    max_batch: int,
    precision: str,
    constant_weights: bool | None,
    text_pairs: bool = False,
    multi_label: str | None = None,
) -> Path:
    """Exports in a process in which Keras runs on TensorFlow. Arguments and return value are those of `export`.

    `multi_label` is what a multi-label head returns, as the exporter of the model knows from its loss.

    The process finds classes and functions of a model if they are registered with Keras, in modules that it can import.
    It runs the code of Lambda layers if this process may, see `keras.config.enable_unsafe_deserialization`.

    Raises:
        ValueError: a class is defined only in this process, a strategy or tokenizer cannot be saved, there is a Lambda
            layer, the process cannot load the model, or the outputs of the model on TensorFlow differ.
        RuntimeError: the process ended without a result.
        Other errors: those that `export` raised in the process.
    """
    parts = [*layers_within(model), *[one for one in tokenizers.values() if one is not None]]
    modules = _modules_of([type(one) for one in parts])
    runs_code = is_unsafe_deserialization_enabled()
    if not runs_code:
        _check_lambdas(model)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder)
        model.save(job / "model.keras")
        np.savez(job / "probe.npz", *_outputs_of_probe(model))
        saved = {name: tokenizer_to_json(name, one) for name, one in tokenizers.items() if one is not None}
        modules |= _modules_of(_registered_in(_config_in(job / "model.keras")))
        given = {
            "path": str(Path(path).absolute()),
            "modules": sorted(modules),
            "runs_code": runs_code,
            "tokenizers": saved,
            "generation": None if generation is None else options_to_json(generation),
            "labels": labels,
            "warmup": [_request_to_json(entry) for entry in warmup],
            "max_batch": max_batch,
            "precision": precision,
            "constant_weights": constant_weights,
            "text_pairs": text_pairs,
            "multi_label": multi_label,
            "backend": keras.backend.backend(),
        }
        (job / "job.json").write_text(json.dumps(given), encoding="utf-8")
        environment = {
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",  # this process may use all memory of the GPU
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
    return Path(path) / Path(found["path"]).name  # the version, in the folder as it was given


def _modules_of(things: Iterable[Any]) -> set[str]:
    """The modules of classes and functions.

    Raises:
        ValueError: some of them are of `__main__`, which another process cannot import.
    """
    named = {(thing.__module__, thing.__name__) for thing in things}
    of_main = sorted(name for module, name in named if module == "__main__")
    if of_main:
        raise ValueError(
            "`model` and tokenizers must be of classes and functions in modules that the process of TensorFlow can "
            f"import. Received: {of_main} of __main__"
        )
    return {module for module, _ in named}


def _config_in(file: Path) -> Any:
    """The config of a model in a .keras file without what it was compiled with, which an export does not load."""
    with zipfile.ZipFile(file) as archive:
        config = json.loads(archive.read("config.json"))
    config.pop("compile_config", None)
    return config


def _registered_in(config: Any) -> list[Any]:
    """The classes and functions that are registered with Keras and that a config has by their names."""
    names = {one for one in keras.tree.flatten(config) if isinstance(one, str)}
    found = [thing for name, thing in keras.saving.get_custom_objects().items() if name in names]
    return [thing for thing in found if isinstance(thing, (type, FunctionType))]


def _check_lambdas(model: keras.Model) -> None:
    """Raises for a Lambda layer whose function is code in the file of the model."""
    for layer in layers_within(model):
        config = layer.get_config() if isinstance(layer, keras.layers.Lambda) else {}
        if any(isinstance(value, dict) and value.get("class_name") == "__lambda__" for value in config.values()):
            raise ValueError(
                "`model` must not have a Lambda layer with a Python lambda, to be exported from this backend, unless "
                "`keras.config.enable_unsafe_deserialization()` was called: the process of TensorFlow runs its code "
                f"from a file. Received: the layer '{layer.name}'"
            )


def main(folder: str | Path, export: Callable[..., Path]) -> None:
    """The main function of the process: it loads the job in `folder`, calls `export`, and writes result.json."""
    job = Path(folder)
    try:
        found = {"path": str(_export_job(job, export))}
    except Exception as error:  # it is raised again in the process that called `export`
        found = error_to_json(error)
    (job / "result.json").write_text(json.dumps(found), encoding="utf-8")


def error_to_json(error: BaseException) -> dict[str, str]:
    """An error as JSON: its nearest base class in `ERRORS`, and its message."""
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in ERRORS), "RuntimeError")
    return {
        "error": kind,
        "message": str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}",
    }


def raise_again(found: Mapping[str, str]) -> NoReturn:
    """Raises the error that `error_to_json` returned."""
    raise ERRORS[found["error"]](found["message"])


def _export_job(job: Path, export: Callable[..., Path]) -> Path:
    given = json.loads((job / "job.json").read_text(encoding="utf-8"))
    try:
        for module in given["modules"]:  # importing registers their classes and functions with Keras
            importlib.import_module(module)
        model = keras.saving.load_model(job / "model.keras", compile=False, safe_mode=not given["runs_code"])
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a module or a layer may raise any error
        # Before the reason, Keras names each layer around the one that fails, with its config.
        reason = ValueError(str(error).rpartition("Exception encountered: ")[2])
        raise ValueError(
            "`model` must be one that a process of TensorFlow can load: its classes and functions must be registered "
            f"with Keras, in modules that the process can import. Received: {type(error).__name__}: {one_line(reason)}"
        ) from error
    if given["multi_label"]:  # the loss says so again; the one that it was trained with may be unknown here
        model.compile(loss=keras.losses.BinaryCrossentropy(from_logits=given["multi_label"] == "logits"))
    with np.load(job / "probe.npz") as file:
        check_same_outputs(given["backend"], [file[name] for name in file.files], _outputs_of_probe(model))
    return export(
        model,
        given["path"],
        tokenizers={name: keras.saving.deserialize_keras_object(one) for name, one in given["tokenizers"].items()},
        generation=None if given["generation"] is None else options_from_json(given["generation"]),
        labels=given["labels"],
        warmup=[_request_from_json(entry) for entry in given["warmup"]],
        max_batch=given["max_batch"],
        precision=given["precision"],
        constant_weights=given["constant_weights"],
        text_pairs=given["text_pairs"],
        backend=given["backend"],
    )


def _outputs_of_probe(model: keras.Model) -> list[np.ndarray]:
    """The outputs for rows of zeros and ones, which are ids of every vocabulary."""
    rows, ends = [], model._ids_in_each_row() if isinstance(model, CheckedModel) else {}
    length = min(5, fewest_positions(model) or 5)
    for tensor in model.inputs:
        width = tensor.shape[1] or length
        row = np.resize([1, 0, 1, 1, 0, 1, 1], 2 * width).reshape(2, width)
        if tensor.name in ends:
            row[:, -1] = ends[tensor.name][0]
        rows.append(None if is_optional_input(tensor) else keras.ops.convert_to_tensor(row, dtype=tensor.dtype))
    outputs = model(keras.tree.pack_sequence_as(model.input, rows), training=False)
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in keras.tree.flatten(outputs)]


def check_same_outputs(backend: str, expected: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> None:
    """Checks that the outputs on TensorFlow are those that the model had on `backend`.

    Raises:
        ValueError: they have another shape, or differ by more than rounding in half precision.
    """
    for one, other in zip(expected, got, strict=True):
        scale = max(1.0, float(np.max(np.abs(one), initial=0)))
        if one.shape != other.shape:
            raise ValueError(
                f"`model` must answer on TensorFlow as it does on {backend}. Received: an output of shape {one.shape} "
                f"on {backend}, and {other.shape} on TensorFlow"
            )
        error = float(np.max(np.abs(one - other), initial=0)) / scale
        if not error <= 0.05:  # each backend rounds half precision differently
            raise ValueError(
                f"`model` must answer on TensorFlow as it does on {backend}. Received: outputs that differ by "
                f"{error:.1e}"
            )


def tokenizer_to_json(name: str, tokenizer: Any) -> Any:
    """The tokenizer in the argument `name` as JSON."""
    if not hasattr(tokenizer, "get_config"):
        raise ValueError(
            f"`{name}` must have `get_config` and `from_config`, to be exported from this backend. Received: {name} "
            f"of type {type(tokenizer).__name__}"
        )
    return keras.saving.serialize_keras_object(tokenizer)


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `generate` as JSON, since no pickle is ever written or read."""
    saved: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Strategy):
            saved[name] = _strategy_to_json(value)
        elif isinstance(value, dict):  # forced_tokens; the keys of JSON are strings
            saved[name] = {"pairs": [[int(key), int(token)] for key, token in value.items()]}
        else:
            saved[name] = _to_lists(value)
    return saved


def _strategy_to_json(strategy: Strategy) -> dict[str, Any]:
    kind = type(strategy).__name__
    is_ours = kind in STRATEGIES and type(strategy) is getattr(strategies, kind)
    if not (is_ours and is_dataclass(strategy)):
        raise ValueError(
            "`generation` must have a strategy of keras_tx, to be exported from this backend. Received: "
            f"strategy of type {kind}"
        )
    config = {field.name: getattr(strategy, field.name) for field in fields(strategy) if field.init}
    if config.get("draft_model") is not None:
        raise ValueError(
            "`generation` must have a strategy without a `draft_model`, to be exported from this backend. Received: "
            f"draft_model={config['draft_model']!r}"
        )
    if "strategy" in config:
        config["strategy"] = _strategy_to_json(config["strategy"])
    return {"kind": kind, "config": config}


def _strategy_from_json(saved: Mapping[str, Any]) -> Strategy:
    config = dict(saved["config"])
    if "strategy" in config:
        config["strategy"] = _strategy_from_json(config["strategy"])
    made: Strategy = getattr(strategies, saved["kind"])(**config)
    return made


def _to_lists(value: Any) -> Any:
    """Converts numbers, rows of numbers of any lengths, sets and ranges of numbers to lists for JSON."""
    if isinstance(value, Set):
        return sorted((_to_lists(one) for one in value), key=str)
    if isinstance(value, (list, tuple, range)):
        return [_to_lists(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def options_from_json(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `options_to_json` returned."""
    opened: dict[str, Any] = {}
    for name, value in saved.items():
        if isinstance(value, dict) and "kind" in value:
            opened[name] = _strategy_from_json(value)
        else:
            opened[name] = dict(value["pairs"]) if isinstance(value, dict) else value
    return opened


def _request_to_json(entry: Any) -> Any:
    """An entry of `warmup` as JSON."""
    if not isinstance(entry, dict):
        return to_json(entry)
    inputs = {key: to_json(_to_lists(value)) for key, value in entry["inputs"].items()}
    return {**entry, "inputs": inputs}


def _request_from_json(saved: Any) -> Any:
    if not (isinstance(saved, dict) and "inputs" in saved):
        return from_json(saved)
    return {**saved, "inputs": {key: from_json(value) for key, value in saved["inputs"].items()}}

"""Writes MODEL_CARD.json, which describes a version, and batching_params.pbtxt, which configures batching."""

import datetime
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx.internals.keras_models import layers_within
from keras_tx.layers.exported_weights import ExportedWeights
from keras_tx.version import __version__

FILE = "MODEL_CARD.json"
BATCHING = "batching_params.pbtxt"


def write_card(
    folder: Path,
    name: str,
    model: keras.Model,
    signatures: Mapping[str, Any],
    *,
    tokenizers: Mapping[str, Any],
    labels: Sequence[str] | None,
    multi_label: bool,
    generation: Mapping[str, Any] | None,
    parity: Mapping[str, Any],
    warmup: int,
    backend: str,
    weights: ExportedWeights | None,
) -> None:
    """Writes the model card into the folder of a version.

    Args:
        folder: the version's folder.
        name: the model's name, which is that of the folder above.
        model: the Keras model.
        signatures: {name: function} of the loaded version.
        tokenizers: {argument: tokenizer or None}.
        labels, generation: arguments of `export`, or None.
        multi_label: whether a text may have several labels.
        parity: figures by signature.
        warmup: the number of warm-up requests.
        backend: the backend that the model ran on.
        weights: the weights of the products; None for a model that does not compute in float32.
    """
    content = {
        "precision": {
            "products": _precision_of_products(model, None if weights is None else weights.precision),
            "megabytes_of_constants": round(weights.size / 1e6, 3) if weights else 0,
            "megabytes_on_disk": round(sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) / 1e6, 3),
        },
        "signatures": {key: _input_and_output_specs(function) for key, function in signatures.items()},
        **({} if generation is None else {"generation": {key: _to_json(value) for key, value in generation.items()}}),
        "parity": parity,
        "warmup_requests": warmup,
    }
    entries: dict[str, Any] = {"tokenizers": tokenizers, "labels": labels, "multi_label": multi_label}
    write_entries(folder, name, model, content, **entries, backend=backend)


def write_entries(
    folder: Path,
    name: str,
    model: keras.Model,
    content: Mapping[str, Any],
    *,
    tokenizers: Mapping[str, Any],
    labels: Sequence[str] | None,
    multi_label: bool,
    backend: str,
    packages: Sequence[str] = ("tensorflow", "tensorflow-text"),
) -> None:
    """Writes a model card with what cards of all formats say, and `content` in between.

    Args:
        folder, name, model, tokenizers, labels, multi_label, backend: as for `write_card`.
        content: the entries of this format.
        packages: those whose versions the card has, beside those of keras_tx and Keras.
    """
    described = {argument: _described_tokenizer(one) for argument, one in tokenizers.items() if one is not None}
    card = {
        "name": name,
        "model": {
            "kind": type(model).__name__,
            "parameters": model.count_params(),
            "dtypes": sorted({_policy_name(layer) for layer in _layers_with_weights(model)}),
            "backend": backend,
        },
        **content,
        **described,
        **({} if labels is None else {"labels": labels, "multi_label": multi_label}),
        "versions": _versions(packages),
        "exported": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    (folder / FILE).write_text(_formatted(card, levels=2) + "\n", encoding="utf-8")


def write_batching(folder: Path, max_batch: int) -> None:
    """Writes the parameters for a server with --enable_batching --enable_per_model_batching_parameters.

    No request waits for others: a free thread takes all waiting requests as one batch. The server pads ids of different
    widths with arbitrary values, which is why `lengths` are an input.
    """
    lines = [
        f"max_batch_size {{ value: {max_batch} }}",
        "batch_timeout_micros { value: 0 }",
        "max_enqueued_batches { value: 1000 }",
        "pad_variable_length_inputs: true",
    ]
    (folder / BATCHING).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _formatted(value: Any, levels: int, indent: str = "") -> str:
    """JSON with one line for each entry of the outer `levels` of dicts."""
    if not isinstance(value, dict) or not value or not levels:
        return json.dumps(value, ensure_ascii=False)
    inner = indent + "  "
    entries = [f"{inner}{json.dumps(key)}: {_formatted(one, levels - 1, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _layers_with_weights(model: keras.Model) -> list[Any]:
    """The layers with weights. Models are not among them: their dtype policy is not that of their layers."""
    return [one for one in layers_within(model) if one.weights and not isinstance(one, keras.Model)]


def _policy_name(layer: Any) -> str:
    """The name of a layer's dtype policy; for a `DTypePolicyMap`, that of its default policy."""
    policy = layer.dtype_policy
    is_map = isinstance(policy, keras.dtype_policies.DTypePolicyMap)
    return str(policy.default_policy.name if is_map else policy.name)


def _precision_of_products(model: keras.Model, exported: str | None) -> str:
    """The precision of products with weights, such as "bfloat16"; for layers after `quantize` its mode, such as "int8".

    Args:
        model: the Keras model.
        exported: the precision that the export gave to products of layers that are not quantized; None: their own.
    """
    layers = _layers_with_weights(model)
    modes = {layer: getattr(layer, "quantization_mode", None) for layer in layers}
    found = {mode for mode in modes.values() if mode is not None}
    if not found:
        return _compute_dtypes(model) if exported is None else exported
    others = [layer for layer, mode in modes.items() if mode is None and hasattr(layer, "kernel")]
    return ", ".join(sorted(found | {exported or layer.compute_dtype for layer in others}))


def _compute_dtypes(model: keras.Model) -> str:
    """The dtypes in which layers with weights compute, norms and embeddings included, such as "bfloat16, float32"."""
    return ", ".join(sorted({layer.compute_dtype for layer in _layers_with_weights(model)}))


def _input_and_output_specs(function: Any) -> dict[str, Any]:
    sides = {"inputs": function.structured_input_signature[1], "outputs": function.structured_outputs}
    return {
        side: {
            key: {"dtype": spec.dtype.name, "shape": None if spec.shape.rank is None else spec.shape.as_list()}
            for key, spec in sorted(specs.items())
        }
        for side, specs in sides.items()
    }


def _described_tokenizer(tokenizer: Any) -> dict[str, Any]:
    config = tokenizer.get_config() if hasattr(tokenizer, "get_config") else {}
    options = {key: _to_json(value) for key, value in config.items() if _is_small(value)}
    return {"kind": type(tokenizer).__name__, "vocabulary_size": tokenizer.vocabulary_size, "options": options}


def _is_small(value: Any) -> bool:
    """Whether a value is an option, and not a vocabulary or the content of a file."""
    return not isinstance(value, (list, tuple, dict, bytes, str)) or len(value) <= 64


def _to_json(value: Any) -> Any:
    """Converts a value to JSON; a strategy becomes its name and arguments."""
    if is_dataclass(value):
        options = {field.name: _to_json(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"kind": type(value).__name__, **options}
    if isinstance(value, dict):
        return {str(key): _to_json(one) for key, one in value.items()}
    if isinstance(value, Set):
        return sorted((_to_json(one) for one in value), key=str)
    if isinstance(value, (list, tuple, range, np.ndarray)):
        return [_to_json(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    installed: dict[str, str | None] = {"keras_tx": __version__, "keras": keras.version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # it may have another name, such as tensorflow-cpu
            installed[package] = None
    return installed

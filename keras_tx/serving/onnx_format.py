"""Exports an encoder model to ONNX, with the files of its tokenizer beside it, for ONNX Runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx.functional_graph import is_optional_input
from keras_tx.optional import Lazy
from keras_tx.serving import parity
from keras_tx.serving.card import write_entries
from keras_tx.serving.exporters import EncoderExporter, Exporter
from keras_tx.serving.text_encoder import TextEncoder, one_line
from keras_tx.serving.versions import model_name, write_version
from keras_tx.types import Tensor

onnxruntime = Lazy("onnxruntime")
tf = Lazy("tensorflow")
tf2onnx = Lazy("tf2onnx", "formats")

FILE = "model.onnx"
TOLERANCE = 1e-4  # of an output in float32, relative to the largest number of the output


def export_onnx(exporter: Exporter, path: Path, given: Mapping[str, Any]) -> Path:
    """Writes the next version: model.onnx, the tokenizer's files and MODEL_CARD.json.

    Before the version gets its number, ONNX Runtime answers texts, or rows of ids, and the answers are compared with
    those of the Keras model.

    Args:
        exporter: that of the model.
        path: the model's folder.
        given: arguments of `export` that only a SavedModel has, by name, as far as they are not the defaults.

    Returns:
        The version's folder.

    Raises:
        ImportError: tf2onnx or onnxruntime is not installed.
        ValueError: the backend is not TensorFlow, the model generates, is in half precision, or depends on padding, has
            operations that ONNX lacks or other answers in ONNX Runtime; or there are arguments that only a SavedModel
            has.
    """
    if given:
        name, value = next(iter(given.items()))
        raise ValueError(f"`{name}` is only for format='tf_saved_model'. Received: {name}={value!r}, format='onnx'")
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "`format='onnx'` needs Keras' TensorFlow backend. Save the model with `model.save`, and load it in a "
            f"process with KERAS_BACKEND=tensorflow. Received: backend {keras.backend.backend()!r}"
        )
    if not isinstance(exporter, EncoderExporter):
        raise ValueError(
            "`format='onnx'` is for models that classify or encode. Received: a model of type "
            f"{type(exporter.model).__name__}, which generates"
        )
    if exporter.encoder.half_dtype is not None:
        raise ValueError(
            "`format='onnx'` needs a model that does not compute in half precision. Received: a model that computes in "
            f"{exporter.encoder.half_dtype}"
        )
    for package in (tf2onnx, onnxruntime):
        package.__name__  # raises ImportError before anything is written  # noqa: B018
    exporter.check_rows()
    return write_version(path, lambda folder: _write(exporter, model_name(path), folder))


def _write(exporter: EncoderExporter, name: str, folder: Path) -> None:
    encoder, tokenizer = exporter.encoder, exporter.tokenizer
    named = _with_names(encoder, _kept_inputs(exporter))
    inputs = [_inputs(exporter, texts, named) for texts in _texts(exporter)]
    live = [named(one, training=False) for one in inputs]  # Keras exports what has been called
    session = _converted(named, folder / FILE)
    differences = []
    keys = [one.name for one in named.inputs]
    for one, expected in zip(inputs, live, strict=True):
        fed = {key: np.asarray(x) for key, x in zip(keys, one, strict=True)}
        found = dict(zip(encoder.outputs, session.run(list(encoder.outputs), fed), strict=True))
        for key, value in expected.items():
            value = keras.ops.convert_to_numpy(value)
            if found[key].shape != value.shape:
                raise ValueError(
                    "`model` must have outputs of the same shape in ONNX Runtime. Received: the output "
                    f"'{key}', of shape {value.shape} live and {found[key].shape} in ONNX Runtime"
                )
            # A model that divides by the number of real tokens has no answer to the last row, which is padding alone.
            rows = slice(None) if np.isfinite(value[-1]).all() else slice(-1)
            scale = max(1.0, float(np.max(np.abs(value[rows]), initial=0)))
            differences.append(np.max(np.abs(found[key][rows] - value[rows]), initial=0) / scale)
    largest = float(np.max(differences))  # NaN if there is one, which is over any limit
    if not largest <= TOLERANCE:
        raise ValueError(
            f"`model` must have the same outputs in ONNX Runtime, up to {TOLERANCE} of the largest number. Received: "
            f"outputs that differ by {largest:.1e}"
        )
    if tokenizer is not None:
        saved = folder / "tokenizer"  # `save` waits for the lock of its folder, and that of `folder` is held here
        tokenizer.save(saved)
        for file in saved.iterdir():
            file.rename(folder / file.name)
        saved.rmdir()
    content = {
        **({"text_pairs": True} if exporter.text_pairs else {}),
        "inputs": {one.name: [one.dtype, list(one.shape)] for one in named.inputs},
        "outputs": {key: [one.dtype, list(one.shape)] for key, one in encoder.outputs.items()},
        "largest_difference": largest,
    }
    write_entries(
        folder,
        name,
        encoder.model,
        content,
        tokenizers={"tokenizer": tokenizer},
        labels=exporter.labels,
        multi_label=exporter.multi_label is not None,
        backend="tensorflow",
        packages=("tensorflow", "tf2onnx", "onnxruntime"),
    )


def _converted(model: keras.Model, file: Path) -> Any:
    """Writes a model into a file, and returns the session of ONNX Runtime for it."""
    try:
        model.export(file, format="onnx", verbose=False)
        return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:  # tf2onnx and ONNX Runtime have several errors
        message = ValueError(str(error).replace(str(file), FILE))  # the path is that of an incomplete version
        raise ValueError(f"`model` must have operations that ONNX has. Received: {one_line(message)}") from error


def _kept_inputs(exporter: EncoderExporter) -> list[Tensor]:
    """The symbolic inputs without the optional ones that are left out: segment ids, too, if the tokenizer has none."""
    encoder, tokenizer = exporter.encoder, exporter.tokenizer
    left_out: list[str | None] = [None]
    if tokenizer is not None:
        pairs = ["a"] if exporter.text_pairs else None
        left_out += [] if "segment_ids" in encoder.features(tokenizer, ["a"], pairs) else ["segments"]
    return [x for x in encoder.model.inputs if encoder.roles[x.name] not in left_out or not is_optional_input(x)]


def _with_names(encoder: TextEncoder, inputs_kept: Sequence[Tensor]) -> keras.Model:
    """The model with some of its inputs, where the others are None, and with outputs by name."""
    kept = {one.name: keras.Input(batch_shape=one.shape, dtype=one.dtype, name=one.name) for one in inputs_kept}
    inputs = keras.tree.pack_sequence_as(encoder.model.input, [kept.get(one.name) for one in encoder.model.inputs])
    outputs = keras.tree.flatten(encoder.model(inputs, training=False))
    return keras.Model([*kept.values()], dict(zip(encoder.outputs, outputs, strict=True)))


def _texts(exporter: EncoderExporter) -> list[Sequence[Any] | None]:
    """Batches of texts, or of pairs of texts; None stands for a batch of ids."""
    texts = parity.PAIRS if exporter.text_pairs else parity.TEXTS
    return [None] if exporter.tokenizer is None else [texts, texts[1:2]]


def _inputs(exporter: EncoderExporter, texts: Sequence[Any] | None, named: keras.Model) -> list[Any]:
    """The inputs of `named`, in order, with one more row, of padding alone."""
    encoder = exporter.encoder
    if texts is not None:
        found = exporter.id_inputs(texts)
        ids, segments = found["token_ids"], found["segment_ids"]
    else:
        row = np.asarray(exporter.sample_row()[0], "int32")
        ids, segments = keras.ops.convert_to_tensor(np.resize(row, (1, encoder.fixed_length or len(row)))), None
    ids = tf.pad(ids, [[0, 1], [0, 0]], constant_values=exporter.padding_id)
    segments = None if segments is None else tf.pad(segments, [[0, 1], [0, 0]])
    given = encoder.inputs_in_order(ids, segments, exporter.padding_id)
    by_name = {one.name: x for one, x in zip(encoder.model.inputs, given, strict=True)}
    return [by_name[one.name] for one in named.inputs]

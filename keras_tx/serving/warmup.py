"""Writes assets.extra/tf_serving_warmup_requests, which a server runs before it accepts requests of clients.

The file is a TFRecord of `PredictionLog` (tensorflow_serving/apis/prediction_log.proto), at most 1,000 of them. A
server that fails on one of them rejects the version, so each of them is tested here first.
https://www.tensorflow.org/tfx/serving/saved_model_warmup
"""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.serving.request_inputs import FEATURE, PAIR_FEATURE
from keras_tx.serving.text_encoder import one_line
from keras_tx.text.python_inputs import is_encodable
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

FILE = "assets.extra/tf_serving_warmup_requests"
MAX_REQUESTS = 1000  # a server reads no more
# Values of the inputs that some signatures have in addition to the text.
ROW_OPTIONS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
TARGET = "a"  # for `score`; short, since text and target together must fit into the positions


class RequestSource(Protocol):
    """The part of the interface of exporters that requests need."""

    request_defaults: dict[str, float]

    def id_inputs(self, texts: Sequence[Any]) -> dict[str, Tensor]:
        """Texts -> the inputs of signatures over ids, `token_ids` (B, T), `lengths` (B,), ..."""


def check_warmup(warmup: Sequence[Any], tokenizer: Any, text_pairs: bool = False) -> list[Any]:
    """Returns the entries as a list, in which a pair of texts is a list of two.

    Raises:
        ValueError: an entry is neither a text nor a request, or neither a pair of texts nor a request if there are
            `text_pairs`; a text has a lone surrogate; or there are texts and no tokenizer.
    """
    is_list = isinstance(warmup, Sequence) and not isinstance(warmup, (str, bytes))
    for entry in warmup if is_list else [warmup]:
        is_request = isinstance(entry, dict) and set(entry) <= {"signature_name", "inputs"} and "inputs" in entry
        is_text = _is_pair(entry) if text_pairs else isinstance(entry, (str, bytes))
        if not is_list or not (is_text or is_request):
            texts = "pairs (text, text_pair)" if text_pairs else "texts"
            raise ValueError(
                f"`warmup` must be a list of {texts}, or of requests {{'signature_name': ..., 'inputs': {{...}}}}. "
                f"Received: {'' if is_list else 'warmup='}{reprlib.repr(entry)}"
                f"{', text_pairs=True' if text_pairs else ''}"
            )
        if is_text and not all(
            is_encodable(text) for text in (entry if text_pairs else [entry]) if isinstance(text, str)
        ):
            raise ValueError(
                "`warmup` must have texts that can be encoded as UTF-8, which has no lone surrogates. Received: "
                f"{reprlib.repr(entry)}"
            )
        if tokenizer is None and not is_request:
            raise ValueError(
                f"`tokenizer` must be given for the texts of `warmup`. Received: tokenizer=None, {reprlib.repr(entry)}"
            )
    return [list(entry) if _is_pair(entry) else entry for entry in warmup]


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, (tuple, list)) and len(entry) == 2 and all(isinstance(x, (str, bytes)) for x in entry)


def write_warmup(
    folder: Path, name: str, signatures: Mapping[str, Any], warmup: Sequence[Any], source: RequestSource, max_batch: int
) -> int:
    """Answers every request, and writes all of them to the file.

    A text becomes one request for each signature that takes texts, or ids that the tokenizer can make of them. All
    texts together become one more request for each signature, of `max_batch` rows.

    Args:
        folder: the version's folder.
        name: the model's name.
        signatures: {name: function} of the loaded version.
        warmup: texts or pairs of texts, and requests as a server's REST interface takes them,
            `{"signature_name": ..., "inputs": ...}`.
        source: the model's exporter, for inputs other than texts.
        max_batch: the number of rows of the largest batch.

    Returns:
        The number of requests; where there is none, no file is written.

    Raises:
        ValueError: a request fails, for example because a text is too long for the model, or has more rows than
            `max_batch`, or there are over 1,000.
    """
    requests = _requests(signatures, warmup, source, max_batch)
    if len(requests) > MAX_REQUESTS:
        raise ValueError(
            f"`warmup` must make at most {MAX_REQUESTS} requests: for each signature one for each text and one full "
            f"batch. Received: {len(warmup)} entries, which make {len(requests)}"
        )
    records = []
    for signature, inputs, entry in requests:
        try:
            signatures[signature](**inputs)
        except Exception as error:  # an operation may raise anything
            raise ValueError(
                f"`warmup` must be answered by the model, or no server would load it. Received: {reprlib.repr(entry)}, "
                f"on which the signature {signature!r} fails: {one_line(error)}"
            ) from error
        records.append(prediction_log(name, signature, inputs))
    if records:
        (folder / FILE).parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(str(folder / FILE)) as file:
            for record in records:
                file.write(record)
    return len(records)


def _requests(
    signatures: Mapping[str, Any], warmup: Sequence[Any], source: RequestSource, max_batch: int
) -> list[tuple[str, dict[str, Tensor], Any]]:
    """The name of the signature, the inputs and the entry of `warmup` of each request."""
    texts = [entry for entry in warmup if not isinstance(entry, dict)]
    batches = [[text] for text in texts] + ([[texts[i % len(texts)] for i in range(max_batch)]] if texts else [])
    requests: list[tuple[str, dict[str, Tensor], Any]] = []
    for name, function in signatures.items():
        specs = function.structured_input_signature[1]
        for batch in batches:
            inputs = inputs_for(specs, batch, source)
            if inputs is not None:
                requests.append((name, inputs, batch[0] if len(batch) == 1 else batch))
    for entry in warmup:
        if isinstance(entry, dict):
            requests.append(_given_request(signatures, entry, max_batch))
    return requests


def inputs_for(specs: Mapping[str, Any], texts: Sequence[Any], source: RequestSource) -> dict[str, Tensor] | None:
    """The inputs of a signature for texts, or pairs of texts, {name: tensor}; None if one of them is unknown."""
    ids = source.id_inputs(texts) if "token_ids" in specs else {}
    inputs = {name: _input_for(name, spec, texts, source, ids) for name, spec in specs.items()}
    return None if any(value is None for value in inputs.values()) else inputs


def _input_for(name: str, spec: Any, texts: Sequence[Any], source: RequestSource, ids: Mapping[str, Tensor]) -> Tensor:
    if name == "target":
        return tf.fill([len(texts)], TARGET)
    parts = [[one] if isinstance(one, (str, bytes)) else one for one in texts]
    if name == "inputs":
        return tf.constant([serialized(*one) for one in parts], tf.string)
    if spec.dtype == tf.string:
        return tf.constant([one[1 if name == PAIR_FEATURE else 0] for one in parts], tf.string)
    options = ROW_OPTIONS | source.request_defaults
    if name in options:
        return tf.fill([len(texts)], tf.cast(options[name], spec.dtype))
    return ids.get(name)


def _given_request(
    signatures: Mapping[str, Any], entry: dict[str, Any], max_batch: int
) -> tuple[str, dict[str, Tensor], Any]:
    """A request that the user gave as a client would send it."""
    name, inputs = entry.get("signature_name", "serving_default"), entry["inputs"]
    specs = signatures[name].structured_input_signature[1] if name in signatures else {}
    if not isinstance(inputs, dict) or not specs or set(inputs) != set(specs):
        known = {name: list(function.structured_input_signature[1]) for name, function in signatures.items()}
        raise ValueError(
            f"`warmup` must name a signature and all its inputs, of these: {known}. Received: {reprlib.repr(entry)}"
        )
    try:
        tensors = {key: tf.constant(inputs[key], spec.dtype) for key, spec in specs.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`warmup` must give inputs of the dtypes { ({key: spec.dtype.name for key, spec in specs.items()}) }. "
            f"Received: {reprlib.repr(entry)}: {one_line(error)}"
        ) from error
    for key, tensor in tensors.items():
        if not specs[key].shape.is_compatible_with(tensor.shape):
            raise ValueError(
                f"`warmup` must give the input '{key}' of {name!r} a shape {list(specs[key].shape)}. Received: "
                f"{reprlib.repr(entry)}, whose '{key}' has the shape {list(tensor.shape)}"
            )
    rows = max(tensor.shape[0] for tensor in tensors.values())
    if rows > max_batch:
        raise ValueError(
            "`warmup` must have requests of at most `max_batch` rows. Received: "
            f"max_batch={max_batch}, {reprlib.repr(entry)}, which has {rows} rows"
        )
    return name, tensors, entry


def serialized(*texts: str | bytes) -> bytes:
    """A text, or a pair of texts, -> the serialized tf.Example that `classify` takes."""
    values = [tf.train.BytesList(value=[text.encode() if isinstance(text, str) else text]) for text in texts]
    named = zip((FEATURE, PAIR_FEATURE), values, strict=False)
    features = tf.train.Features(feature={name: tf.train.Feature(bytes_list=value) for name, value in named})
    return bytes(tf.train.Example(features=features).SerializeToString())


def prediction_log(model: str, signature: str, inputs: Mapping[str, Tensor]) -> bytes:
    """A serialized `PredictionLog` with a `PredictRequest`, without the protos of TensorFlow Serving.

    PredictionLog.predict_log = 6; PredictLog.request = 1; PredictRequest.model_spec = 1, .inputs = 2, a map;
    ModelSpec.name = 1, .signature_name = 3.
    """
    tensors = {
        key: tf.make_tensor_proto(np.asarray(value), tf.as_dtype(value.dtype)).SerializeToString()
        for key, value in inputs.items()
    }
    request = _field(1, _field(1, model.encode()) + _field(3, signature.encode()))
    request += b"".join(_field(2, _field(1, key.encode()) + _field(2, value)) for key, value in tensors.items())
    return _field(6, _field(1, request))


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer whose content has a length: https://protobuf.dev/programming-guides/encoding."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)

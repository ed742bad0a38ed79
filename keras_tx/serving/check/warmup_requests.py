"""Reads and runs the warm-up requests of a version, for which a server refuses it if one of them fails.

The file is a TFRecord of `PredictionLog`, see `keras_tx/serving/warmup.py`, which writes it. The protos of TensorFlow
Serving are not installed here, so fields are read by their numbers:
https://protobuf.dev/programming-guides/encoding. Neither keras_tx nor Keras is imported here.
"""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

FILE = os.path.join("assets.extra", "tf_serving_warmup_requests")
MOST = 1000  # a server refuses a version with more
SECONDS = 60  # for so long requests are run; later ones are only read
VARINT, EIGHT_BYTES, WITH_LENGTH, FOUR_BYTES = 0, 1, 2, 5  # wire types


def problems_of_warmup(version: str, signatures: Mapping[str, Any]) -> list[str]:
    """The sentence for the first request that cannot be read or fails; [] if there is none, or no file.

    Args:
        version: the folder of the version.
        signatures: its signatures, as `session.Session` has them.
    """
    if not os.path.exists(os.path.join(version, FILE)):
        return []
    place, start = 0, time.perf_counter()
    try:
        for place, record in enumerate(tf.data.TFRecordDataset(os.path.join(version, FILE)), start=1):
            if place > MOST:
                return [f"{FILE} has more than {MOST} requests, with which no server loads it"]
            for name, inputs in _predict_requests(record.numpy()):
                if time.perf_counter() - start < SECONDS:
                    _run(signatures[name], inputs)
    except Exception as error:  # a damaged file and an operation may raise any error
        message = " ".join(str(error).split())[:500]
        where = f"from request {place + 1} on" if isinstance(error, tf.errors.DataLossError) else f"in request {place}"
        return [f"{FILE} has an error {where}, with which no server loads it: {type(error).__name__}: {message}"]
    return []


def _run(signature: Any, inputs: Mapping[str, Any]) -> None:
    for name, tensor in inputs.items():
        dtype, given = signature.inputs[name][0], tf.as_dtype(tensor.dtype)
        if given != dtype:
            raise TypeError(f"the input '{name}' has the dtype {given.name}, not {dtype.name}")
    signature(**{name: tf.make_ndarray(tensor) for name, tensor in inputs.items()})


def _predict_requests(record: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name of the signature and the inputs, TensorProtos by name, of each request of a serialized `PredictionLog`.

    PredictionLog.predict_log = 6; PredictLog.request = 1; PredictRequest.model_spec = 1, .inputs = 2, a map;
    ModelSpec.signature_name = 3. Requests of other kinds are left out.
    """
    for log in _contents(record, 6):
        for request in _contents(log, 1):
            names = [name for spec in _contents(request, 1) for name in _contents(spec, 3)]
            inputs = {}
            for entry in _contents(request, 2):
                key, value = (b"".join(_contents(entry, number)) for number in (1, 2))
                inputs[key.decode()] = tensor_pb2.TensorProto.FromString(value)
            yield (names[-1].decode() if names else "serving_default"), inputs


def _contents(message: bytes, number: int) -> list[bytes]:
    """The contents of all fields with this number, which have a length; all others are read, too."""
    found, place = [], 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == VARINT:
            _, place = _varint(message, place)
            continue
        if kind == WITH_LENGTH:
            size, place = _varint(message, place)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field of the unknown type {kind}")
        if place + size > len(message):
            raise ValueError("a field is longer than its message")
        if key == (number << 3 | WITH_LENGTH):
            found.append(message[place : place + size])
        place += size
    return found


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    value, shift = 0, 0
    while True:
        if place == len(message):
            raise ValueError("a number has no end")
        value |= (message[place] & 127) << shift
        place, shift = place + 1, shift + 7
        if message[place - 1] < 128:
            return value, place

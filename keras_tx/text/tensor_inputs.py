"""Checks arguments and converts them to tensors: texts -> strings () or (B,), ids -> (T,) or ragged (B, None)."""

import reprlib
from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def as_string_tensor(name: str, texts: Any) -> Tensor:
    """Converts a string, or a list, array or tensor of strings, to a string tensor () or (B,).

    Raises:
        TypeError: `texts` are not strings.
        ValueError: the rank of `texts` is not 0 or 1.
    """
    try:
        tensor = tf.convert_to_tensor(texts, dtype=tf.string)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        received = f"{name}={reprlib.repr(texts)}"
        raise TypeError(f"`{name}` must be a string, or a list or tensor of strings. Received: {received}") from error
    if tensor.shape.rank not in (0, 1):
        raise ValueError(f"`{name}` must have rank 0 or 1. Received: {name} of shape {tensor.shape}")
    return tensor


def as_id_tensor(ids: Any) -> Tensor:
    """Converts lists, arrays or tensors of integers to int64 (T,), or to ragged int64 (B, None).

    Raises:
        TypeError: `ids` are not integers.
        ValueError: the rank of `ids` is not 1 or 2.
    """
    try:
        if isinstance(ids, (list, tuple)):
            ids = tf.ragged.constant([np.asarray(row).tolist() for row in ids])
            ids = tf.cast(ids, "int64") if tf.size(ids) == 0 else ids  # TensorFlow takes an empty list for float32
        elif not tf.is_tensor(ids):
            ids = tf.constant(np.asarray(ids))
    except (TypeError, ValueError) as error:
        raise TypeError(f"`ids` must be integers. Received: ids={reprlib.repr(ids)}") from error
    if not ids.dtype.is_integer:
        raise TypeError(f"`ids` must be integers. Received: ids of dtype {ids.dtype.name}")
    if ids.shape.rank not in (1, 2):
        raise ValueError(f"`ids` must have rank 1 or 2. Received: ids of shape {ids.shape}")
    ids = tf.cast(ids, "int64")
    return ids if ids.shape.rank == 1 or isinstance(ids, tf.RaggedTensor) else tf.RaggedTensor.from_tensor(ids)


def replace_unknown_ids(ids: Tensor, vocabulary_size: int, unknown_id: int) -> Tensor:
    """Raises for ids outside [0, vocabulary_size) eagerly, and replaces them by `unknown_id` in a graph.

    Raises:
        ValueError: an id is outside the vocabulary, and its value is known.
    """
    known = (ids >= 0) & (ids < vocabulary_size)
    if tf.executing_eagerly() and not tf.reduce_all(known):
        first = int(ids[~known][0])
        raise ValueError(f"`ids` must be in [0, {vocabulary_size}), the vocabulary. Received: id {first}")
    return tf.where(known, ids, unknown_id)

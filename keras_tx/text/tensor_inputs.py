"""What users pass -> tensors: texts -> strings () or (B,), ids -> (T,) or ragged (B, None); and checks of arguments."""

import reprlib
from typing import Any

import numpy as np

from keras_tx import checks
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def strings(name: str, texts: Any):
    """A string, or a list, array or tensor of strings -> string tensor () or (B,).

    Raises:
        TypeError: they are not strings.
        ValueError: their rank is not 0 or 1.
    """
    try:
        tensor = tf.convert_to_tensor(texts, dtype=tf.string)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        received = f"{name}={reprlib.repr(texts)}"
        raise TypeError(f"`{name}` must be a string, or a list or tensor of strings. Received: {received}") from error
    if tensor.shape.rank not in (0, 1):
        raise ValueError(f"`{name}` must have rank 0 or 1. Received: {name} of shape {tensor.shape}")
    return tensor


def as_ids(ids: Any):
    """Lists, arrays or tensors of integers -> int64 (T,), or ragged int64 (B, None).

    Raises:
        TypeError: they are not integers.
        ValueError: their rank is not 1 or 2.
    """
    try:
        if isinstance(ids, (list, tuple)):
            ids = tf.ragged.constant([np.asarray(row).tolist() for row in ids])
            ids = tf.cast(ids, "int64") if tf.size(ids) == 0 else ids  # nothing is float32 otherwise
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


def within(ids, vocabulary_size: int, unknown_id: int):
    """Ids outside 0 <= id < vocabulary_size are an error eagerly and the unknown token in a graph.

    Raises:
        ValueError: such an id, eagerly.
    """
    known = (ids >= 0) & (ids < vocabulary_size)
    if tf.executing_eagerly() and not tf.reduce_all(known):
        first = int(ids[~known][0])
        raise ValueError(f"`ids` must be in [0, {vocabulary_size}), the vocabulary. Received: id {first}")
    return tf.where(known, ids, unknown_id)


def boolean(name: str, value: Any, none: bool = False) -> Any:
    """Returns `value` if it is a boolean (or None, where `none` allows it)."""
    if not isinstance(value, bool) and not (none and value is None):
        rule = "True, False or None" if none else "True or False"
        raise TypeError(f"`{name}` must be {rule}. Received: {name}={value!r}")
    return value


def at_least(name: str, value: Any, least: int) -> int:
    """Returns `value` if it is an integer that leaves room for `least` special tokens."""
    if checks.positive_int(name, value) < least:
        raise ValueError(f"`{name}` must be at least {least}, for the special tokens. Received: {name}={value}")
    return value


def seed_of(seed: Any):
    """Returns `seed` as a tensor if it is two integers."""
    tensor = tf.convert_to_tensor(seed)
    if not tensor.dtype.is_integer or tensor.shape != (2,):
        raise ValueError(f"`seed` must be two integers. Received: seed={seed!r}")
    return tensor

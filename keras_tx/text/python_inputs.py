"""Checks arguments and converts them to Python values: texts -> list of `str`, ids -> lists of `int`."""

import reprlib
import sys
from typing import Any

import numpy as np

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def is_graph_tensor(value: Any) -> bool:
    """Whether `value` is a symbolic TensorFlow tensor, that is, one of a function that is being traced."""
    if sys.modules.get("tensorflow") is None:
        return False
    ragged = isinstance(value, tf.RaggedTensor)
    return tf.is_tensor(value) and not hasattr(value.flat_values if ragged else value, "numpy")


def as_string_list(name: str, texts: Any) -> tuple[list[str], bool]:
    """Converts texts to Python strings. Bytes that are not UTF-8 become U+FFFD.

    Args:
        name: the name of the argument, for errors.
        texts: a string, or a list, array or tensor of strings.

    Returns:
        A list of `str`, and whether `texts` was one string.

    Raises:
        TypeError: `texts` are not strings.
        ValueError: the rank of `texts` is not 0 or 1.
    """
    found = texts.numpy() if hasattr(texts, "numpy") else texts
    shape = np.shape(found) if hasattr(found, "shape") else ()
    if len(shape) > 1:
        raise ValueError(f"`{name}` must have rank 0 or 1. Received: {name} of shape {shape}")
    found = found.tolist() if isinstance(found, (np.ndarray, np.generic)) else found
    is_one = isinstance(found, (str, bytes))
    items = [found] if is_one else list(found) if isinstance(found, (list, tuple)) else [None]
    items = [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]
    if not all(isinstance(item, str) and is_encodable(item) for item in items):
        if items and all(isinstance(row, (list, tuple)) for row in items):
            are_pairs = all(isinstance(row, (list, tuple)) and len(row) == 2 for row in items)
            hint = ", and second texts come in a list of their own" if are_pairs else ""
            raise ValueError(f"`{name}` must have rank 0 or 1{hint}. Received: {name}={reprlib.repr(texts)}")
        received = f"{name}={reprlib.repr(texts)}"
        raise TypeError(f"`{name}` must be a string, or a list or tensor of strings. Received: {received}")
    return [str(item) for item in items], is_one


def as_id_lists(ids: Any, vocabulary_size: int) -> tuple[list[list[int]], bool]:
    """Converts ids to lists of `int`.

    Args:
        ids: integers (T,), (B, T) or ragged (B, None), as lists, arrays or tensors of any library.
        vocabulary_size: every id must be smaller than it.

    Returns:
        B lists, and whether `ids` was one row.

    Raises:
        TypeError: `ids` are not integers.
        ValueError: the rank of `ids` is not 1 or 2, or one is outside the vocabulary.
    """
    if hasattr(ids, "to_list"):  # a ragged tensor
        ids = ids.to_list()
    elif hasattr(ids, "detach"):  # a tensor of PyTorch
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, (list, tuple)) and any(np.ndim(row) for row in ids):
        if not all(np.ndim(row) == 1 for row in ids):
            kind = ValueError if all(np.ndim(row) for row in ids) else TypeError
            rule = "have rank 1 or 2" if kind is ValueError else "be integers"
            raise kind(f"`ids` must {rule}. Received: ids={reprlib.repr(ids)}")
        rows, is_one = [np.asarray(row) for row in ids], False
    else:
        array = np.asarray(ids)
        if array.ndim not in (1, 2):
            raise ValueError(f"`ids` must have rank 1 or 2. Received: ids of shape {array.shape}")
        rows, is_one = list(np.atleast_2d(array)), array.ndim == 1
    for row in rows:
        if row.size and row.dtype.kind not in "iu":
            raise TypeError(f"`ids` must be integers. Received: ids of dtype {row.dtype.name}")
        outside = row[(row < 0) | (row >= vocabulary_size)] if row.size else row
        if outside.size:
            rule = f"`ids` must be in [0, {vocabulary_size}), the vocabulary"
            raise ValueError(f"{rule}. Received: id {outside[0]}")
    return [row.astype("int64").tolist() for row in rows], is_one


def is_encodable(text: str) -> bool:
    """Whether the text can be encoded as UTF-8, which has no lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

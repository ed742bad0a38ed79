"""Tries out whether a user's encoder model answers a row of ids by itself: whatever its padding and the other rows.

A server puts rows of several requests into one batch, padded to the same length.
"""

from typing import Any

import keras
import numpy as np

from keras_tx.optional import Lazy
from keras_tx.serving.text_encoder import TextEncoder, one_line
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def check_rows(encoder: TextEncoder, padding_id: int, ids: Any, length: int) -> None:
    """Checks that a row has the same outputs every time: alone, padded, and in a batch with another row.

    The check also shows whether the model accepts rows of that length.

    Args:
        encoder: the model. One of a fixed length has all its rows padded to that, so that they always have the same
            padding.
        padding_id: the id of padding tokens.
        ids: a row of ids.
        length: the number of tokens to which the row is padded.

    Raises:
        ValueError: the outputs differ, or the model does not run on `length` tokens or on two rows.
    """
    tolerance = 0.05 if encoder.half_dtype else 1e-4
    padded = np.full((1, encoder.fixed_length or max(length, len(ids))), padding_id, "int32")
    padded[0, : len(ids)] = ids[: padded.shape[1]]
    alone = np.array([ids], "int32") if encoder.fixed_length is None else padded
    both = np.concatenate([alone, [_other_row(alone[0], padding_id)]])
    with keras.device("cpu:0"):
        first, again, beside = (_outputs_of(encoder, rows, padding_id) for rows in (alone, alone, both))
        longer = first if alone is padded else _outputs_of(encoder, padded, padding_id)
    for name, expected in first.items():
        same_part = tuple(slice(size) for size in expected.shape)
        error = _relative_difference(again[name], expected)
        if not error <= tolerance:
            raise ValueError(
                "`model` must give the same answer every time. Received: output "
                f"'{name}' that differs by {error:.1e} between two calls"
            )
        error = _relative_difference(longer[name][same_part], expected)
        if not error <= tolerance:
            raise ValueError(
                f"`model` must ignore padding, the id {padding_id}, or rows of different lengths could not share a "
                "batch: mask it (`TokenEmbedding(padding_id=...)`, `keras.layers.Embedding(mask_zero=True)`, an input "
                f"'padding_mask'), or give the `keras.Input` of the ids its fixed length. Received: output '{name}' "
                f"that differs by {error:.1e} between {len(ids)} tokens alone and padded to {length}"
            )
        if encoder.half_dtype and not expected.dtype.is_floating:
            continue  # rounding may choose another class, and rounds differently in a larger batch
        error = _relative_difference(beside[name][same_part], expected)
        if not error <= tolerance:
            raise ValueError(
                "`model` must answer each row by itself, without the other rows of the batch, since a server puts "
                f"requests together. Received: output '{name}' that differs by {error:.1e} between a row alone and "
                "the same row beside another one"
            )


def _other_row(row: np.ndarray, padding_id: int) -> np.ndarray:
    """A row of the same length with another number of each token: the second one is in most places.

    It has no token that `row` lacks, which the model might not take, and ends as `row` does.
    """
    places, other = np.flatnonzero(row != padding_id), row.copy()
    other[places[1:-1]] = row[places[1:2]]
    if np.array_equal(other, row):
        other[places] = row[places[:1]]
    return other


def _relative_difference(got: Tensor, expected: Tensor) -> float:
    """The largest difference of two outputs, relative to the largest expected number if that is over 1."""
    got, expected = (np.asarray(x).astype("float64") for x in (got, expected))
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    scale = max(1.0, float(np.max(np.abs(expected[np.isfinite(expected)]), initial=0)))
    with np.errstate(invalid="ignore"):  # inf - inf, where both are equal
        return float(np.max(np.abs(np.where(same, 0, got - expected)), initial=0)) / scale


def _outputs_of(encoder: TextEncoder, rows: np.ndarray, padding_id: int) -> dict[str, Tensor]:
    try:
        return encoder(tf.constant(rows), padding_id=padding_id)
    except Exception as error:  # a layer may raise any error
        raise ValueError(
            "`model` must take rows as long as `tokenizer` makes them, and any number of them; give the tokenizer a "
            f"`max_length`. Received: ids of shape {rows.shape}, on which the model fails: {one_line(error)}"
        ) from error

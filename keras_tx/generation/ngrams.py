"""Drafts by look-up of n-grams: ids (R, L) -> the tokens that followed the last ones before, (R, K).

R rows, L slots, N the longest n-gram, K draft tokens. Prompt lookup decoding: Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from keras import ops

from keras_tx.generation.state import argmax, as_int32, without_xla
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def look_up(ids: Tensor, real: Tensor, end: Tensor, last: Tensor, count: int) -> Tensor:
    """Finds where the last tokens of a row occurred before, and returns what followed there, (R, K).

    One of the last tokens may differ, so that a text that repeats another one is found again right after a changed
    token. Of several places it takes one where most of the last tokens are the same, the very last among them if
    possible, and the latest of these. What follows there is repeated if it is shorter than `count`, as in a text that
    repeats itself. Where no token is the same, the last token is repeated.

    Args:
        ids: (R, L), the tokens so far, which end at slot `end`.
        real: (R, L), True at tokens.
        end: the slot of the next token, a scalar.
        last: (R, N), the last tokens of each row; an id that differs from all others where the row has fewer.
        count: K.
    """
    slots, longest = ops.arange(ops.shape(ids)[1], dtype="int32"), last.shape[1]
    found = others = ops.zeros_like(ids)  # (R, L): how many of the tokens before a slot are the same, and are others
    rank = found
    for i in range(1, longest + 1):
        equal = ops.logical_and(real, ids == last[:, longest - i : longest - i + 1])
        is_same = ops.cast(ops.pad(equal[:, :-i], ((0, 0), (i, 0))), "int32")
        found, others = found + ops.where(others < 2, is_same, 0), others + 1 - is_same
        rank = is_same if i == 1 else rank
    rank = (2 * found + rank) * ops.shape(ids)[1] + slots
    place = as_int32(argmax(ops.where(slots < end, rank, 0)))[:, None]  # (R, 1)
    period = ops.maximum(end - place, 1)
    return _pick(ids, place + ops.arange(count, dtype="int32") % period)


def _pick(x: Tensor, indices: Tensor) -> Tensor:
    """x (R, L), indices (R, K) -> (R, K)."""
    return tf.gather(x, indices, batch_dims=1) if without_xla() else ops.take_along_axis(x, indices, axis=1)

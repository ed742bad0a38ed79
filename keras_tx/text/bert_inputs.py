"""Ragged ids -> BERT's inputs: (B, A) and (B, P) ids -> [CLS] A [SEP] P [SEP] [PAD]..., (B, T).

Devlin et al. 2018, arXiv:1810.04805, figure 2.
"""

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def build_inputs(
    first: Tensor, second: Tensor | None, cls_id: int, sep_id: int, pad_id: int, max_length: int, length: int | None
) -> dict[str, Tensor]:
    """Truncates to `max_length`, adds the special tokens and pads.

    Of a pair, the longer text is truncated first, then both to the same length. If the number of tokens is odd, the
    longer text keeps one more, or the second one if they are equally long.

    Args:
        first: ragged int32 (B, A).
        second: ragged int32 (B, P) or None.
        cls_id, sep_id, pad_id: the ids of the special tokens.
        max_length: the largest number of tokens in a row, special tokens included.
        length: T, or None for that of the longest row.

    Returns:
        "token_ids" and "segment_ids" (0 up to the first [SEP] and for padding tokens, 1 for the second text), both
        int32 (B, T).
    """
    a = first.row_lengths()  # (B,)
    if second is None:
        kept = tf.minimum(a, max_length - 2)
        parts = [cls_id, _first_values(first, kept), sep_id]
        total = kept + 2
    else:
        b, room = second.row_lengths(), tf.constant(max_length - 3, a.dtype)
        kept = tf.minimum(a, tf.maximum(room - b, (room + tf.cast(a > b, a.dtype)) // 2))
        kept_second = tf.minimum(b, tf.maximum(room - a, (room + tf.cast(a <= b, a.dtype)) // 2))
        parts = [cls_id, _first_values(first, kept), sep_id, _first_values(second, kept_second), sep_id]
        total = kept + kept_second + 3
    columns = [tf.fill([first.nrows(), 1], part) if isinstance(part, int) else part for part in parts]
    token_ids = tf.concat(columns, axis=1).to_tensor(pad_id, shape=[None, length])  # (B, T)
    position = tf.range(tf.shape(token_ids, a.dtype)[1])
    is_second = (position >= kept[:, None] + 2) & (position < total[:, None])
    return {"token_ids": token_ids, "segment_ids": tf.cast(is_second, "int32")}


def _first_values(ragged: Tensor, lengths: Tensor) -> Tensor:
    """The first `lengths[i]` values of row i."""
    starts = ragged.row_starts()
    return tf.gather(ragged.values, tf.ragged.range(starts, starts + lengths))

"""Ids -> text: ragged (B, None) -> (B,) strings.

Pieces come from a table and are joined as `tokenizers` joins WordPieces. No detokenizer op: tensorflow-text's ends the
process at an id outside the vocabulary.
"""

from collections.abc import Sequence

from keras_tx.optional import Lazy
from keras_tx.text.vocabulary import PREFIX

tf = Lazy("tensorflow")

# How a piece is tidied when it is joined, in this order.
TIDY = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
TIDY += [(" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]


def build_pieces(vocabulary: list[str], tidy: bool):
    """Two string tensors (V,): what a token is at the beginning, and what it adds after another, tidied or not."""
    with tf.init_scope():
        return tf.constant(vocabulary), tf.constant([_joined(token, tidy) for token in vocabulary])


def join(ids, first_pieces, next_pieces, skipped: Sequence[int]):
    """Joins rows of ids to texts.

    Args:
        ids: ragged int32 (B, None), within the vocabulary.
        first_pieces: string tensor (V,), what a token is at the beginning.
        next_pieces: string tensor (V,), what it adds after another.
        skipped: ids that are left out.

    Returns:
        String tensor (B,).
    """
    if skipped:
        kept = tf.reduce_all(ids.values[:, None] != tf.constant(skipped, ids.dtype), axis=-1)
        ids = tf.ragged.boolean_mask(ids, ids.with_values(kept))
    pieces = tf.concat([tf.gather(first_pieces, ids[:, :1]), tf.gather(next_pieces, ids[:, 1:])], axis=1)
    return tf.strings.reduce_join(pieces, axis=-1)


def _joined(token: str, tidy: bool) -> str:
    """What a token adds to the text before it: "##ing" -> "ing", "dog" -> " dog", and, if tidy, "." -> "."."""
    piece = token.removeprefix(PREFIX) if token.startswith(PREFIX) else " " + token
    for untidy, joined in TIDY if tidy else ():
        piece = piece.replace(untidy, joined)
    return piece

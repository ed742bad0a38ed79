"""BERT's ids -> texts: ragged (B, None) -> (B,) strings.

The pieces are read from a table and joined as `tokenizers` joins WordPieces. The detokenizer op of tensorflow-text is
not used because an id outside the vocabulary ends the process there.
"""

from collections.abc import Sequence

from keras_tx.optional import Lazy
from keras_tx.text.vocabulary import PREFIX
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# What `clean_up_tokenization_spaces` replaces in a piece, in this order, as in transformers.
CLEAN_UP = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
CLEAN_UP += [(" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]


def build_pieces(vocabulary: list[str], clean_up: bool) -> tuple[Tensor, Tensor]:
    """Builds two string tensors (V,): the text of each token at the beginning of a text, and after another token."""
    with tf.init_scope():
        return tf.constant(vocabulary), tf.constant([_next_piece(token, clean_up) for token in vocabulary])


def join_pieces(ids: Tensor, first_pieces: Tensor, next_pieces: Tensor, skipped: Sequence[int]) -> Tensor:
    """Joins rows of ids to texts.

    Args:
        ids: ragged int32 (B, None), within the vocabulary.
        first_pieces: string tensor (V,), the text of each token at the beginning of a text.
        next_pieces: string tensor (V,), the text of each token after another token.
        skipped: ids that are left out.

    Returns:
        String tensor (B,).
    """
    if skipped:
        kept = tf.reduce_all(ids.values[:, None] != tf.constant(skipped, ids.dtype), axis=-1)
        ids = tf.ragged.boolean_mask(ids, ids.with_values(kept))
    pieces = tf.concat([tf.gather(first_pieces, ids[:, :1]), tf.gather(next_pieces, ids[:, 1:])], axis=1)
    return tf.strings.reduce_join(pieces, axis=-1)


def _next_piece(token: str, clean_up: bool) -> str:
    """The text of a token after another token: "##ing" -> "ing", "dog" -> " dog", and with `clean_up` "." -> "."."""
    piece = token.removeprefix(PREFIX) if token.startswith(PREFIX) else " " + token
    for spaced, joined in CLEAN_UP if clean_up else ():
        piece = piece.replace(spaced, joined)
    return piece

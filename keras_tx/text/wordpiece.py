"""WordPiece: ragged words (B, None) -> ragged ids (B, None), the longest piece first.

Song et al. 2021, arXiv:2012.15524 (WordPiece in linear time).
"""

from typing import Any

from keras_tx.optional import Lazy
from keras_tx.text.vocabulary import MAX_CHARACTERS, PREFIX
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
tf_text = Lazy("tensorflow_text", extra="text")


def build_wordpiece(vocabulary: list[str], unknown_token: str) -> Any:
    """Builds the op with its model as an eager constant, so that all graphs can use it and exports contain it."""
    with tf.init_scope():
        return tf_text.FastWordpieceTokenizer(
            vocabulary,
            suffix_indicator=PREFIX,
            max_bytes_per_word=4 * MAX_CHARACTERS,
            unknown_token=unknown_token,
            token_out_type=tf.int32,
            no_pretokenization=True,
        )


def replace_long_words(words: Tensor, unknown_token: str) -> Tensor:
    """Replaces words of more than `MAX_CHARACTERS` by `unknown_token`: ragged (B, words) -> ragged (B, words)."""
    too_long = tf.strings.length(words.values, unit="UTF8_CHAR") > MAX_CHARACTERS
    return words.with_values(tf.where(too_long, unknown_token, words.values))

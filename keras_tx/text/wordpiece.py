"""Words -> ids: ragged (B, words) strings -> ragged (B, None) ids, the longest piece first.

Song et al. 2021, arXiv:2012.15524 (in linear time).
"""

from keras_tx.optional import Lazy
from keras_tx.text.vocabulary import PREFIX

tf = Lazy("tensorflow")
tf_text = Lazy("tensorflow_text", extra="text")

MAX_CHARACTERS = 100  # of a word; longer ones are unknown


def build_wordpiece(vocabulary: list[str], unknown_token: str):
    """The op's model: an eager constant, whichever graph asks first, that an export bakes into its graph."""
    with tf.init_scope():
        return tf_text.FastWordpieceTokenizer(
            vocabulary,
            suffix_indicator=PREFIX,
            max_bytes_per_word=4 * MAX_CHARACTERS,
            unknown_token=unknown_token,
            token_out_type=tf.int32,
            no_pretokenization=True,
        )


def short_words(words, unknown_token: str):
    """Ragged words (B, words) with `unknown_token` in the place of those that are too long."""
    too_long = tf.strings.length(words.values, unit="UTF8_CHAR") > MAX_CHARACTERS
    return words.with_values(tf.where(too_long, unknown_token, words.values))

"""Words -> ids by other pieces than the longest, drawn at random: a text is learned in several spellings.

MaxMatch-Dropout, Hiraoka 2022, arXiv:2209.04126. N words, U different rests of words, L the longest piece's characters.
"""

from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import StringIndex
from keras_tx.text.vocabulary import PREFIX

tf = Lazy("tensorflow")


class MaxMatchDropout:
    """WordPiece whose matches are dropped at random, but never the shortest, so that a shorter one is taken.

    Args:
        vocabulary: tokens in the order of their ids, special ones as `words` have them.
        plain: words (N,) -> ragged ids (N, None) without dropout, of words that cannot be spelled piece by piece.
    """

    def __init__(self, vocabulary: list[str], plain):
        pieces = {token: i for i, token in enumerate(vocabulary)}
        first = {token: i for token, i in pieces.items() if not token.startswith(PREFIX)}
        inside = {token.removeprefix(PREFIX): i for token, i in pieces.items() if token.startswith(PREFIX)}
        inside.pop("", None)
        self._first, self._next = StringIndex(first), StringIndex(inside) if inside else None
        self._longest = max(map(len, [*first, *inside]))
        self._plain = plain

    def word_ids(self, words, dropout: float, seed):
        """String tensor (N,), no empty one -> ragged int32 ids (N, None).

        Args:
            words: the words.
            dropout: how likely a match is dropped, in [0, 1).
            seed: integers (2,); the same seed draws the same.
        """
        count = tf.size(words, out_type=tf.int64)
        nothing = tf.zeros([0], "int32"), tf.zeros([0], "int64")
        state = self._match(self._first, dropout, seed, 0, words, tf.range(count), *nothing, tf.fill([count], False))
        if self._next is not None:
            state = tf.while_loop(
                lambda step, rests, *_: tf.size(rests) > 0,
                lambda *state: self._match(self._next, dropout, seed, *state),
                state,
                shape_invariants=(tf.TensorShape([]), *[tf.TensorShape([None])] * 5),
            )
        _, _, left, ids, place, failed = state
        failed = tf.tensor_scatter_nd_update(failed, left[:, None], tf.ones_like(left, "bool"))
        spelled = ~tf.gather(failed, place)
        others = tf.where(failed)[:, 0]
        plain = self._plain(tf.gather(words, others))
        ids = tf.concat([tf.boolean_mask(ids, spelled), plain.values], 0)
        place = tf.concat([tf.boolean_mask(place, spelled), tf.gather(others, plain.value_rowids())], 0)
        order = tf.argsort(place, stable=True)
        ids, place = tf.gather(ids, order), tf.gather(place, order)
        return tf.RaggedTensor.from_value_rowids(ids, place, nrows=count, validate=False)

    def _match(self, index, dropout, seed, step, rests, owners, ids, places, failed):
        """Takes one piece off each of `rests` (N,), whose words are `owners` (N,)."""
        lengths = tf.range(1, self._longest + 1)
        different, which = tf.unique(rests)
        sizes = tf.strings.length(different, unit="UTF8_CHAR")
        found = self._matches(index, different, sizes, lengths)
        found, sizes = tf.gather(found, which), tf.gather(sizes, which)
        matches = found >= 0
        seed = tf.random.experimental.stateless_fold_in(seed, step)
        kept = tf.random.stateless_uniform(tf.shape(found), seed) >= dropout
        shortest = lengths == 1 + tf.argmax(matches, axis=1, output_type="int32")[:, None]
        taken = tf.reduce_max(tf.where(matches & (kept | shortest), lengths, 0), axis=1)
        spelled = taken > 0
        dead = tf.boolean_mask(owners, ~spelled)
        failed = tf.tensor_scatter_nd_update(failed, dead[:, None], tf.ones_like(dead, "bool"))
        new = tf.gather(found, tf.maximum(taken - 1, 0), batch_dims=1)
        ids = tf.concat([ids, tf.boolean_mask(new, spelled)], 0)
        places = tf.concat([places, tf.boolean_mask(owners, spelled)], 0)
        goes_on = spelled & (taken < sizes)
        rests = tf.strings.substr(rests, taken, sizes - taken, unit="UTF8_CHAR")
        return step + 1, tf.boolean_mask(rests, goes_on), tf.boolean_mask(owners, goes_on), ids, places, failed

    def _matches(self, index, rests, sizes, lengths):
        """Strings (U,) -> int32 (U, L): the id of the piece that the first characters are, or -1."""
        starts = tf.zeros_like(lengths)[None] + tf.zeros_like(sizes)[:, None]
        pieces = tf.strings.substr(rests[:, None], starts, starts + lengths, unit="UTF8_CHAR")
        found = tf.reshape(index.find(tf.reshape(pieces, [-1])), tf.shape(pieces))
        return tf.where(lengths <= sizes[:, None], found, -1)

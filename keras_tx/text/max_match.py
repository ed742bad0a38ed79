"""MaxMatch-Dropout: splits words into randomly shorter pieces, so that a model sees a word split in several ways.

N words, U distinct rests of words (the parts that are not split yet), L characters of the longest piece.
MaxMatch-Dropout, Hiraoka 2022, arXiv:2209.04126.
"""

from collections.abc import Callable
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import StringIndex
from keras_tx.text.vocabulary import PREFIX
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


class MaxMatchDropout:
    """WordPiece that randomly drops matching pieces in favour of a shorter one. The shortest is never dropped.

    Args:
        vocabulary: the tokens in the order of their ids, with placeholders for special tokens as in the words.
        without_dropout: a function from words (N,) to ragged ids (N, None), for words that cannot be completed after a
            drop.
    """

    def __init__(self, vocabulary: list[str], without_dropout: Callable[[Tensor], Tensor]) -> None:
        id_of = {token: i for i, token in enumerate(vocabulary)}
        first = {token: i for token, i in id_of.items() if not token.startswith(PREFIX)}
        inside = {token.removeprefix(PREFIX): i for token, i in id_of.items() if token.startswith(PREFIX)}
        inside.pop("", None)
        self._first, self._next = StringIndex(first), StringIndex(inside) if inside else None
        self._longest = max(map(len, [*first, *inside]))
        self._without_dropout = without_dropout

    def word_ids(self, words: Tensor, dropout: float, seed: Tensor) -> Tensor:
        """Splits words into randomly drawn pieces.

        Args:
            words: string tensor (N,) without empty strings.
            dropout: the probability that a match is dropped, in [0, 1).
            seed: integers (2,); the same seed draws the same pieces.

        Returns:
            Ragged int32 (N, None).
        """
        count = tf.size(words, out_type=tf.int64)
        no_ids, no_places = tf.zeros([0], "int32"), tf.zeros([0], "int64")
        start = 0, words, tf.range(count), no_ids, no_places, tf.fill([count], False)
        state = self._take_pieces(self._first, dropout, seed, *start)
        index = self._next
        if index is not None:
            state = tf.while_loop(
                lambda step, rests, *_: tf.size(rests) > 0,
                lambda *state: self._take_pieces(index, dropout, seed, *state),
                state,
                shape_invariants=(tf.TensorShape([]), *[tf.TensorShape([None])] * 5),
            )
        _, _, left, ids, place, failed = state
        failed = tf.tensor_scatter_nd_update(failed, left[:, None], tf.ones_like(left, "bool"))
        spelled = ~tf.gather(failed, place)
        others = tf.where(failed)[:, 0]
        found = self._without_dropout(tf.gather(words, others))
        ids = tf.concat([tf.boolean_mask(ids, spelled), found.values], 0)
        place = tf.concat([tf.boolean_mask(place, spelled), tf.gather(others, found.value_rowids())], 0)
        order = tf.argsort(place, stable=True)
        ids, place = tf.gather(ids, order), tf.gather(place, order)
        return tf.RaggedTensor.from_value_rowids(ids, place, nrows=count, validate=False)

    def _take_pieces(
        self,
        index: StringIndex,
        dropout: float,
        seed: Tensor,
        step: Any,
        rests: Tensor,
        owners: Tensor,
        ids: Tensor,
        places: Tensor,
        failed: Tensor,
    ) -> tuple[Any, ...]:
        """Takes one piece off the beginning of each rest of a word.

        Args:
            index: the pieces.
            dropout, seed: as in `word_ids`.
            step: the number of pieces that were taken before; it varies the seed.
            rests: string tensor (N,).
            owners: int64 (N,), the numbers of the words.
            ids, places: the ids found so far, and the numbers of their words.
            failed: booleans (N,), True for words in which no piece matched somewhere.

        Returns:
            `step` and what follows, for the next piece.
        """
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
        unspelled = tf.boolean_mask(owners, ~spelled)
        failed = tf.tensor_scatter_nd_update(failed, unspelled[:, None], tf.ones_like(unspelled, "bool"))
        new = tf.gather(found, tf.maximum(taken - 1, 0), batch_dims=1)
        ids = tf.concat([ids, tf.boolean_mask(new, spelled)], 0)
        places = tf.concat([places, tf.boolean_mask(owners, spelled)], 0)
        continues = spelled & (taken < sizes)
        rests = tf.strings.substr(rests, taken, sizes - taken, unit="UTF8_CHAR")
        return step + 1, tf.boolean_mask(rests, continues), tf.boolean_mask(owners, continues), ids, places, failed

    def _matches(self, index: StringIndex, rests: Tensor, sizes: Tensor, lengths: Tensor) -> Tensor:
        """Strings (U,) of `sizes` -> int32 (U, L): the ids of their first 1, 2, ... L characters, or -1."""
        starts = tf.zeros_like(lengths)[None] + tf.zeros_like(sizes)[:, None]
        pieces = tf.strings.substr(rests[:, None], starts, starts + lengths, unit="UTF8_CHAR")
        found = tf.reshape(index.find(tf.reshape(pieces, [-1])), tf.shape(pieces))
        return tf.where(lengths <= sizes[:, None], found, -1)

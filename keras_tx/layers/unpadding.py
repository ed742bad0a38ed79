"""Tokens without the padding between them: (B, T, ...) -> (1, R, ...) and back. On TensorFlow.

B batch, T tokens, R real tokens of the batch. What a layer does to each token by itself it does to R tokens instead of
B * T; attention alone needs the rows. Zeng et al. 2022, arXiv:2208.08124.
"""

import keras
from keras import ops

from keras_tx.layers import xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def is_possible():
    """Whether a size may depend on values, as R does: on TensorFlow, and not in `generate`, which XLA compiles.

    Where someone else has it compiled by XLA, that makes all sizes as large as they can be.
    """
    return keras.backend.backend() == "tensorflow" and not xla.is_traced()


class Unpadding:
    """Where the real tokens of a batch stand.

    Args:
        mask: (B, T), True at real tokens.
        sizes: B and T, None where the graph does not know them.
        cut: whether the rows end where the longest of them does; else they keep their T tokens.
    """

    def __init__(self, mask, sizes, cut=False):
        mask = ops.cast(mask, "bool")
        self._whole = mask
        self._sizes = mask.shape.merge_with(sizes)
        self._indices = tf.where(mask)  # (R, 2)
        self.mask = mask  # of the rows
        if cut:
            ends = tf.where(mask, tf.range(1, tf.shape(mask)[1] + 1), 1)  # not 0, as a softmax over nothing is none
            self.mask = mask[:, : tf.reduce_max(ends)]
        self._row_sizes = self._sizes if not cut else self._sizes[:1].concatenate([None])

    def remove(self, x):
        """(B, T, ...), or rows that are cut, -> (1, R, ...): the real tokens."""
        sizes = tf.shape(x)[:2], x.shape[:2]

        def with_gradient(x):
            return self._gathered(x), lambda upstream: self._scattered(upstream, *sizes)

        return tf.custom_gradient(with_gradient)(x)  # TensorFlow would take more passes for it

    def rows(self, x):
        """(1, R, ...) -> (B, T, ...), T as that of `mask`; zeros at padding."""
        return self._restored(x, self.mask, self._row_sizes)

    def whole(self, x):
        """(1, R, ...) -> (B, T, ...), also what was cut; zeros at padding."""
        return self._restored(x, self._whole, self._sizes)

    def _restored(self, x, mask, sizes):
        def with_gradient(x):
            return self._scattered(x, tf.shape(mask), sizes), self._gathered

        return tf.custom_gradient(with_gradient)(x)

    def _gathered(self, x):
        return tf.gather_nd(x, self._indices)[None]

    def _scattered(self, x, sizes, static_sizes):
        shape = tf.concat([sizes, x.shape[2:]], axis=0)
        x = tf.scatter_nd(self._indices, x[0], tf.cast(shape, "int64"))
        x.set_shape((*static_sizes, *x.shape[2:]))
        return x

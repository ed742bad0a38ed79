"""Removes the padding tokens of a batch and puts them back: (B, T, ...) <-> (1, R, ...). On TensorFlow.

B batch, T tokens, R real tokens of the whole batch. Norms, projections and feed-forward networks process each token
separately. So they can process R tokens instead of B * T, and only attention needs rows. Zeng et al. 2022,
arXiv:2208.08124.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
from keras import ops

from keras_tx.internals.tensorflow_graphs import traces_for_xla
from keras_tx.layers import exported_weights, xla
from keras_tx.layers.attention.parts import Parts, can_attend_in_parts
from keras_tx.layers.gradients import custom_gradient
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_unread: ContextVar[bool] = ContextVar("keras_tx_padding_unread", default=False)


@contextmanager
def padding_unread(unread: bool) -> Iterator[None]:
    """Within this context nothing reads the outputs of an encoder at padding tokens, if `unread` is True.

    Models that contain an encoder say so when they are called. It is what `skip_padding=None` needs to skip padding.
    """
    token = _unread.set(unread)
    try:
        yield
    finally:
        _unread.reset(token)


def is_worthwhile() -> bool:
    """Whether `skip_padding=None` skips padding: nothing reads it, on TensorFlow with only CPUs, and without XLA."""
    if not (_unread.get() and is_possible()) or traces_for_xla():
        return False
    return xla.has_only_cpus()


def is_possible() -> bool:
    """Whether padding can be removed: on TensorFlow, but not in `generate` compiled by XLA, which needs a static R.

    In a user's own function that XLA compiles it can, but R is then B * T.
    """
    return keras.backend.backend() == "tensorflow" and not xla.is_traced()


class Unpadding:
    """Where the real tokens of a batch are.

    Args:
        mask: (B, T), True at real tokens.
        inputs: (B, T, ...), what the mask is for.
        cut: whether `rows` are cut after the last real token of the longest row, instead of having T tokens.
        layers: the attention layers that may compute attention in `Parts`.

    Attributes:
        mask: the mask of `rows`: (B, T), or shorter with `cut`.

    In an export R is at least `exported_weights.FEW_ROWS`, unless the batch is empty: if there are fewer real tokens,
    copies of the first place of the first row follow them. So no product has fewer rows, and none has to add some.
    """

    def __init__(self, mask: Tensor, inputs: Tensor, cut: bool = False, layers: Sequence[Any] = ()) -> None:
        mask = _of_size(ops.cast(mask, "bool"), inputs)
        self._whole_mask = mask
        self._whole_sizes = mask.shape.merge_with(inputs.shape[:2])
        self._indices = tf.where(mask)  # (R, 2)
        self._count: Tensor = None  # the number of real tokens, if copies may follow them
        if exported_weights.current() is not None:
            self._count = tf.shape(self._indices)[0]
            missing = tf.where(tf.size(mask) > 0, tf.maximum(exported_weights.FEW_ROWS - self._count, 0), 0)
            self._indices = tf.pad(self._indices, [[0, missing], [0, 0]])
        self.mask = mask
        self._row_sizes = self._whole_sizes
        if cut:
            ends = tf.where(mask, tf.range(1, tf.shape(mask)[1] + 1), 1)  # at least 1: a softmax needs a key
            self.mask = mask[:, : tf.reduce_max(ends)]
            self._row_sizes = self._whole_sizes[:1].concatenate([None])
        self._parts = {
            heads: Parts(mask, *heads, self._whole_sizes[1], num_rows=tf.shape(self._indices)[0])
            for heads in {_heads_of(layer) for layer in layers}
        }

    def parts_of(self, layer: Any, training: bool | None) -> Parts | None:
        """How the attention of a `MultiHeadAttention` is divided into parts; None if it needs `rows`."""
        return self._parts.get(_heads_of(layer)) if can_attend_in_parts(layer, training) else None

    def remove(self, x: Tensor) -> Tensor:
        """(B, T, ...), or shorter rows, -> (1, R, ...): the real tokens."""

        def with_gradient(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            return self._gathered(x), lambda upstream: self._scattered(upstream, _two_sizes(x), x.shape[:2])

        # It is cheaper than TensorFlow's own gradient of `gather_nd`.
        made: Tensor = custom_gradient(with_gradient)(x)
        return made

    def rows(self, *tensors: Tensor) -> list[Tensor]:
        """Each (1, R, ...) -> rows with the length of `mask`, zeros at padding tokens."""
        return self._restored(tensors, self.mask, self._row_sizes)

    def whole(self, x: Tensor) -> Tensor:
        """(1, R, ...) -> (B, T, ...), also with `cut`; zeros at padding tokens."""
        return self._restored([x], self._whole_mask, self._whole_sizes)[0]

    def _restored(self, tensors: Sequence[Tensor], mask: Tensor, static_sizes: Any) -> list[Tensor]:
        def with_gradient(*tensors: Tensor) -> tuple[list[Tensor], Callable[..., list[Tensor]]]:
            sizes = _two_sizes(mask)
            restored = [self._scattered(x, sizes, static_sizes) for x in tensors]
            return restored, lambda *upstream: [self._gathered(x) for x in upstream]

        made: list[Tensor] = custom_gradient(with_gradient)(*tensors)
        return made

    def _gathered(self, x: Tensor) -> Tensor:
        return tf.expand_dims(tf.gather_nd(x, self._indices), 0)

    def _scattered(self, x: Tensor, sizes: Tensor, static_sizes: Any) -> Tensor:
        shape = tf.concat([sizes, x.shape[2:]], axis=0)
        indices, rows = self._indices, tf.squeeze(x, 0)
        if self._count is not None:
            indices, rows = indices[: self._count], rows[: self._count]
        x = tf.scatter_nd(indices, rows, shape)
        x.set_shape((*static_sizes, *x.shape[2:]))
        return x


def _of_size(mask: Tensor, inputs: Tensor) -> Tensor:
    """`mask`, which must have a number for each token; a shorter one would take tokens or rows away."""
    is_known = None not in (*mask.shape, *inputs.shape[:2])
    if is_known or exported_weights.current() is not None:  # exports make the mask themselves
        return mask
    rule = "`mask` must have the shape (B, T) of `inputs`"
    with tf.control_dependencies([tf.debugging.assert_equal(tf.shape(mask), tf.shape(inputs)[:2], message=rule)]):
        return tf.identity(mask)


def _two_sizes(x: Tensor) -> Tensor:
    """The sizes of the first two axes."""
    sizes = tf.shape(x, out_type="int64")
    return sizes if len(x.shape) == 2 else sizes[:2]


def _heads_of(layer: Any) -> tuple[int, int]:
    return layer.num_heads, layer.num_key_value_heads

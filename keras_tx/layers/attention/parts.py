"""Attention within each text of a batch without padding: (1, R, N, H), (1, R, K, H), (1, R, K, V) -> (1, R, N, V).

B batch, R real tokens of the whole batch, N query heads, K key heads, G = N/K, H head, V value head; X = B * K pairs of
a text and a key head, L tokens. On TensorFlow. The pairs are sorted by the length of their texts and divided into parts
of equally many. Each part is as long as its longest text, and its scores are small enough to stay in the processor's
cache. A gather puts the tokens of a part in order, which takes no more time than to transpose them. Sorting by length:
Fang et al. 2021, arXiv:2010.05680.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from keras_tx.layers import exported_weights
from keras_tx.layers.attention.dense import product_without_onednn, softmax_without_onednn
from keras_tx.layers.gradients import custom_gradient
from keras_tx.layers.masks import MASKED
from keras_tx.layers.precision import wide_dtype
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# The number of parts by the least length of rows. More parts make long scores fit a processor's cache, but each takes
# the time to start its operations.
_PARTS_FROM = {512: 8, 128: 4, 0: 1}
_MOST_FEW = 24  # tokens for which oneDNN is slower than TensorFlow's own operations


class Parts:
    """Where each real token stands in the parts, and back. Used for all layers with the same numbers of heads.

    Args:
        mask: (B, T), True at real tokens.
        heads, key_heads: N and K.
        length: T, or None if the graph does not know it.
        num_rows: how many tokens queries, keys and values have: R, or more if copies of some token follow the real
            ones. What these get is not defined.
    """

    def __init__(self, mask: Tensor, heads: int, key_heads: int, length: int | None, num_rows: Tensor) -> None:
        self.are_few = num_rows <= _MOST_FEW
        groups = heads // key_heads
        lengths = tf.reduce_sum(tf.cast(mask, "int32"), axis=1)
        starts = tf.cumsum(lengths, exclusive=True)
        by_length = tf.argsort(lengths)
        pairs = tf.reshape(by_length[:, None] * key_heads + tf.range(key_heads), (-1,))  # (X,)
        num_pairs = tf.shape(pairs)[0]
        self.masks, self.queries, self.keys, bases, longest = [], [], [], [], []
        base: Any = 0
        num_copies = num_rows - tf.reduce_sum(lengths)
        least = tf.minimum(num_copies, 1)  # they need a place, too
        count = _num_parts(length)
        for index in range(count):
            part = pairs if count == 1 else pairs[num_pairs * index // count : num_pairs * (index + 1) // count]
            text, head = part // key_heads, tf.expand_dims(part % key_heads, 1)
            real, size = tf.gather(lengths, text), tf.shape(part)[0]
            most = tf.maximum(tf.reduce_max(real), least)
            place, real = tf.range(most), tf.expand_dims(real, 1)
            # Padding is filled up with the last token of the text itself, so that a NaN stays in its text.
            token = tf.maximum(tf.expand_dims(tf.gather(starts, text), 1) + tf.minimum(place, real - 1), 0)
            self.masks.append(tf.expand_dims(tf.where(place < real, 0.0, MASKED), 1))  # (X, 1, L)
            self.keys.append(token * key_heads + head)  # (X, L)
            query = tf.expand_dims(token, 1) * heads + tf.expand_dims(head * groups + tf.range(groups), 2)
            self.queries.append(tf.reshape(query, (size, groups * most)))
            bases.append(base + tf.range(size) * most)
            longest.append(tf.repeat(most, size))
            base += size * most
        # Of each text and key head: the first place of its keys in all parts, and the length of its part.
        of_pairs = tf.scatter_nd(
            pairs[:, None], tf.stack([tf.concat(bases, 0), tf.concat(longest, 0)], 1), (num_pairs, 2)
        )
        text = tf.repeat(tf.range(tf.shape(lengths)[0]), lengths)
        positions = tf.range(tf.shape(text)[0]) - tf.gather(starts, text)  # (R,)
        of_tokens = tf.gather(tf.reshape(of_pairs, (-1, key_heads, 2)), text)  # (R, K, 2)
        places = (of_tokens[..., 0] * groups + positions[:, None])[..., None]
        places += of_tokens[..., 1:] * tf.range(groups)
        copies = [[0, num_copies]]
        self.positions = tf.pad(positions, copies)
        self._places_of_keys = tf.pad(of_tokens[..., 0] + positions[:, None], [*copies, [0, 0]])  # (R, K)
        self._places_of_queries = tf.pad(tf.reshape(places, (-1, heads)), [*copies, [0, 0]])  # (R, N)

    def cut(self, x: Tensor, indices: Sequence[Tensor]) -> list[Tensor]:
        """(1, R, N, H) -> (X, G * L, H) for each part; keys and values (1, R, K, H) -> (X, L, H)."""
        places = self._places_of_queries if indices is self.queries else self._places_of_keys

        def with_gradient(x: Tensor) -> tuple[list[Tensor], Callable[..., Tensor]]:
            def gradient(*upstream: Tensor) -> Tensor:
                return tf.reshape(tf.gather(_flat(upstream), places), tf.shape(x))

            rows = tf.reshape(x, (-1, x.shape[3]))
            return [tf.gather(rows, one) for one in indices], gradient

        made: list[Tensor] = custom_gradient(with_gradient)(x)
        return made

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """(X, G * L, V) for each part -> (1, R, N, V)."""
        size, places = parts[0].shape[-1], self._places_of_queries

        def with_gradient(*parts: Tensor) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
            def gradient(upstream: Tensor) -> list[Tensor]:
                shapes = [tf.shape(part) for part in parts]
                counts = [shape[0] * shape[1] for shape in shapes]
                upstream = tf.reshape(upstream, (-1, size))
                flat = tf.scatter_nd(tf.reshape(places, (-1, 1)), upstream, tf.stack([sum(counts), size]))
                return [tf.reshape(x, shape) for x, shape in zip(tf.split(flat, counts), shapes, strict=True)]

            return tf.expand_dims(tf.gather(_flat(parts), places), 0), gradient

        made: Tensor = custom_gradient(with_gradient)(*parts)
        return made


def _num_parts(length: int | None) -> int:
    return 1 if length is None else next(count for least, count in _PARTS_FROM.items() if length >= least)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """(X, L, H) for each part -> (all tokens, H)."""
    return tf.concat([tf.reshape(part, (-1, part.shape[-1])) for part in parts], axis=0)


def attend_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Parts,
    *,
    scale: float | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """`attend` of each real token to all real tokens of its text. Returns only the output.

    Args:
        query, key, value: (1, R, N, H), (1, R, K, H), (1, R, K, V), the real tokens of all texts.
        parts: how to divide them.
        scale: the factor applied to the dot products; 1 / sqrt(H) if None.
        dropout: a function applied to the scores before they are multiplied with the values.
    """
    dtype = wide_dtype(query, key, value)
    query = tf.cast(query, dtype) * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    outputs = []
    for queries, keys, values, mask in zip(
        parts.cut(query, parts.queries),
        parts.cut(tf.cast(key, dtype), parts.keys),
        parts.cut(value, parts.keys),
        parts.masks,
        strict=True,
    ):
        given = queries, keys, values, tf.cast(mask, dtype)
        if exported_weights.current() is None:
            outputs.append(_attend(*given, dropout))
        else:
            outputs.append(
                tf.cond(parts.are_few, lambda given=given: _attend_few(*given), lambda given=given: _attend(*given))
            )
    return parts.joined(outputs)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, dropout: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    scores = tf.nn.softmax(tf.matmul(queries, keys, transpose_b=True) + mask)
    return tf.matmul(tf.cast(scores if dropout is None else dropout(scores), values.dtype), values)


def _attend_few(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """`_attend` without oneDNN, which takes longer to start than to compute this for few tokens."""
    scores = softmax_without_onednn(product_without_onednn(queries, keys, adj_y=True) + mask)
    return product_without_onednn(tf.cast(scores, values.dtype), values)


def can_attend_in_parts(layer: Any, training: bool | None) -> bool:
    """Whether `layer`, a `MultiHeadAttention`, lets each token attend to its whole text, by a softmax."""
    is_hard = layer.hard_attention and not training
    return not (layer.sliding_window or layer.flash_attention or layer.blockwise or is_hard)

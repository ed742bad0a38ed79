"""The tensors of one attention, cut into blocks: (B, T, N, H) -> (I, X, P, H), (B, S, K, H) -> (J, X, block, H).

B batch, T queries, S keys, N query heads, K key heads, G = N/K, H head size, V size of a value head; X = B * K; I query
blocks, J key blocks; P = G * block, the queries of a block in all heads that share a key head; R = span * block, the
keys that are processed at once: those of one block, or of all blocks within the window of a query block.
"""

from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from keras_tx.layers import masks
from keras_tx.layers.dropout import HIGHEST_RATE, random_keep
from keras_tx.layers.extremes import largest, smallest
from keras_tx.layers.loops import at, corner, product
from keras_tx.layers.masks import Visible, label_range, padding_labels
from keras_tx.layers.precision import wide_dtype
from keras_tx.optional import Lazy
from keras_tx.types import DType, Tensor

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")

MAX_SPAN = 4  # the most key blocks that are processed at once
_SEED_MIXER = -1640531527  # 2^32 / golden ratio: neighbouring calls and blocks must not share seeds

Side = Literal["query", "key"]


class Blocks:
    """Queries, keys and values cut into blocks on a new first axis, and which pairs of blocks have to be computed.

    A pair of a query block and a key block is open if some query of the one may attend to some key of the other. Pairs
    that are not open are skipped. If the window of a query block covers only a few key blocks, these are processed at
    once; `span` is their number, otherwise 1.

    Args:
        query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, V).
        bias: in the dtype of the logits, broadcastable to (B, N, T, S), or None.
        visible: which keys each query may attend to.
        scale: the factor applied to the dot products.
        dropout: rate of dropout on the scores.
        seed: (2,) integers for dropout, or None.
        size: queries and keys of a block.

    Attributes:
        dtype: of logits, softmax and sums: float32, or float64 for such inputs.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        *,
        visible: Visible,
        scale: float,
        dropout: float,
        seed: Tensor | None,
        size: int,
    ) -> None:
        self.batch, self.num_queries = ops.shape(query)[:2]
        self.num_keys = ops.shape(key)[1]
        self.heads, self.key_heads = query.shape[2], key.shape[2]
        self.groups = self.heads // self.key_heads
        self.size, self.scale, self.dropout = size, scale, dropout
        self.seed = None if seed is None else ops.convert_to_tensor(seed)
        self.visible = visible
        self.num_query_blocks, self.num_key_blocks = (-(-n // size) for n in (self.num_queries, self.num_keys))
        self.span = 1 if bias is not None else _span(visible, size)
        if isinstance(self.num_key_blocks, int):
            self.span = min(self.span, self.num_key_blocks)
        else:
            self.num_key_blocks = ops.maximum(self.num_key_blocks, self.span)
        self.dtype = wide_dtype(query, key, value)
        self.query = ops.cast(self.cut(query, "query"), self.dtype) * scale
        self.key = ops.cast(self.cut(key, "key"), self.dtype)
        self.value = self.cut(value, "key")
        self.bias: Any = None if bias is None else self._fill_pairs(bias)
        self.mask: Any = None if visible.mask is None else self._fill_pairs(ops.cast(visible.mask, "bool"))
        self.labels = self._cut_labels()
        self.open = self._open_pairs()

    # Cutting and joining

    def _lengths(self, side: Side) -> tuple[Any, Any]:
        """The number of tokens and the number of blocks of a side."""
        if side == "query":
            return self.num_queries, self.num_query_blocks
        return self.num_keys, self.num_key_blocks

    def cut(self, x: Tensor, side: Side) -> Tensor:
        """(B, T, N, H) -> (I, X, P, H), the last block padded with zeros."""
        length, count = self._lengths(side)
        heads, features = x.shape[2:]
        x = _fill(x, 1, count * self.size - length)
        x = ops.reshape(x, (self.batch, count, self.size, self.key_heads, heads // self.key_heads, features))
        x = ops.transpose(x, (1, 0, 3, 4, 2, 5))
        return ops.reshape(x, (count, self.batch * self.key_heads, heads // self.key_heads * self.size, features))

    def join(self, x: Tensor, side: Side, dtype: DType) -> Tensor:
        """The inverse of `cut`: (I, X, P, H) -> (B, T, N, H)."""
        length, count = self._lengths(side)
        groups = self.groups if side == "query" else 1
        x = ops.reshape(x, (count, self.batch, self.key_heads, groups, self.size, x.shape[3]))
        x = ops.transpose(x, (1, 0, 4, 2, 3, 5))
        x = ops.reshape(x, (self.batch, count * self.size, self.key_heads * groups, x.shape[5]))
        return ops.cast(x[:, :length], dtype)

    def _fill_pairs(self, pairs: Tensor) -> Tensor:
        """Pads a mask or bias that broadcasts to (B, N, T, S) to full blocks; axes of size 1 stay."""
        sides: tuple[Side, Side] = ("query", "key")
        for axis, side in enumerate(sides, start=2):
            length, count = self._lengths(side)
            if pairs.shape[axis] != 1:
                pairs = _fill(pairs, axis, count * self.size - length)
        return pairs

    # Which pairs of blocks are open

    def _cut_labels(self) -> tuple[Tensor, Tensor] | None:
        """The `labels` of `visible`, (I, B, block) and (J, B, block), padded with the labels of padding; or None."""
        is_filled = not (isinstance(self.num_keys, int) and self.num_keys % self.size == 0)
        labels = self.visible.labels(self.batch, self.num_queries, self.num_keys, always=is_filled)
        if labels is None:
            return None
        padding = padding_labels(keras.backend.standardize_dtype(labels[0].dtype))
        return self._cut_side(labels[0], "query", padding[0]), self._cut_side(labels[1], "key", padding[1])

    def _cut_side(self, x: Tensor, side: Side, value: int) -> Tensor:
        """(B, T) -> (I, B, block), padded with `value`."""
        length, count = self._lengths(side)
        x = ops.reshape(_fill(x, 1, count * self.size - length, value), (self.batch, count, self.size))
        return ops.swapaxes(x, 0, 1)

    def _open_pairs(self) -> Tensor:
        """(I, J) booleans: which pairs of blocks have to be computed."""
        row = ops.arange(self.num_query_blocks, dtype="int32")[:, None, None] * self.size + self.visible.start
        column = ops.arange(self.num_key_blocks, dtype="int32")[None, :, None] * self.size
        labels = None
        if self.labels is not None:
            queries, keys = (label_range(x, axis=2) for x in self.labels)  # (I, B), (J, B)
            labels = (queries[0][:, None], queries[1][:, None]), (keys[0][None], keys[1][None])
        is_open = self.visible.blocks((row, row + self.size - 1), (column, column + self.size - 1), labels)
        if is_open is None:
            return ops.ones((self.num_query_blocks, self.num_key_blocks), dtype="bool")
        return ops.any(is_open, axis=2)  # open for at least one example of the batch

    def steps(self, count: Any) -> Any:
        """`count`, or 0 for a batch that turns out to have no rows: TensorFlow refuses to update an empty tensor."""
        return count if isinstance(self.batch, int) else ops.where(self.batch > 0, count, 0)

    def bounds(self, axis: int) -> tuple[Tensor, Tensor]:
        """For each block of the other side: the first open block along `axis`, and the last plus 1; 0 and 0 if none."""
        numbers = ops.arange(ops.shape(self.open)[axis], dtype="int32")
        numbers = numbers[:, None] if axis == 0 else numbers[None]
        count = ops.cast(ops.shape(self.open)[axis], "int32")
        end = largest(ops.where(self.open, numbers + 1, 0), 0, axis)
        begin = smallest(ops.where(self.open, numbers, count), np.iinfo("int32").max, axis)
        return ops.minimum(begin, end), end

    def key_bounds(self) -> tuple[Tensor, Tensor]:
        """The bounds (I,) of the loop over key blocks, for each query block. If `span` > 1, at most one iteration."""
        begin, end = self.bounds(1)
        if self.span > 1:
            is_open = ops.cast(end > begin, "int32")
            begin = ops.minimum(begin, ops.cast(self.num_key_blocks - self.span, "int32"))
            end = begin + is_open
        return begin, end

    # Values for query block i and the `span` key blocks from j on

    def keys_from(self, x: Tensor, j: Tensor) -> Tensor:
        """Blocks of keys (J, X, block, H) -> those from block j on, (X, R, H)."""
        if self.span == 1:
            return at(x, j)
        blocks = ops.swapaxes(ops.take(x, j + ops.arange(self.span, dtype="int32"), axis=0), 0, 1)
        return ops.reshape(blocks, (ops.shape(x)[1], self.span * self.size, *x.shape[3:]))

    def _mask_of(self, i: Tensor, j: Tensor) -> Any:
        """Mask that broadcasts to (B, N, block, R), True where a query may attend to a key. None: nothing is masked."""
        row = (i * self.size + ops.arange(self.size, dtype="int32"))[None, None, :, None] + self.visible.start
        column = (j * self.size + ops.arange(self.span * self.size, dtype="int32"))[None, None, None]
        labels = None
        if self.labels is not None:
            labels = at(self.labels[0], i)[:, None, :, None], self.keys_from(self.labels[1], j)[:, None, None]
        return masks.join(
            self.visible.pairs(row, column, labels),
            None if self.mask is None else self._pairs_of(self.mask, i, j),
            None if self.bias is None else masks.allowed_by_bias(self._pairs_of(self.bias, i, j)),
        )

    def _pairs_of(self, x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """The part of a mask or bias (B, N, T, S) for these blocks; T and S may be 1."""
        sides = list(zip(x.shape[2:], (i, j), (1, self.span), strict=True))
        starts = [0 if length == 1 else block * self.size for length, block, _ in sides]
        sizes = [1 if length == 1 else count * self.size for length, _, count in sides]
        return ops.slice(x, corner(0, 0, *starts), (*ops.shape(x)[:2], *sizes))

    def logits(self, i: Tensor, j: Tensor) -> Tensor:
        """The attention logits (X, P, R), `MASKED` where a query may not attend to a key."""
        logits = product(at(self.query, i), self.keys_from(self.key, j), transpose_b=True)
        mask = self._mask_of(i, j)
        if mask is None and self.bias is None:
            return logits
        shape = ops.shape(logits)
        logits = ops.reshape(logits, (self.batch, self.heads, self.size, self.span * self.size))
        if self.bias is not None:
            logits = logits + self._pairs_of(self.bias, i, j)
        return ops.reshape(logits if mask is None else masks.masked(logits, mask), shape)

    def dropout_factors(self, i: Tensor, j: Tensor) -> Tensor:
        """Factors (X, P, R) for the scores: 0 for dropped scores, 1 / (1 - rate) for all others."""
        shape = (self.batch * self.key_heads, self.groups * self.size, self.span * self.size)
        rate = min(self.dropout, HIGHEST_RATE)
        kept = _random_keep(shape, rate, self.seed, i * self.num_key_blocks + j)
        return ops.cast(kept, self.dtype) / (1 - rate)


def _span(visible: Visible, size: int) -> int:
    """The number of key blocks that a query block may attend to, if it is at most `MAX_SPAN`; otherwise 1."""
    behind, ahead = visible.reach
    if behind is None or ahead is None:
        return 1
    is_aligned = isinstance(visible.start, int) and visible.start % size == 0
    count = 1 + -(-behind // size) + -(-ahead // size) + (0 if is_aligned else 1)
    return count if count <= MAX_SPAN else 1


def _fill(x: Tensor, axis: int, count: Any, value: int = 0) -> Tensor:
    """Pads `x` along `axis` with `count` elements of this `value`."""
    if isinstance(count, int) and count == 0:
        return x
    shape = [*ops.shape(x)]
    shape[axis] = count
    more = ops.full(shape, value, dtype=x.dtype) if value else ops.zeros(shape, dtype=x.dtype)
    return ops.concatenate([x, more], axis=axis)


def _random_keep(shape: tuple[Any, ...], rate: float, seed: Tensor, index: Tensor) -> Tensor:
    """Booleans, each False with the probability `rate`; the same for the same `seed` (2,) and block `index`."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return random_keep(shape, rate, tf.cast(seed, "int32") + tf.stack([tf.cast(index, "int32") * _SEED_MIXER, 0]))
    if backend == "jax":
        return jax.random.uniform(jax.random.fold_in(seed, index), shape) >= rate
    first, second = (int(number) for number in seed)
    generator = torch.Generator(device=seed.device).manual_seed(hash((first, second, int(index))) % 2**63)
    return torch.rand(shape, generator=generator, device=seed.device) >= rate

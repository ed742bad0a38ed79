"""Attention block by block: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V), never all (T, S) scores at once.

B batch, T queries, S keys, N query heads, K key heads, G = N/K, H head, V value head; X = B * K; P queries of a block,
all G heads that read one key head counted; I query blocks, J key blocks; R keys that are taken at once: of a block, or
of all blocks that the window of a query block lies in.
Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; with a gradient that computes the scores again: Dao et
al. 2022, arXiv:2205.14135 (algorithms 2 and 4).
"""

import math
from typing import Any

import keras
from keras import ops

from keras_tx.layers import masks
from keras_tx.layers.attention.dense import MASKED, softmax
from keras_tx.layers.dropout import HIGHEST_RATE, keep
from keras_tx.layers.loops import add, at, product, put, repeat
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")

LONG = 4096 * 4096  # T * S from which attention goes block by block by itself
BLOCK_SIZE = 512
AT_ONCE = 4  # key blocks, at most
_LARGEST = 2**31 - 1
_PADDING = -(2**31)  # the number of a query that is padding; a key that is has one more, so that the two do not meet
_MIXER = -1640531527  # 2^32 / golden ratio: neighbouring calls and blocks must not share seeds


def attend_blockwise(query, key, value, visible, *, bias=None, scale=None, dropout=0.0, seed=None, block_size=None):
    """`attend` in memory that grows with T + S. Blocks that no query may look at cost nothing.

    Scores, softmax and sums are float32 whatever the input is. A `visible.mask` or a `bias` over (T, S) lies whole in
    memory, with its gradient, and blocks that it alone hides are computed; the other parts of `visible` cost neither.
    Of a small window all blocks are taken at once, if any of them is open.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H) with N a multiple of K.
        value: (B, S, K, V).
        visible: a `masks.Visible`. A query that may look at nothing gives zeros.
        bias: added to the scaled products, broadcastable to (B, N, T, S).
        scale: factor of the products; 1 / sqrt(H) if None.
        dropout: rate of dropout on the scores.
        seed: (2,) integers, for dropout: a call with the same seed drops the same scores.
        block_size: queries and keys of a block; if None 512, less for a small window.

    Returns:
        (B, T, N, V) in the dtype of `value`.
    """
    size = block_size or _block_size(visible.window)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    tensors = [query, key, value] if bias is None else [query, key, value, ops.cast(bias, "float32")]

    def with_gradient(*tensors):
        blocks = _Blocks(*tensors, visible=visible, scale=scale, dropout=dropout, seed=seed, size=size)
        output, logsumexp = blocks.forward()

        def gradient(*args, upstream=None):  # PyTorch names the upstream, behind what it was called with
            upstream = args[0] if upstream is None else upstream
            return blocks.backward(output, logsumexp, upstream)

        return blocks.whole(output, "query", value.dtype), gradient

    return ops.custom_gradient(with_gradient)(*tensors)


def _block_size(window):
    if window is None or window >= BLOCK_SIZE:
        return BLOCK_SIZE
    return max(128, 1 << (window - 1).bit_length())


def _at_once(visible, size):
    """How many key blocks the window of a query block can lie in, if they are few; else 1."""
    if not visible.window:
        return 1
    reach = -(-(visible.window - 1) // size)
    is_aligned = isinstance(visible.start, int) and visible.start % size == 0
    count = 1 + reach + (0 if visible.causal else reach) + (0 if is_aligned else 1)
    return count if count <= AT_ONCE else 1


class _Blocks:
    """The tensors of one attention, cut into blocks on a new first axis: (I, X, P, H) and (J, X, block, H)."""

    def __init__(self, query, key, value, bias=None, *, visible, scale, dropout, seed, size):
        self.batch, self.num_queries = ops.shape(query)[:2]
        self.num_keys = ops.shape(key)[1]
        self.heads, self.key_heads = query.shape[2], key.shape[2]
        self.groups = self.heads // self.key_heads
        self.size, self.scale, self.dropout, self.seed = size, scale, dropout, seed
        self.visible, self.dtypes = visible, [keras.backend.standardize_dtype(x.dtype) for x in (query, key, value)]
        self.num_query_blocks, self.num_key_blocks = (-(-n // size) for n in (self.num_queries, self.num_keys))
        self.at_once = 1 if bias is not None else _at_once(visible, size)
        if isinstance(self.num_key_blocks, int):
            self.at_once = min(self.at_once, self.num_key_blocks)
        else:
            self.num_key_blocks = ops.maximum(self.num_key_blocks, self.at_once)
        self.query = ops.cast(self._cut(query, "query"), "float32") * scale
        self.key = ops.cast(self._cut(key, "key"), "float32")
        self.value = self._cut(value, "key")
        self.bias: Any = None if bias is None else self._padded(bias)
        self.mask = None if visible.mask is None else self._padded(ops.cast(visible.mask, "bool"))
        self.numbers = self._document_numbers()
        self.open = self._open_blocks()

    # Blocks

    def _count(self, side):
        if side == "query":
            return self.num_queries, self.num_query_blocks
        return self.num_keys, self.num_key_blocks

    def _cut(self, x, side):
        """(B, T, N, H) -> (I, X, P, H), filled up with zeros."""
        length, count = self._count(side)
        heads, features = x.shape[2:]
        x = _filled(x, 1, count * self.size - length)
        x = ops.reshape(x, (self.batch, count, self.size, self.key_heads, heads // self.key_heads, features))
        x = ops.transpose(x, (1, 0, 3, 4, 2, 5))
        return ops.reshape(x, (count, self.batch * self.key_heads, heads // self.key_heads * self.size, features))

    def whole(self, x, side, dtype):
        """The inverse of `_cut`: (I, X, P, H) -> (B, T, N, H)."""
        length, count = self._count(side)
        groups = self.groups if side == "query" else 1
        x = ops.reshape(x, (count, self.batch, self.key_heads, groups, self.size, x.shape[3]))
        x = ops.transpose(x, (1, 0, 4, 2, 3, 5))
        x = ops.reshape(x, (self.batch, count * self.size, self.key_heads * groups, x.shape[5]))
        return ops.cast(x[:, :length], dtype)

    def _padded(self, pairs):
        """Broadcastable to (B, N, T, S) -> the same with whole blocks; what is 1 stays 1."""
        for axis, side in ((2, "query"), (3, "key")):
            length, count = self._count(side)
            if pairs.shape[axis] != 1:
                pairs = _filled(pairs, axis, count * self.size - length)
        return pairs

    def _by_block(self, x, side):
        """(B, T) -> (I, B, block), filled up with zeros."""
        length, count = self._count(side)
        x = ops.reshape(_filled(x, 1, count * self.size - length), (self.batch, count, self.size))
        return ops.swapaxes(x, 0, 1)

    # Which blocks are open

    def _document_numbers(self):
        """Numbers (I, B, block) and (J, B, block) of which a query and a key must have the same, not 0; or None."""
        visible = self.visible
        whole = isinstance(self.num_keys, int) and self.num_keys % self.size == 0
        if whole and visible.documents is None and visible.queries is None and not visible.keys:
            return None
        documents, sides = visible.documents, []
        is_wide = documents is not None and keras.backend.standardize_dtype(documents.dtype) == "int64"
        for side, masks_of_side in (("query", (visible.queries,)), ("key", visible.keys)):
            numbers = ops.ones((self.batch, self._count(side)[0]), "int32") if documents is None else documents
            numbers = ops.cast(numbers, "int64" if is_wide else "int32")
            real = masks.join(numbers != 0, *masks_of_side)
            filled = [self._by_block(x, side) for x in (numbers, real)]
            sides.append(ops.where(filled[1], filled[0], _PADDING + (side == "key")))
        return tuple(sides)

    def _open_blocks(self):
        """(I, J): whether some query of the one may look at some key of the other."""
        first = ops.arange(self.num_query_blocks, dtype="int32")[:, None] * self.size + self.visible.start
        key = ops.arange(self.num_key_blocks, dtype="int32")[None] * self.size
        last, last_key = first + self.size - 1, key + self.size - 1
        shared = key >= 0 * first
        if self.numbers is not None:
            lows = [ops.min(ops.where(x <= _PADDING + 1, _LARGEST, x), axis=2) for x in self.numbers]  # (I, B), (J, B)
            highs = [ops.max(x, axis=2) for x in self.numbers]
            both = ops.logical_and(lows[0][:, None] <= highs[1][None], lows[1][None] <= highs[0][:, None])
            shared = ops.any(both, axis=2)
        if self.visible.causal:
            shared = ops.logical_and(shared, key <= last)
        if self.visible.window:
            near = ops.logical_and(key - last < self.visible.window, first - last_key < self.visible.window)
            shared = ops.logical_and(shared, near)
        return shared

    def _bounds(self, axis):
        """The first open block along `axis` for each of the other, and one more than the last; both 0 if none is."""
        numbers = ops.arange(ops.shape(self.open)[axis], dtype="int32")
        numbers = numbers[:, None] if axis == 0 else numbers[None]
        largest = ops.cast(ops.shape(self.open)[axis], "int32")
        end = ops.max(ops.where(self.open, numbers + 1, 0), axis=axis)
        return ops.minimum(ops.min(ops.where(self.open, numbers, largest), axis=axis), end), end

    def _query_bounds(self):
        """`_bounds` of the keys of each query block; where they are taken at once, of a loop of one round or none."""
        begin, end = self._bounds(1)
        if self.at_once > 1:
            is_open = ops.cast(end > begin, "int32")
            begin = ops.minimum(begin, ops.cast(self.num_key_blocks - self.at_once, "int32"))
            end = begin + is_open
        return begin, end

    # Numbers of a block of queries and `at_once` blocks of keys, from j on

    def _from(self, x, j):
        """Blocks (J, X, block, H) -> those from j on, (X, R, H)."""
        if self.at_once == 1:
            return at(x, j)
        blocks = ops.swapaxes(ops.take(x, j + ops.arange(self.at_once, dtype="int32"), axis=0), 0, 1)
        return ops.reshape(blocks, (ops.shape(x)[1], self.at_once * self.size, *x.shape[3:]))

    def _sees(self, i, j):
        """Broadcastable to (B, N, block, R): whether a query may look at a key. None: all may."""
        parts = []
        if self.numbers is not None:
            own, keys = at(self.numbers[0], i)[:, None, :, None], self._from(self.numbers[1], j)[:, None, None]
            parts.append(own == keys)
        row = (i * self.size + ops.arange(self.size, dtype="int32"))[:, None] + self.visible.start
        column = (j * self.size + ops.arange(self.at_once * self.size, dtype="int32"))[None]
        if self.visible.causal:
            parts.append((column <= row)[None, None])
        if self.visible.window:
            parts.append((ops.abs(row - column) < self.visible.window)[None, None])
        if self.mask is not None:
            parts.append(self._pairs(self.mask, i, j))
        if self.bias is not None:
            parts.append(self._pairs(self.bias, i, j) > MASKED)
        return masks.join(*parts)

    def _pairs(self, x, i, j):
        """The block (i, j) of (B, N, T, S); T and S may be 1."""
        sides = list(zip(x.shape[2:], (i, j), (1, self.at_once), strict=True))
        starts = [0 if length == 1 else block * self.size for length, block, _ in sides]
        sizes = [1 if length == 1 else count * self.size for length, _, count in sides]
        return ops.slice(x, (0, 0, *starts), (*ops.shape(x)[:2], *sizes))

    def _logits(self, i, j):
        """Products (X, P, R), `MASKED` where a query may not look."""
        logits = product(at(self.query, i), self._from(self.key, j), transpose_b=True)
        sees = self._sees(i, j)
        if sees is None and self.bias is None:
            return logits
        shape = ops.shape(logits)
        logits = ops.reshape(logits, (self.batch, self.heads, self.size, self.at_once * self.size))
        if self.bias is not None:
            logits = logits + self._pairs(self.bias, i, j)
        return ops.reshape(logits if sees is None else ops.where(sees, logits, MASKED), shape)

    def _kept(self, i, j):
        """What dropout multiplies the scores of a block by, (X, P, R) float32."""
        shape = (self.batch * self.key_heads, self.groups * self.size, self.at_once * self.size)
        rate = min(self.dropout, HIGHEST_RATE)
        return ops.cast(_stays(shape, rate, self.seed, i * self.num_key_blocks + j), "float32") / (1 - rate)

    # Forward, backward

    def forward(self):
        """The output (I, X, P, V), and the logarithms of the sums of exponentials (I, X, P, 1), both float32."""
        shape = ops.shape(self.query)
        begin, end = self._query_bounds()

        def query_block(i, results):
            outputs, logsumexps = results

            def key_block(j, state):
                before, output = state
                logits = self._logits(i, j)
                scores = softmax(logits)
                # A softmax is one operation where it has a kernel; its largest number tells what it divided by.
                largest = [ops.max(x, axis=-1, keepdims=True) for x in (logits, scores)]
                own = largest[0] - ops.log(largest[1])
                kept = scores * self._kept(i, j) if self.dropout else scores
                value = self._from(self.value, j)
                product = ops.cast(ops.matmul(ops.cast(kept, value.dtype), value), "float32")
                new = ops.logaddexp(before, own)
                return new, output * ops.exp(before - new) + product * ops.exp(own - new)

            rows = shape[1], self.groups * self.size
            start = _zeros((*rows, 1)) + MASKED, _zeros((*rows, self.value.shape[3]))
            logsumexp, output = repeat(at(begin, i), at(end, i), key_block, start)
            seen = logsumexp > MASKED / 2
            output, logsumexp = ops.where(seen, output, 0.0), ops.where(seen, logsumexp, -MASKED)
            return put(outputs, i, output), put(logsumexps, i, logsumexp)

        results = _zeros((*shape[:3], self.value.shape[3])), _zeros((*shape[:3], 1))
        return repeat(0, self.num_query_blocks, query_block, results)

    def backward(self, output, logsumexp, upstream):
        """The gradients of query, key, value and bias, if there is one, from that of the output (B, T, N, V)."""
        upstream = ops.cast(self._cut(ops.cast(upstream, "float32"), "query"), "float32")
        inner = ops.sum(upstream * output, axis=-1, keepdims=True)  # (I, X, P, 1)
        by = self._backward_of_window if self.at_once > 1 else self._backward_of_pairs
        of_query, of_key, of_value, *of_bias = by((logsumexp, upstream, inner))
        sides = zip((of_query * self.scale, of_key, of_value), ("query", "key", "key"), self.dtypes, strict=True)
        return *[self.whole(x, side, dtype) for x, side, dtype in sides], *map(self._whole_bias, of_bias)

    def _of_block(self, i, j, saved):
        """Gradients by the block (i, j): of queries (X, P, H), keys (X, R, H), values (X, R, V), logits (X, P, R)."""
        logsumexp, upstream, inner = (at(x, i) for x in saved)
        weights = ops.exp(self._logits(i, j) - logsumexp)
        of_weights = product(upstream, ops.cast(self._from(self.value, j), "float32"), transpose_b=True)
        kept = weights
        if self.dropout:
            mask = self._kept(i, j)
            kept, of_weights = weights * mask, of_weights * mask
        of_logits = weights * (of_weights - inner)
        of_query = ops.matmul(of_logits, self._from(self.key, j))
        of_key = product(of_logits, at(self.query, i), transpose_a=True)
        return of_query, of_key, product(kept, upstream, transpose_a=True), of_logits

    def _backward_of_window(self, saved):
        """Gradients of query, key and value in blocks, from all keys of a query block at once."""
        begin, end = self._query_bounds()

        def query_block(i, results):
            def key_blocks(j, results):
                of_query, of_key, of_value = results
                own_query, own_key, own_value, _ = self._of_block(i, j, saved)
                return put(of_query, i, own_query), self._add(of_key, j, own_key), self._add(of_value, j, own_value)

            return repeat(at(begin, i), at(end, i), key_blocks, results)

        results = tuple(_zeros(ops.shape(x)) for x in (self.query, self.key, self.value))
        return repeat(0, self.num_query_blocks, query_block, results)

    def _add(self, x, j, more):
        """Blocks (J, X, block, H) with (X, R, H) added from j on."""
        more = ops.reshape(more, (ops.shape(more)[0], self.at_once, self.size, more.shape[2]))
        return add(x, j, ops.swapaxes(more, 0, 1))

    def _backward_of_pairs(self, saved):
        """Gradients of query, key, value and, if there is one, the bias, in blocks."""
        begin, end = self._bounds(0)
        key_shape, value_shape = ops.shape(self.key), ops.shape(self.value)

        def key_block(j, results):
            def query_block(i, state):
                of_query, of_key, of_value, of_bias = state
                own_query, own_key, own_value, of_logits = self._of_block(i, j, saved)
                of_query = put(of_query, i, at(of_query, i) + own_query)
                if self.bias is not None:
                    of_bias = put(of_bias, i * self.num_key_blocks + j, self._bias_block(of_logits))
                return of_query, of_key + own_key, of_value + own_value, of_bias

            of_query, of_key, of_value, of_bias = results
            start = (of_query, _zeros(key_shape[1:]), _zeros(value_shape[1:]), of_bias)
            of_query, own_key, own_value, of_bias = repeat(at(begin, j), at(end, j), query_block, start)
            return of_query, put(of_key, j, own_key), put(of_value, j, own_value), of_bias

        of_bias = _zeros(())
        if self.bias is not None:
            count = self.num_query_blocks * self.num_key_blocks
            sides = [1 if n == 1 else self.size for n in self.bias.shape[2:]]
            of_bias = _zeros((count, *ops.shape(self.bias)[:2], *sides))
        results = (_zeros(ops.shape(self.query)), _zeros(key_shape), _zeros(value_shape), of_bias)
        results = repeat(0, self.num_key_blocks, key_block, results)
        return results[:3] if self.bias is None else results

    def _bias_block(self, of_logits):
        """(X, P, block) -> a block of the bias, summed over what the bias is the same for."""
        of_logits = ops.reshape(of_logits, (self.batch, self.heads, self.size, self.size))
        for axis in range(4):
            if self.bias.shape[axis] == 1:
                of_logits = ops.sum(of_logits, axis=axis, keepdims=True)
        return of_logits

    def _whole_bias(self, blocks):
        """Blocks (I * J, B, N, block, block) -> (B, N, T, S); each may be 1."""
        blocks = ops.reshape(blocks, (self.num_query_blocks, self.num_key_blocks, *ops.shape(blocks)[1:]))
        for axis in (0, 1):
            if self.bias.shape[2 + axis] == 1:
                blocks = ops.sum(blocks, axis=axis, keepdims=True)
        whole = ops.reshape(ops.transpose(blocks, (2, 3, 0, 4, 1, 5)), ops.shape(self.bias))
        return whole[:, :, : self.num_queries, : self.num_keys]


def _zeros(shape):
    return ops.zeros(shape, dtype="float32")  # whatever `floatx` is


def _filled(x, axis, count):
    """`count` more zeros along `axis`."""
    if isinstance(count, int) and count == 0:
        return x
    shape = [*ops.shape(x)]
    shape[axis] = count
    return ops.concatenate([x, ops.zeros(shape, dtype=x.dtype)], axis=axis)


def _stays(shape, rate, seed, index):
    """Booleans, each False with the probability `rate`, the same for the same seed (2,) and index."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return keep(shape, rate, tf.cast(seed, "int32") + tf.stack([tf.cast(index, "int32") * _MIXER, 0]))
    if backend == "jax":
        return jax.random.uniform(jax.random.fold_in(seed, index), shape) >= rate
    first, second = (int(number) for number in seed)
    generator = torch.Generator(device=seed.device).manual_seed(hash((first, second, int(index))) % 2**63)
    return torch.rand(shape, generator=generator, device=seed.device) >= rate

"""Attention block by block: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V), never all (T, S) scores at once.

Letters as in `blocks.py`: I query blocks, J key blocks, X = batch * key heads, P queries of a block, R keys taken at
once. Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; with a gradient that computes the scores again: Dao
et al. 2022, arXiv:2205.14135 (algorithms 2 and 4).
"""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from keras_tx.layers.attention.blocks import Blocks
from keras_tx.layers.attention.dense import attend, softmax
from keras_tx.layers.gradients import twice_differentiable
from keras_tx.layers.loops import add, at, logaddexp, product, put, repeat
from keras_tx.layers.masks import MASKED, Visible
from keras_tx.layers.precision import wide_dtype
from keras_tx.types import Tensor

LONG = 4096 * 4096  # from this T * S on, `blockwise=None` computes block by block
BLOCK_SIZE = 512


def attend_blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    block_size: int | None = None,
) -> Tensor:
    """`attend` in memory that grows with T + S instead of T * S. Blocks that no query may attend to cost nothing.

    Logits, softmax and sums are float32, or float64 for such inputs. A `visible.mask` or a `bias` over (T, S), and the
    gradient of the bias, are kept in memory as a whole; blocks that only these mask out are computed anyway. The other
    parts of `visible` need no such memory. With a small window, all keys that a block of queries may attend to are
    processed at once.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H) with N a multiple of K.
        value: (B, S, K, V).
        visible: which keys each query may attend to. A query that may not attend to any key gives zeros.
        bias: added to the attention logits, broadcastable to (B, N, T, S).
        scale: the factor applied to the dot products; 1 / sqrt(H) if None.
        dropout: rate of dropout on the scores.
        seed: (2,) integers, for dropout: a call with the same seed drops the same scores.
        block_size: the number of queries and of keys in a block. None: 512, or less for a small window.

    Returns:
        (B, T, N, V) in the dtype of `value`.
    """
    if 0 in (*query.shape[:2], key.shape[1]):  # no rows, queries or keys: there are no blocks, and nothing to save
        mask = visible.whole_of(query, key)
        return attend(query, key, value, mask=mask, bias=bias, scale=scale)[0]
    size = block_size or _block_size(visible)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    tensors = (
        [query, key, value] if bias is None else [query, key, value, ops.cast(bias, wide_dtype(query, key, value))]
    )

    def with_gradient(constants: Any, *tensors: Tensor) -> Any:
        dtypes = [keras.backend.standardize_dtype(x.dtype) for x in tensors[:3]]
        rules, seed = dataclasses.replace(visible, **constants[0]), constants[1]
        blocks = Blocks(*tensors, visible=rules, scale=scale, dropout=dropout, seed=seed, size=size)
        output, logsumexp = _forward(blocks)

        def gradient(upstream: Tensor) -> tuple[Tensor, ...]:
            return _backward(blocks, output, logsumexp, upstream, dtypes)

        return blocks.join(output, "query", value.dtype), gradient

    made: Tensor = twice_differentiable(with_gradient, (visible.tensors, seed))(*tensors)
    return made


def _block_size(visible: Visible) -> int:
    behind, _ = visible.reach
    if behind is None or behind >= BLOCK_SIZE - 1:
        return BLOCK_SIZE
    return max(128, 1 << behind.bit_length())


def _forward(blocks: Blocks) -> Any:
    """The output (I, X, P, V), and the logarithms of the sums of exponentials (I, X, P, 1)."""
    shape, value_size = ops.shape(blocks.query), blocks.value.shape[3]
    begin, end = blocks.key_bounds()

    def query_block(i: Tensor, results: Any) -> Any:
        outputs, logsumexps = results

        def key_block(j: Tensor, state: Any) -> Any:
            """Adds the attention to the keys from block j on to the output so far (online softmax)."""
            logsumexp, output = state
            logits = blocks.logits(i, j)
            scores = softmax(logits)
            # There is a fast kernel for softmax, none for the sum of exponentials: that follows from the largest score.
            largest_logit, largest_score = (ops.max(x, axis=-1, keepdims=True) for x in (logits, scores))
            own_logsumexp = largest_logit - ops.log(largest_score)
            kept = scores * blocks.dropout_factors(i, j) if blocks.dropout else scores
            value = blocks.keys_from(blocks.value, j)
            own_output = ops.cast(product(ops.cast(kept, value.dtype), value), blocks.dtype)
            total = logaddexp(logsumexp, own_logsumexp)
            return total, output * ops.exp(logsumexp - total) + own_output * ops.exp(own_logsumexp - total)

        rows = shape[1], blocks.groups * blocks.size
        start = _zeros(blocks, (*rows, 1)) + MASKED, _zeros(blocks, (*rows, value_size))
        logsumexp, output = repeat(at(begin, i), at(end, i), key_block, start)
        sees_any_key = ops.logical_not(logsumexp <= MASKED / 2)  # also where it is NaN
        output, logsumexp = ops.where(sees_any_key, output, 0.0), ops.where(sees_any_key, logsumexp, -MASKED)
        return put(outputs, i, output), put(logsumexps, i, logsumexp)

    results = _zeros(blocks, (*shape[:3], value_size)), _zeros(blocks, (*shape[:3], 1))
    return repeat(0, blocks.steps(blocks.num_query_blocks), query_block, results)


def _backward(
    blocks: Blocks, output: Tensor, logsumexp: Tensor, upstream: Tensor, dtypes: list[str]
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and (if there is one) bias, from the gradient of the output (B, T, N, V)."""
    upstream = blocks.cut(ops.cast(upstream, blocks.dtype), "query")
    inner = ops.sum(upstream * output, axis=-1, keepdims=True)  # (I, X, P, 1)
    backward = _backward_by_queries if blocks.span > 1 else _backward_by_keys
    of_query, of_key, of_value, *of_bias = backward(blocks, (logsumexp, upstream, inner))
    query_dtype, key_dtype, value_dtype = dtypes
    return (
        blocks.join(of_query * blocks.scale, "query", query_dtype),
        blocks.join(of_key, "key", key_dtype),
        blocks.join(of_value, "key", value_dtype),
        *[_join_bias(blocks, one) for one in of_bias],
    )


def _block_gradients(blocks: Blocks, i: Tensor, j: Tensor, saved: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients from blocks i and j, for queries (X, P, H), keys (X, R, H), values (X, R, V), logits (X, P, R)."""
    logsumexp, upstream, inner = (at(x, i) for x in saved)
    scores = ops.exp(blocks.logits(i, j) - logsumexp)
    of_scores = product(upstream, ops.cast(blocks.keys_from(blocks.value, j), blocks.dtype), transpose_b=True)
    kept = scores
    if blocks.dropout:
        factors = blocks.dropout_factors(i, j)
        kept, of_scores = scores * factors, of_scores * factors
    of_logits = scores * (of_scores - inner)
    of_query = product(of_logits, blocks.keys_from(blocks.key, j))
    of_key = product(of_logits, at(blocks.query, i), transpose_a=True)
    return of_query, of_key, product(kept, upstream, transpose_a=True), of_logits


def _backward_by_queries(blocks: Blocks, saved: Any) -> Any:
    """The gradients of query, key and value in blocks, with all keys of a query block at once."""
    begin, end = blocks.key_bounds()

    def query_block(i: Tensor, results: Any) -> Any:
        def key_blocks(j: Tensor, results: Any) -> Any:
            of_query, of_key, of_value = results
            own_query, own_key, own_value, _ = _block_gradients(blocks, i, j, saved)
            of_key, of_value = _add_keys(blocks, of_key, j, own_key), _add_keys(blocks, of_value, j, own_value)
            return put(of_query, i, own_query), of_key, of_value

        return repeat(at(begin, i), at(end, i), key_blocks, results)

    results = tuple(_zeros(blocks, ops.shape(x)) for x in (blocks.query, blocks.key, blocks.value))
    return repeat(0, blocks.steps(blocks.num_query_blocks), query_block, results)


def _add_keys(blocks: Blocks, x: Tensor, j: Tensor, more: Tensor) -> Tensor:
    """Blocks of keys (J, X, block, H) with (X, R, H) added from block j on."""
    more = ops.reshape(more, (ops.shape(more)[0], blocks.span, blocks.size, more.shape[2]))
    return add(x, j, ops.swapaxes(more, 0, 1))


def _backward_by_keys(blocks: Blocks, saved: Any) -> Any:
    """The gradients of query, key, value and (if there is one) bias in blocks, one pair of blocks after the other."""
    begin, end = blocks.bounds(0)
    key_shape, value_shape = ops.shape(blocks.key), ops.shape(blocks.value)

    def key_block(j: Tensor, results: Any) -> Any:
        def query_block(i: Tensor, state: Any) -> Any:
            of_query, of_key, of_value, of_bias = state
            own_query, own_key, own_value, of_logits = _block_gradients(blocks, i, j, saved)
            of_query = put(of_query, i, at(of_query, i) + own_query)
            if blocks.bias is not None:
                of_bias = put(of_bias, i * blocks.num_key_blocks + j, _bias_gradient(blocks, of_logits))
            return of_query, of_key + own_key, of_value + own_value, of_bias

        of_query, of_key, of_value, of_bias = results
        start = (of_query, _zeros(blocks, key_shape[1:]), _zeros(blocks, value_shape[1:]), of_bias)
        of_query, own_key, own_value, of_bias = repeat(at(begin, j), at(end, j), query_block, start)
        return of_query, put(of_key, j, own_key), put(of_value, j, own_value), of_bias

    of_bias = _zeros(blocks, ())
    if blocks.bias is not None:
        count = blocks.num_query_blocks * blocks.num_key_blocks
        sides = [1 if length == 1 else blocks.size for length in blocks.bias.shape[2:]]
        of_bias = _zeros(blocks, (count, *ops.shape(blocks.bias)[:2], *sides))
    results = (_zeros(blocks, ops.shape(blocks.query)), _zeros(blocks, key_shape), _zeros(blocks, value_shape), of_bias)
    results = repeat(0, blocks.steps(blocks.num_key_blocks), key_block, results)
    return results[:3] if blocks.bias is None else results


def _bias_gradient(blocks: Blocks, of_logits: Tensor) -> Tensor:
    """The gradient of the logits (X, P, block) -> that of a block of the bias, summed over the bias' axes of size 1."""
    of_logits = ops.reshape(of_logits, (blocks.batch, blocks.heads, blocks.size, blocks.size))
    for axis in range(4):
        if blocks.bias.shape[axis] == 1:
            of_logits = ops.sum(of_logits, axis=axis, keepdims=True)
    return of_logits


def _join_bias(blocks: Blocks, parts: Tensor) -> Tensor:
    """Blocks (I * J, B, N, block, block) -> (B, N, T, S); each axis may be 1."""
    parts = ops.reshape(parts, (blocks.num_query_blocks, blocks.num_key_blocks, *ops.shape(parts)[1:]))
    for axis in (0, 1):
        if blocks.bias.shape[2 + axis] == 1:
            parts = ops.sum(parts, axis=axis, keepdims=True)
    whole = ops.reshape(ops.transpose(parts, (2, 3, 0, 4, 1, 5)), ops.shape(blocks.bias))
    return whole[:, :, : blocks.num_queries, : blocks.num_keys]


def _zeros(blocks: Blocks, shape: Any) -> Tensor:
    return ops.zeros(shape, dtype=blocks.dtype)

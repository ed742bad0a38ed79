"""Scaled dot-product attention as a function: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, K key heads, G = N/K, H head, V value head.
Vaswani et al. 2017, arXiv:1706.03762, equation 1; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
"""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.internals.tensorflow_graphs import traces_for_xla
from keras_tx.layers import masks, xla
from keras_tx.layers.attention.axes import Axes
from keras_tx.layers.attention.halves import half_product, half_weights, multiplies_halves
from keras_tx.layers.cache import KeyValue, Memory
from keras_tx.layers.masks import MASKED, Visible
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.shapes import size_of
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

MOST_QUERIES = 32  # of a decode step that `attend_cached` takes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    queries: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
    hard: bool = False,
    with_scores: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention of each query to the keys that `mask` allows.

    Logits and softmax are float32, or float64 for such inputs.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H) with N a multiple of K: query head n uses key head n // G.
        value: (B, S, K, V).
        mask: boolean, broadcastable to (B, N, T, S), True where a query may attend to a key. A query that may not
            attend to any key gives zeros.
        queries: (B, T), True at real queries; the others give zeros. As a part of `mask` it would make that larger.
        bias: added to the attention logits, broadcastable to (B, N, T, S). Minus infinity and any value of -1e30 or
            less mask a key out.
        scale: the factor applied to the dot products; 1 / sqrt(H) if None.
        dropout: a function applied to the scores before they are multiplied with the values.
        hard: whether the key with the highest logit (the first of equal ones) gets the score 1, instead of a softmax.
        with_scores: whether to return the scores.

    Returns:
        The output (B, T, N, V) in the dtype of `value`, and the scores (B, N, T, S) before dropout, in float32, or
        in float64 for such inputs.
    """
    dtype = wide_dtype(query, key, value)
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    in_half = not (hard or with_scores) and multiplies_halves(query, key, value)
    if in_half:
        logits, output_of = _logits(query, key, value, lambda query, key: half_product(query, key, scale))
    else:
        logits, output_of = _logits(ops.cast(query, dtype) * scale, ops.cast(key, dtype), value)
    if bias is not None:
        mask = masks.join(mask, masks.allowed_by_bias(bias))
        logits = masks.masked(logits + ops.cast(bias, dtype), mask)
    elif mask is not None:
        # MASKED absorbs any logit, so this equals `where`; but the gradient of a sum costs nothing.
        logits = logits + (1 - ops.cast(mask, dtype)) * MASKED
    if in_half:
        scores, weights = None, half_weights(logits, dropout, value.dtype)
    else:
        scores = _one_hot_of_best(logits) if hard else softmax(logits)
        weights = ops.cast(scores if dropout is None else dropout(scores), value.dtype)
    output = output_of(weights)
    has_keys = None if mask is None else masks.sees_any_key(mask)
    attends = masks.join(has_keys, None if queries is None else masks.expand_query_mask(queries))
    if attends is not None:
        scores = ops.where(attends, scores, 0.0) if with_scores else scores
        output = ops.where(ops.swapaxes(attends, 1, 2), output, 0.0)
    return output, scores if with_scores else None


def _logits(
    query: Tensor, key: Tensor, value: Tensor, product: Callable[[Tensor, Tensor], Tensor] | None = None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The products of queries and keys (B, N, T, S), and a function: weights (B, N, T, S) -> output (B, T, N, V).

    `product` computes (X, Q, H), (X, S, H) -> (X, Q, S), by default in the dtype of `query`.
    """
    heads, key_heads = query.shape[2], key.shape[2]
    if heads == key_heads and keras.backend.backend() == "tensorflow" and not (xla.is_traced() or traces_for_xla()):
        # Without XLA, products over two batch axes are as fast as over one, and need a third of the operations.
        query, key, value = (tf.transpose(x, (0, 2, 1, 3)) for x in (query, key, value))
        logits = tf.matmul(query, key, transpose_b=True)
        return logits, lambda weights: tf.transpose(tf.matmul(weights, value), (0, 2, 1, 3))
    batch, length, keys = size_of(query, 0), size_of(query, 1), size_of(key, 1)
    query, key, value = (_by_key_head(x, key_heads) for x in (query, key, value))

    def output(weights: Tensor) -> Tensor:
        weights = ops.reshape(weights, (batch * key_heads, heads // key_heads * length, keys))
        output = ops.reshape(ops.einsum("XQS,XSV->XQV", weights, value), (batch, heads, length, value.shape[2]))
        return ops.swapaxes(output, 1, 2)

    logits = ops.einsum("XQH,XSH->XQS", query, key) if product is None else product(query, key)
    return ops.reshape(logits, (batch, heads, length, keys)), output


def can_attend_cached(length: int | None, axes: Axes, start: Any) -> bool:
    """Whether `attend_cached` can be used for T = `length` queries: in decode steps on TensorFlow without XLA.

    A decode step has few tokens; `start` is the slot of the first, an integer 0 in the prefill.
    """
    is_prefill = isinstance(start, int) and start == 0  # whose masks are as long as its own keys, not as the cache
    is_step = length is not None and length <= MOST_QUERIES and not is_prefill
    return axes == (1,) and is_step and keras.backend.backend() == "tensorflow" and not xla.is_traced()


def attend_cached(
    query: Tensor,
    cache: KeyValue | Memory,
    visible: Visible,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`attend` for few queries (B, T, N, H) and a cache, without transposing the cache. Returns only the output.

    For TensorFlow without XLA, where `attend` is slow in decode steps: it transposes the whole cache, and it uses
    oneDNN for small products and softmaxes, where starting oneDNN takes ten times as long as the computation.
    """
    key, value = cache
    length, heads, size = query.shape[1:]
    key_heads, mask = key.shape[1], visible.whole_of_cache(length, key)
    rows = heads // key_heads * length  # G * T, all queries of a key head
    dtype = wide_dtype(query, key, value)
    query = ops.cast(query, dtype) * (1 / math.sqrt(size) if scale is None else scale)
    query = query if length == 1 else ops.swapaxes(query, 1, 2)
    query = ops.reshape(query, (-1, key_heads, rows, size))
    logits = product_without_onednn(query, ops.cast(key, dtype), adj_y=True)  # (B, K, G * T, S)
    if heads > key_heads:
        logits = ops.reshape(logits, (-1, heads, length, ops.shape(key)[2]))
    if bias is not None:
        mask = masks.join(mask, masks.allowed_by_bias(bias))
        logits = logits + ops.cast(bias, dtype)
    if mask is not None:
        logits = masks.masked(logits, mask)
    weights = softmax_without_onednn(logits)
    if heads > key_heads:
        weights = ops.reshape(weights, (-1, key_heads, rows, ops.shape(key)[2]))
    output = product_without_onednn(ops.cast(weights, value.dtype), value)  # (B, K, G * T, V)
    output = ops.reshape(output, (-1, heads, length, value.shape[3]))
    if mask is not None:
        output = ops.where(masks.sees_any_key(mask), output, 0.0)
    return ops.reshape(output, (-1, 1, heads, value.shape[3])) if length == 1 else ops.swapaxes(output, 1, 2)


def product_without_onednn(x: Tensor, y: Tensor, adj_y: bool = False) -> Tensor:
    if x.dtype == tf.float16:  # for which the other has no kernel on CPUs
        return tf.linalg.matmul(x, y, transpose_b=adj_y)
    return tf.raw_ops.BatchMatMulV3(x=x, y=y, Tout=x.dtype, adj_y=adj_y)


def softmax_without_onednn(logits: Tensor) -> Tensor:
    weights = tf.exp(logits - tf.reduce_max(logits, axis=-1, keepdims=True))
    return weights / tf.reduce_sum(weights, axis=-1, keepdims=True)


def _by_key_head(x: Tensor, key_heads: int) -> Tensor:
    """(B, T, N, H) -> (X, Q, H), X = B * K and Q = G * T: XLA copies no keys for a product with one batch axis."""
    batch, length = size_of(x, 0), size_of(x, 1)
    heads, size = x.shape[2:]
    return ops.reshape(ops.swapaxes(x, 1, 2), (batch * key_heads, heads // key_heads * length, size))


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last axis, without Keras' warning about an axis of size 1."""
    # The difference is zero, and so is its gradient, where a constant would have none.
    return ops.exp(logits - logits) if logits.shape[-1] == 1 else ops.softmax(logits, axis=-1)


def _one_hot_of_best(logits: Tensor) -> Tensor:
    keys = logits.shape[-1]
    if keys == 0:
        return logits
    if keys is None:  # there may be none, and then nothing has the highest logit
        none = ops.full((*ops.shape(logits)[:-1], 1), MASKED, dtype=logits.dtype)
        best = ops.argmax(ops.concatenate([logits, none], axis=-1), axis=-1, keepdims=True)
    else:
        best = ops.argmax(logits, axis=-1, keepdims=True)
    return ops.cast(ops.equal(ops.arange(ops.shape(logits)[-1], dtype=best.dtype), best), logits.dtype)

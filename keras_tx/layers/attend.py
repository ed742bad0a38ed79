"""Scaled dot-product attention, the function: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, K key heads, G = N/K, H head, V value head.
Vaswani et al. 2017, arXiv:1706.03762, equation 1; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
"""

import math

from keras import ops

MASKED = -1e30  # finite, so that a query that may look at nothing is 0, not NaN


def attend(query, key, value, *, mask=None, bias=None, scale=None, dropout=None, hard=False):
    """Attention of each query over the keys that `mask` allows. Scores and softmax are float32 whatever the input is.

    Args:
        query: (B, T, N, H).
        key: (B, S, K, H) with N a multiple of K: query head n reads key head n // G.
        value: (B, S, K, V).
        mask: boolean, broadcastable to (B, N, T, S), True = may look. A query that may look at nothing gives zeros.
        bias: added to the scaled products, broadcastable to (B, N, T, S). Minus infinity hides a key, as a mask does.
        scale: factor of the products; 1 / sqrt(H) if None.
        dropout: a function applied to the scores before they weigh the values.
        hard: the whole score goes to the best key (the first of equals) instead of a softmax.

    Returns:
        The output (B, T, N, V) in the dtype of `value`, and the scores (B, N, T, S) in float32, before dropout.
    """
    heads, key_heads = query.shape[2], key.shape[2]
    batch, queries, keys = ops.shape(query)[0], ops.shape(query)[1], ops.shape(key)[1]
    query = ops.cast(query, "float32") * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    query, key, value = (_by_key_head(x, key_heads) for x in (query, key, value))
    logits = ops.einsum("XQH,XSH->XQS", query, ops.cast(key, "float32"))
    logits = ops.reshape(logits, (batch, heads, queries, keys))
    if bias is not None:
        mask = _open(mask, bias)
        logits = logits + ops.cast(bias, "float32")
    if mask is not None:
        logits = ops.where(mask, logits, MASKED)
    scores = _one_hot_of_best(logits) if hard else _softmax(logits)
    weights = ops.cast(scores if dropout is None else dropout(scores), value.dtype)
    weights = ops.reshape(weights, (batch * key_heads, heads // key_heads * queries, keys))
    output = ops.einsum("XQS,XSV->XQV", weights, value)
    output = ops.swapaxes(ops.reshape(output, (batch, heads, queries, value.shape[2])), 1, 2)
    if mask is not None:
        scores = ops.where(_sees(mask), scores, 0.0)
        output = ops.where(ops.swapaxes(_sees(mask), 1, 2), output, 0.0)
    return output, scores


def attend_fused(query, key, value, *, mask=None, bias=None, scale=None):
    """`attend` by the fused kernel that Keras offers on the JAX and PyTorch backends; returns the output alone."""
    if bias is not None:  # the kernels take a mask or a bias
        mask = _open(mask, bias)
        bias = ops.where(mask, ops.cast(bias, "float32"), MASKED)
    kernel_mask = mask if bias is None else None
    output = ops.dot_product_attention(
        query, key, value, bias=bias, mask=kernel_mask, scale=scale, flash_attention=True
    )
    return output if mask is None else ops.where(ops.swapaxes(_sees(mask), 1, 2), output, 0.0)


def _by_key_head(x, key_heads):
    """(B, T, N, H) -> (X, Q, H), X = B * K and Q = G * T. XLA copies no key for a product with a single batch axis."""
    batch, length = ops.shape(x)[:2]
    heads, size = x.shape[2:]
    return ops.reshape(ops.swapaxes(x, 1, 2), (batch * key_heads, heads // key_heads * length, size))


def _open(mask, bias):
    """`mask`, and not hidden by a bias of minus infinity."""
    finite = bias > float("-inf")
    return finite if mask is None else ops.logical_and(mask, finite)


def _sees(mask):
    """(B, N, T, 1), N or B or T may be 1: whether a query may look at anything."""
    mask = ops.any(mask, axis=-1, keepdims=True)
    return ops.reshape(mask, (1,) * (4 - len(mask.shape)) + tuple(ops.shape(mask)))


def _softmax(logits):
    return (
        ops.ones_like(logits) if logits.shape[-1] == 1 else ops.softmax(logits, axis=-1)
    )  # Keras warns of a size of 1


def _one_hot_of_best(logits):
    best = ops.argmax(logits, axis=-1)[..., None]
    return ops.cast(ops.equal(ops.arange(ops.shape(logits)[-1], dtype=best.dtype), best), "float32")

"""Which way attention is computed: as a whole, block by block, or by a fused kernel. (B, T, N, H) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, H head, V value head. All ways give the same numbers, but drop other scores.
"""

import keras
from keras import ops

from keras_tx.layers.attention.blockwise import LONG, attend_blockwise
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.attention.fused import attend_fused, attend_on_cuda, takes_fused


def compute_attention(layer, heads, visible, *, bias, in_blocks, return_attention_scores, training):
    """Attention as the options of the `layer`, a `MultiHeadAttention`, and the lengths ask for.

    Args:
        heads: query (B, T, N, H), key (B, S, K, H) and value (B, S, K, V).
        visible: a `masks.Visible`.
        bias: broadcastable to (B, N, T, S), or None.
        in_blocks: whether attention may go block by block.
        return_attention_scores: whether the caller wants them.
        training: whether dropout is on.

    Returns:
        The output (B, T, N, V), and the scores (B, N, T, S), or None where they are not made.

    Raises:
        ValueError: where scores are asked of a fused kernel.
    """
    if layer.flash_attention and return_attention_scores:
        raise ValueError(
            "Returning attention scores is not supported when flash attention is enabled. Please disable flash "
            f"attention to access attention scores. Received: flash_attention={layer.flash_attention}"
        )
    query, key, value = heads
    hard = layer.hard_attention and not training
    in_blocks = in_blocks and is_blockwise(layer, query.shape[1], key.shape[1], training)
    fused = layer.flash_attention
    if fused is None and not (return_attention_scores or hard or (layer.dropout and training)):
        asked = in_blocks and layer.blockwise
        fused = not asked and takes_fused(query, key, value, visible, bias=bias, training=training, long=in_blocks)
    if not fused:
        return _unfused(layer, heads, visible, bias, in_blocks, training)
    if layer.flash_attention is None and keras.backend.backend() == "jax":

        def otherwise(*heads):
            return _unfused(layer, heads, visible, bias, in_blocks, training)[0]

        return attend_on_cuda(query, key, value, visible, otherwise, scale=layer.scale), None
    options = {"bias": bias, "scale": layer.scale, "flash_attention": layer.flash_attention}
    return attend_fused(query, key, value, visible, **options), None


def is_blockwise(layer, num_queries, num_keys, training):
    """Whether the `layer` attends block by block, for these lengths, None where they are not known."""
    if layer.flash_attention or (layer.hard_attention and not training):
        return False
    if layer.blockwise is not None:
        return layer.blockwise
    return None not in (num_queries, num_keys) and num_queries * num_keys >= LONG


def _unfused(layer, heads, visible, bias, in_blocks, training):
    query, key, value = heads
    if in_blocks:
        rate = layer.dropout if training else 0.0
        seed = layer._dropout_layer.next_seed() if rate else None
        return attend_blockwise(query, key, value, visible, bias=bias, scale=layer.scale, dropout=rate, seed=seed), None
    mask = visible.whole(ops.shape(query)[1], ops.shape(key)[1])
    dropout = (lambda x: layer._dropout_layer(x, training=training)) if layer.dropout else None
    hard = layer.hard_attention and not training
    return attend(query, key, value, mask=mask, bias=bias, scale=layer.scale, dropout=dropout, hard=hard)

"""Chooses how attention is computed: dense, block by block, or by a fused kernel. (B, T, N, H) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, K key heads, H head, V value head. All of them compute the same function, but
with dropout each drops different scores.
"""

import dataclasses
from typing import Any

import keras

from keras_tx.layers.attention.blockwise import LONG, attend_blockwise
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.attention.fused import attend_fused, attend_on_cuda, can_drop, prefers_fused
from keras_tx.layers.masks import Visible
from keras_tx.types import Tensor

Heads = tuple[Tensor, Tensor, Tensor]


def dispatch_attention(
    layer: Any,
    heads: Heads,
    visible: Visible,
    *,
    bias: Tensor | None,
    allow_blocks: bool,
    return_attention_scores: bool,
    training: bool | None,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention by the implementation that suits the options of `layer` and the lengths.

    Args:
        layer: the `MultiHeadAttention`.
        heads: query (B, T, N, H), key (B, S, K, H) and value (B, S, K, V).
        visible: which keys each query may attend to.
        bias: broadcastable to (B, N, T, S), or None.
        allow_blocks: whether attention may be computed block by block.
        return_attention_scores: whether the caller needs the scores.
        training: whether dropout is on.

    Returns:
        The output (B, T, N, V), and the scores (B, N, T, S), or None from an implementation that does not compute them.

    Raises:
        ValueError: if scores are requested with `flash_attention=True`.
    """
    if layer.flash_attention and return_attention_scores:
        raise ValueError(
            "Returning attention scores is not supported when flash attention is enabled. Please disable flash "
            f"attention to access attention scores. Received: flash_attention={layer.flash_attention}"
        )
    query, key, value = heads
    hard = layer.hard_attention and not training
    in_blocks = allow_blocks and uses_blocks(layer, query.shape[1], key.shape[1], training)
    fused = layer.flash_attention
    dropout = layer.dropout if training else 0.0
    if fused is None and not (return_attention_scores or hard) and (not dropout or can_drop(query)):
        is_asked_for_blocks = in_blocks and layer.blockwise
        fused = not is_asked_for_blocks and prefers_fused(
            query, key, value, visible, bias=bias, training=training, long=in_blocks
        )
    if not fused:
        return _without_kernels(layer, heads, visible, bias, in_blocks, training, return_attention_scores)
    if layer.flash_attention is None and keras.backend.backend() == "jax":

        def otherwise(*heads: Tensor) -> Tensor:
            return _without_kernels(layer, heads, visible, bias, in_blocks, training, False)[0]

        return attend_on_cuda(query, key, value, visible, otherwise, scale=layer.scale), None
    options = {"bias": bias, "scale": layer.scale, "flash_attention": layer.flash_attention}
    return attend_fused(query, key, value, visible, dropout=dropout, **options), None


def uses_blocks(layer: Any, num_queries: int | None, num_keys: int | None, training: bool | None) -> bool:
    """Whether `layer` attends block by block for these lengths; None is a length that is not known statically."""
    if layer.flash_attention or (layer.hard_attention and not training):
        return False
    if layer.blockwise is not None:
        return bool(layer.blockwise)
    # In exports of JAX, unknown lengths are symbols that cannot be compared with numbers.
    return isinstance(num_queries, int) and isinstance(num_keys, int) and num_queries * num_keys >= LONG


def _without_kernels(
    layer: Any,
    heads: Heads,
    visible: Visible,
    bias: Tensor | None,
    in_blocks: bool,
    training: bool | None,
    with_scores: bool,
) -> tuple[Tensor, Tensor | None]:
    query, key, value = heads
    if in_blocks:
        rate = layer.dropout if training else 0.0
        seed = layer._dropout_layer.next_seed() if rate else None
        return attend_blockwise(query, key, value, visible, bias=bias, scale=layer.scale, dropout=rate, seed=seed), None
    mask = dataclasses.replace(visible, queries=None).whole_of(query, key)
    dropout = (lambda x: layer._dropout_layer(x, training=training)) if layer.dropout else None
    hard = layer.hard_attention and not training
    options = {
        "mask": mask,
        "queries": visible.queries,
        "bias": bias,
        "scale": layer.scale,
        "dropout": dropout,
        "hard": hard,
    }
    return attend(query, key, value, with_scores=with_scores, **options)

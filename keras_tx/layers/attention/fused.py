"""Attention by the fused kernels that Keras offers: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, K key heads, H head, V value head. On PyTorch these are the kernels of
`scaled_dot_product_attention`, for CPUs and GPUs; on JAX those of cuDNN, for half precision on GPUs. Dao et al. 2022,
arXiv:2205.14135.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.layers import masks
from keras_tx.layers.masks import MASKED, Visible
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

jax, torch = Lazy("jax"), Lazy("torch")

_SLOW_GRADIENT = 192 * 192  # T * S below which, in bfloat16 on a CPU, the kernel's gradient takes longer than ours
_FEW_QUERIES = 64  # below this, copying the keys for each query head costs more time than the kernel saves
_LARGEST_HEAD = 128  # of cuDNN before Hopper GPUs


def attend_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    flash_attention: bool | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`attend` by a fused kernel. Returns only the output: the kernels do not return scores.

    Args:
        query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, V).
        visible: which keys each query may attend to.
        bias: broadcastable to (B, N, T, S), or None. Keras rounds it to the dtype of `query`.
        scale: the factor applied to the dot products; 1 / sqrt(H) if None.
        flash_attention: as in `keras.ops.dot_product_attention`: True raises an error where there is no flash
            attention.
        dropout: rate of dropout on the scores, on PyTorch alone, whose global generator draws the random numbers.
    """
    lengths = ops.shape(query)[1], ops.shape(key)[1]
    is_causal = bias is None and visible.kind == "causal"
    # The outputs of padding queries become zeros below, so the kernel's mask leaves them out.
    mask = None if is_causal else dataclasses.replace(visible, queries=None).whole(*lengths)
    if mask is not None and keras.backend.backend() == "jax":  # cuDNN broadcasts over batch and heads alone
        mask = ops.broadcast_to(mask, (*ops.shape(mask)[:2], *lengths))
    if bias is not None:  # the kernels take a mask or a bias, not both
        mask = masks.join(mask, masks.allowed_by_bias(bias))
        # float16 ends at 65504: lower values would be minus infinity, and a fully masked query would give NaN.
        lowest, hidden = (-2e4, -4e4) if _dtype_of(query) == "float16" else (MASKED, MASKED)
        bias = ops.where(mask, ops.maximum(ops.cast(bias, "float32"), lowest), hidden)
    mask_or_none = mask if bias is None else None
    options: dict[str, Any] = {"bias": bias, "mask": mask_or_none, "scale": scale, "is_causal": is_causal}
    if dropout:
        output = _with_dropout(query, key, value, dropout, **options)
    else:
        output = ops.dot_product_attention(query, key, value, flash_attention=flash_attention, **options)
    if mask is not None:
        output = ops.where(ops.swapaxes(masks.sees_any_key(mask), 1, 2), output, 0.0)
    if visible.queries is not None:
        output = ops.where(ops.swapaxes(masks.expand_query_mask(visible.queries), 1, 2), output, 0.0)
    return output


def _with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rate: float,
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    """`keras.ops.dot_product_attention` with dropout, on PyTorch."""
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    if mask is not None:  # in booleans, PyTorch gives NaN for a query that may not attend to any key
        bias = torch.where(mask, 0.0, -2e4 if _dtype_of(query) == "float16" else MASKED)
    output = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        attn_mask=None if bias is None else bias.to(query.dtype),
        dropout_p=rate,
        is_causal=is_causal,
        scale=scale,
    )
    return output.transpose(1, 2)


def attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    otherwise: Callable[..., Tensor],
    *,
    scale: float | None = None,
) -> Tensor:
    """`attend_fused` on CUDA, `otherwise` on other platforms. JAX chooses when it lowers the program for a platform.

    Args:
        query, key, value, visible, scale: as in `attend_fused`.
        otherwise: a function of query, key and value, for the other platforms.
    """

    def on_cuda(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_fused(query, key, value, visible, scale=scale)

    return jax.lax.platform_dependent(query, key, value, cuda=on_cuda, default=otherwise)


def prefers_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    bias: Tensor | None,
    training: bool | None,
    long: bool,
) -> bool:
    """Whether a kernel computes what `attend` does for these tensors and, as far as was measured, is not slower.

    Args:
        query, key, value, visible, bias: as in `attend_fused`.
        training: whether a gradient will be computed.
        long: whether T * S is so large that no tensor of that size may be allocated.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow" or keras.config.is_flash_attention_enabled() is False:
        return False
    if query.shape[3] != value.shape[3]:
        return False  # PyTorch has such kernels only on some devices, cuDNN has none
    kind = visible.kind if bias is None else "pairs"
    if backend == "torch":
        return not (long and kind == "pairs") and _torch_prefers(query, key, bias, training)
    return not (long and kind in ("keys", "pairs")) and bias is None and _jax_prefers(query, key, value)


def can_drop(query: Tensor) -> bool:
    """Whether the kernels can drop scores: those of PyTorch for GPUs."""
    return keras.backend.backend() == "torch" and bool(query.device.type == "cuda")


def _torch_prefers(query: Tensor, key: Tensor, bias: Tensor | None, training: bool | None) -> bool:
    (_, queries, heads, _), keys, key_heads = query.shape, key.shape[1], key.shape[2]
    if key_heads != heads and (key_heads == 1 or queries < _FEW_QUERIES):
        return False  # there is no kernel for one key head; Keras copies several for each query head
    device, dtype = query.device.type, _dtype_of(query)
    if bias is not None and dtype != "float32":
        return False  # it would be rounded
    if dtype == "float64" or not (device == "cpu" or (device == "cuda" and query.shape[3] % 8 == 0)):
        return False  # not every device has kernels for these
    return not (device == "cpu" and training and dtype == "bfloat16" and queries * keys < _SLOW_GRADIENT)


def _jax_prefers(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if not _has_cuda() or isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return False  # cuDNN's operation requires the same sharding of queries, keys and values
    size, dtypes = query.shape[3], {_dtype_of(x) for x in (query, key, value)}
    # cuDNN refuses the gradient for odd lengths; with rematerialization Keras could then no longer choose another way.
    is_even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    return size % 8 == 0 and size <= _LARGEST_HEAD and is_even and dtypes in ({"float16"}, {"bfloat16"})


def _has_cuda() -> bool:
    """Whether there is an NVIDIA GPU that cuDNN has attention for: Ampere or later."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform in ("gpu", "cuda") and capability.isdecimal() and int(capability) >= 8


def _dtype_of(x: Tensor) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))

"""Attention by the fused kernels that Keras offers: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, K key heads, H head, V value head. On PyTorch the kernels of
`scaled_dot_product_attention`, for CPUs and GPUs; on JAX those of cuDNN, for half precision on GPUs. Dao et al. 2022,
arXiv:2205.14135.
"""

import dataclasses

import keras
from keras import ops

from keras_tx.layers import masks
from keras_tx.layers.attention.dense import MASKED, opened, sees
from keras_tx.optional import Lazy

jax = Lazy("jax")

_SLOW_GRADIENT = 192 * 192  # T * S below which, in bfloat16 on a CPU, the kernel's gradient takes longer than ours
_FEW_QUERIES = 64  # that copies of the keys for each query head cost more than the kernel brings
_LARGEST_HEAD = 128  # of cuDNN before Hopper GPUs


def attend_fused(query, key, value, visible, *, bias=None, scale=None, flash_attention=None):
    """`attend` by a kernel, without dropout; returns the output alone.

    Args:
        query, key, value: (B, T, N, H), (B, S, K, H), (B, S, K, V).
        visible: a `masks.Visible`.
        bias: broadcastable to (B, N, T, S), or None. Keras rounds it to the dtype of `query`.
        scale: factor of the products; 1 / sqrt(H) if None.
        flash_attention: as of `keras.ops.dot_product_attention`: True raises where there is no flash attention.
    """
    lengths = ops.shape(query)[1], ops.shape(key)[1]
    is_causal = bias is None and _kind(visible) == "causal"
    # The kernel need not know which outputs become zeros.
    mask = None if is_causal else dataclasses.replace(visible, queries=None).whole(*lengths)
    if mask is not None and keras.backend.backend() == "jax":  # cuDNN broadcasts over batch and heads alone
        mask = ops.broadcast_to(mask, (*ops.shape(mask)[:2], *lengths))
    if bias is not None:  # the kernels take a mask or a bias
        mask = opened(mask, bias)
        lowest, hidden = (-2e4, -4e4) if _dtype_of(query) == "float16" else (MASKED, MASKED)  # else it were infinite
        bias = ops.where(mask, ops.maximum(ops.cast(bias, "float32"), lowest), hidden)
    output = ops.dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask if bias is None else None,
        scale=scale,
        is_causal=is_causal,
        flash_attention=flash_attention,
    )
    if mask is not None:
        output = ops.where(ops.swapaxes(sees(mask), 1, 2), output, 0.0)
    if visible.queries is not None:
        output = ops.where(ops.swapaxes(masks.queries(visible.queries), 1, 2), output, 0.0)
    return output


def attend_on_cuda(query, key, value, visible, otherwise, *, scale=None):
    """`attend_fused` in programs for CUDA, `otherwise` in those for other platforms. On JAX, which knows only then.

    Args:
        otherwise: a function of query, key and value.
    """

    def on_cuda(query, key, value):
        return attend_fused(query, key, value, visible, scale=scale)

    return jax.lax.platform_dependent(query, key, value, cuda=on_cuda, default=otherwise)


def takes_fused(query, key, value, visible, *, bias, training, long):
    """Whether a kernel computes what `attend` does for these tensors, and, as far as was measured, no slower.

    Args:
        query, key, value, visible, bias: as of `attend_fused`.
        training: whether a gradient is to be expected.
        long: whether T * S is so large that nothing of that size may be made.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow" or keras.config.is_flash_attention_enabled() is False:
        return False
    if query.shape[3] != value.shape[3]:
        return False  # PyTorch has kernels for this on some devices only, cuDNN none
    kind = _kind(visible) if bias is None else "pairs"
    if backend == "torch":
        return not (long and kind == "pairs") and _takes_torch(query, key, bias, training)
    return not (long and kind in ("keys", "pairs")) and bias is None and _takes_jax(query, key, value)


def _kind(visible):
    """What a kernel is to be told of keys: None, nothing; "causal", that alone; "keys", the real ones; "pairs", all."""
    if visible.documents is not None or visible.window or visible.mask is not None:
        return "pairs"
    if not visible.causal:
        return "keys" if visible.keys else None
    is_from_first = isinstance(visible.start, int) and visible.start == 0
    return "causal" if is_from_first and not visible.keys else "pairs"


def _takes_torch(query, key, bias, training):
    (_, queries, heads, _), keys, key_heads = query.shape, key.shape[1], key.shape[2]
    if key_heads != heads and (key_heads == 1 or queries < _FEW_QUERIES):
        return False  # there is no kernel for one key head; Keras copies several for each query head
    device, dtype = query.device.type, _dtype_of(query)
    if bias is not None and dtype != "float32":
        return False  # it would be rounded
    if dtype == "float64" or not (device == "cpu" or (device == "cuda" and query.shape[3] % 8 == 0)):
        return False  # not on every device there is one
    return not (device == "cpu" and training and dtype == "bfloat16" and queries * keys < _SLOW_GRADIENT)


def _takes_jax(query, key, value):
    if not _has_cuda() or isinstance(keras.distribution.distribution(), keras.distribution.ModelParallel):
        return False  # cuDNN's operation wants queries, keys and values divided alike
    size, dtypes = query.shape[3], {_dtype_of(x) for x in (query, key, value)}
    # The gradient is refused for odd lengths; with rematerialization, where Keras can no longer take another way.
    is_even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    return size % 8 == 0 and size <= _LARGEST_HEAD and is_even and dtypes in ({"float16"}, {"bfloat16"})


def _has_cuda():
    """Whether there is an NVIDIA GPU that cuDNN has attention for, Ampere or later."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform in ("gpu", "cuda") and capability.isdecimal() and int(capability) >= 8


def _dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)

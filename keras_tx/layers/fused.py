"""Attention by the fused kernels that Keras offers: (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V).

B batch, T queries, S keys, N query heads, K key heads, H head, V value head. On PyTorch the kernels of
`scaled_dot_product_attention`, for CPUs and GPUs; on JAX those of cuDNN, for half precision on GPUs. Dao et al. 2022,
arXiv:2205.14135.
"""

import dataclasses

import keras
from keras import ops

from keras_tx.layers import masks
from keras_tx.layers.attend import MASKED, opened, sees
from keras_tx.optional import Lazy

jax = Lazy("jax")

_SLOW_GRADIENT = 192 * 192  # T * S below which, in bfloat16 on a CPU, the kernel's gradient takes longer than ours
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


def takes_fused(query, key, value, visible, *, bias, training, long):
    """Whether there is a kernel for these tensors that computes what `attend` does, and is faster.

    Args:
        query, key, value, visible, bias: as of `attend_fused`.
        training: whether a gradient is to be expected.
        long: whether masks of T * S numbers are too large.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow" or keras.config.is_flash_attention_enabled() is False:
        return False
    kind = _kind(visible) if bias is None else "pairs"
    if backend == "torch":
        return not (long and kind == "pairs") and _takes_torch(query, key, bias, training)
    return not (long and kind in ("keys", "pairs")) and bias is None and _takes_jax(query, key, value)


def _kind(visible):
    """What a kernel is to be told of keys: None, which are real, "causal" alone, or a mask of all pairs."""
    if visible.documents is not None or visible.window or visible.mask is not None:
        return "pairs"
    if not visible.causal:
        return "keys" if visible.keys else None
    is_from_first = isinstance(visible.start, int) and visible.start == 0
    return "causal" if is_from_first and not visible.keys else "pairs"


def _takes_torch(query, key, bias, training):
    on_cpu, dtype = query.device.type == "cpu", _dtype_of(query)
    if bias is not None and dtype != "float32":
        return False  # it would be rounded
    slow = on_cpu and training and dtype == "bfloat16" and query.shape[1] * key.shape[1] < _SLOW_GRADIENT
    return not slow and (on_cpu or query.device.type == "cuda")


def _takes_jax(query, key, value):
    device = jax.config.jax_default_device or jax.devices()[0]
    if getattr(device, "platform", device) not in ("gpu", "cuda"):
        return False
    size, dtypes = query.shape[3], {_dtype_of(x) for x in (query, key, value)}
    # The gradient is refused for odd lengths; with rematerialization, where Keras can no longer take another way.
    is_even = query.shape[1] % 2 == 0 and key.shape[1] % 2 == 0
    fits = size == value.shape[3] and size % 8 == 0 and size <= _LARGEST_HEAD and is_even
    return fits and dtypes in ({"float16"}, {"bfloat16"})


def _dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)

"""Masks: lengths and ids -> boolean, broadcastable to (B, N, T, S). True = may look.

B batch, N heads, T queries, S keys. A padding mask is (B, T), True at real tokens, as Keras attaches it to tensors.
"""

import keras
from keras import ops
from keras.src.backend import get_keras_mask  # the public API has no reader of the mask that Keras attaches

from keras_tx.layers import folding
from keras_tx.layers.ids import values_of


def queries(mask):
    """(B, T) real queries -> (B, 1, T, 1)."""
    return ops.cast(mask, "bool")[:, None, :, None]


def keys(mask):
    """(B, S) real keys -> (B, 1, 1, S)."""
    return ops.cast(mask, "bool")[:, None, None, :]


def causal(num_queries, num_keys, start=0):
    """(T, S): query i, standing at key `start + i`, may look at keys up to its own."""
    query, key = _indices(num_queries, num_keys, start)
    return key <= query


def window(num_queries, num_keys, size, start=0):
    """(T, S): query i may look at keys less than `size` away on either side."""
    query, key = _indices(num_queries, num_keys, start)
    return ops.abs(query - key) < size


def join(*masks):
    """What all `masks` allow; a mask of None allows all."""
    joined = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else ops.logical_and(joined, mask)
    return joined


def for_attention(
    query, key, axes, query_mask, value_mask, key_mask, attention_mask, use_causal_mask=False, sliding_window=None
):
    """All masks of `query` (B, ..., N, H) and `key` joined, broadcastable to (B', N, T, S) of `folding.fold`."""
    if len(axes) > 1 and (use_causal_mask or sliding_window):
        raise ValueError(
            "`use_causal_mask` and `sliding_window` need a single attention axis. Received: "
            f"attention_axes={axes}, use_causal_mask={use_causal_mask}, sliding_window={sliding_window}"
        )
    joined = []
    if attention_mask is not None:
        _check_no_bias(attention_mask)
        joined.append(folding.fold_pairs("attention_mask", ops.cast(attention_mask, "bool"), query, key, axes))
    if query_mask is not None:
        joined.append(queries(folding.fold_padding("query_mask", query_mask, query, axes)))
    for name, mask in (("value_mask", value_mask), ("key_mask", key_mask)):
        if mask is not None:
            joined.append(keys(folding.fold_padding(name, mask, key, axes)))
    num_queries, num_keys = ops.shape(query)[axes[0]], ops.shape(key)[axes[0]]
    if use_causal_mask:
        joined.append(causal(num_queries, num_keys)[None, None])
    if sliding_window:
        joined.append(window(num_queries, num_keys, sliding_window)[None, None])
    return join(*joined)


def _check_no_bias(attention_mask):
    """Raises where a mask is seen to be one of 0 and -1e9 that is meant to be added: all it says would be reversed."""
    if "float" in keras.backend.standardize_dtype(attention_mask.dtype):
        values = values_of(attention_mask)
        if values is not None and values.size and values.min() < 0:
            raise ValueError(
                "`attention_mask` must be boolean, or 1 and 0; what is added to the products is `attention_bias`. "
                f"Received: attention_mask with the value {values.min()}"
            )


def positions(mask):
    """(B, T) real tokens -> (B, T) int32, the number of real tokens before each: the same with and without padding."""
    return ops.maximum(ops.cumsum(ops.cast(mask, "int32"), axis=1) - 1, 0)


def _indices(num_queries, num_keys, start):
    return start + ops.arange(num_queries, dtype="int32")[:, None], ops.arange(num_keys, dtype="int32")[None, :]


class MaskedLayer(keras.layers.Layer):
    """A layer whose call argument `mask` (B, T) is filled from the Keras mask of its first argument.

    Keras itself does so only when there is no other tensor argument, and its operators (`x * 8`, `x + y`,
    `ops.tanh(x)`) drop the mask. Here the mask is found in both cases: a symbolic input without one takes that of the
    tensors it was computed from, position by position.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)

    def __call__(self, inputs, *args, **kwargs):
        mask = args[0] if args else kwargs.pop("mask", None)
        if mask is None:
            mask = lost_mask(inputs) if isinstance(inputs, keras.KerasTensor) else get_keras_mask(inputs)
        if isinstance(mask, (list, tuple)):
            mask = ops.convert_to_tensor(mask)
        if mask is not None:
            folding.check_shape("mask", mask, inputs.shape[:2], exact=True)
            kwargs["mask"] = mask
        if args[1:]:
            return super().__call__(inputs, kwargs.pop("mask", None), *args[1:], **kwargs)
        return super().__call__(inputs, **kwargs)


def lost_mask(x):
    """The mask (B, T) that an operator between `x` and its sources dropped; None if `x` has its own, or there is none.

    Looks back through element-wise operators, and through layers that hand the mask of their input on.
    """
    if not isinstance(x, keras.KerasTensor) or get_keras_mask(x) is not None:
        return None
    return _mask_of(x, {})


def _mask_of(x, seen):
    if id(x) not in seen:
        seen[id(x)] = get_keras_mask(x)
        if seen[id(x)] is None:
            found = [_mask_of(source, seen) for source in _aligned_sources(x)]
            fitting = {id(mask): mask for mask in found if mask is not None and mask.shape[1] == x.shape[1]}
            seen[id(x)] = join(*fitting.values())
    return seen[id(x)]


def _aligned_sources(x):
    """The tensors from which `x` was computed position by position."""
    operation, node_index, _ = getattr(x, "_keras_history", (None, 0, 0))
    if operation is None or len(x.shape) < 2:
        return []
    sources = operation._inbound_nodes[node_index].input_tensors
    if isinstance(operation, keras.layers.Layer):
        if isinstance(operation, _MERGES):
            return sources
        hands_on = operation.supports_masking and type(operation).compute_mask is keras.layers.Layer.compute_mask
        return sources[:1] if hands_on or isinstance(operation, keras.layers.RMSNormalization) else []
    return [source for source in sources if len(source.shape) == len(x.shape)] if _is_elementwise(operation) else []


def _is_elementwise(operation):
    return type(operation).__module__.startswith("keras.") and type(operation).__name__ in _ELEMENTWISE


_MERGES = (
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)
# Class names, because `keras.ops` exports only the functions.
_ELEMENTWISE = frozenset(
    "Abs Absolute Add Cast Clip Cos Divide Elu Exp Floor Gelu HardSwish Identity LeakyRelu Log Maximum Minimum "
    "Multiply Negative Power Relu Relu6 Rsqrt Selu Sigmoid Sign Silu Sin Softplus Softsign Sqrt Square StopGradient "
    "Subtract Tanh TrueDivide Where".split()
)

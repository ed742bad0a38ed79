"""Checks the arguments of `MultiHeadAttention` (constructor and call) and converts them to one form.

Every function raises a `ValueError` for an argument that is not valid.
"""

import inspect
from numbers import Integral
from typing import Any

import keras
from keras import ops

from keras_tx.layers.attention.axes import Axes, fold_padding, fold_pairs
from keras_tx.layers.cache import KeyValue, Memory, SharedMemory
from keras_tx.layers.masks import Visible, join
from keras_tx.layers.rotary import RotaryEmbedding
from keras_tx.layers.shapes import check_dense, check_shape
from keras_tx.types import Shape, Tensor


def check_output_shape(output_shape: Any) -> tuple[int, ...] | None:
    """`output_shape`, None or one or several positive integers -> None or a tuple of them."""
    if output_shape is None:
        return None
    sizes = [output_shape] if _is_integer(output_shape) else output_shape
    if isinstance(sizes, (tuple, list)) and all(_is_integer(size) and size > 0 for size in sizes):
        return tuple(int(size) for size in sizes)
    raise ValueError(f"Invalid `output_shape`: must be a positive int, or a tuple of them. Received: {output_shape!r}")


def check_attention_axes(attention_axes: Any) -> Axes | None:
    """`attention_axes`, None or one or several integers -> None or a tuple of them."""
    if attention_axes is None:
        return None
    axes = [attention_axes] if _is_integer(attention_axes) else attention_axes
    if isinstance(axes, (tuple, list)) and all(_is_integer(axis) for axis in axes):
        return tuple(int(axis) for axis in axes)
    raise ValueError(f"`attention_axes` must be an int, list, or tuple. Received: attention_axes={attention_axes!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def make_rotary(rotary: Any) -> keras.layers.Layer | None:
    """`rotary`: a layer, its config, True for a `RotaryEmbedding` with its defaults, or None or False for none."""
    if isinstance(rotary, dict):
        rotary = keras.saving.deserialize_keras_object(rotary)
    if rotary is True:
        return RotaryEmbedding(name="rotary")
    if rotary is None or rotary is False:
        return None
    if isinstance(rotary, keras.layers.Layer) and "positions" in inspect.signature(rotary.call).parameters:
        rotary.supports_masking = True  # Keras would warn of a lost mask; the attention layer passes it on
        return rotary
    raise ValueError(
        "`rotary` must be True, None or a layer, such as a RotaryEmbedding, whose `call` takes `inputs` and "
        f"`positions`. Received: rotary={rotary!r}"
    )


def check_options(layer: Any) -> None:
    """Raises unless the options of `layer`, a `MultiHeadAttention`, fit together."""
    if layer.num_heads % layer.num_key_value_heads:
        raise ValueError(
            "`num_heads` must be divisible by `num_key_value_heads`. Received: "
            f"num_heads={layer.num_heads}, num_key_value_heads={layer.num_key_value_heads}"
        )
    if layer.flash_attention and (layer.dropout or layer.hard_attention):
        raise ValueError(
            "`flash_attention=True` excludes `dropout` and `hard_attention`. Received: "
            f"flash_attention={layer.flash_attention}, dropout={layer.dropout}, hard_attention={layer.hard_attention}"
        )


def check_cache(cache: Any, start: Any, unpadding: Any) -> None:
    """Raises unless the call arguments fit together."""
    if isinstance(cache, KeyValue) != (start is not None):
        raise ValueError(
            "`start` must be given with a `KeyValue` as `cache`, and only with one. Received: "
            f"start={start}, cache of type {type(cache).__name__}"
        )
    if unpadding is not None and cache is not None:
        raise ValueError(f"`unpadding` must come without a `cache`. Received: cache of type {type(cache).__name__}")


def check_call(layer: Any, query: Any, value: Any, key: Any, others: dict[str, Any]) -> None:
    """Raises for tensors that are not dense, a missing `value`, and `positions` without `rotary`."""
    check_dense(layer, (query, value, key), others)
    if value is None and not isinstance(others.get("cache"), (Memory, SharedMemory)):
        raise ValueError("`value` must be given, unless `cache` is what `new_memory` returned. Received: value=None")
    if others.get("positions") is not None and layer.rotary is None:
        raise ValueError("`positions` must be given only with `rotary`. Received: positions, rotary=None")


def mask_slots(given: dict[str, Any]) -> None:
    """Sets the masks among the call arguments that are for all slots of a cache.

    Without a `value_mask` all slots are real; Keras would fill in the mask of the queries. For a `KeyValue`, `key_mask`
    becomes a part of `attention_mask`, so that rotary positions are counted by `value_mask` alone, as without a cache.
    """
    if given.get("value_mask") is None:
        given["value_mask"] = ops.ones((ops.shape(given["query"])[0], ops.shape(given["cache"].key)[2]), dtype="bool")
    if isinstance(given["cache"], KeyValue) and given.get("key_mask") is not None:
        pairs, keys = given.get("attention_mask"), given.pop("key_mask")[:, None]
        keys = keys if pairs is None or len(pairs.shape) == 3 else keys[:, None]
        given["attention_mask"] = join(pairs, keys)


def slot(start: Any) -> Any:
    """`start`, an integer or a scalar tensor of any integer dtype, or None -> a Python integer, int32 or None."""
    if start is None:
        return None
    if isinstance(start, Integral):
        return int(start)
    is_integer = hasattr(start, "dtype") and keras.backend.is_int_dtype(start.dtype)
    if not is_integer or len(start.shape) > 0:
        raise ValueError(
            f"`start` must be an integer, or a scalar tensor with an integer dtype. Received: start={start!r}"
        )
    return ops.cast(start, "int32")


def check_bias(attention_bias: Tensor) -> None:
    """Raises for other numbers than floats, such as those of a mask."""
    dtype = keras.backend.standardize_dtype(attention_bias.dtype)
    if "float" not in dtype:
        raise ValueError(
            "`attention_bias` must be of floats, which are added to the attention logits; booleans go into "
            f"`attention_mask`. Received: attention_bias of dtype {dtype}"
        )


def folded_bias(attention_bias: Tensor, query: Tensor, key: Tensor, axes: Axes) -> Tensor:
    """`attention_bias`, of floats, as `fold_pairs` returns it."""
    check_bias(attention_bias)
    return fold_pairs("attention_bias", attention_bias, query, key, axes)


def check_shapes(query_shape: Shape, value_shape: Shape, key_shape: Shape) -> None:
    """Raises unless the three have axes for batch, tokens and numbers, and keys and values differ in the last alone."""
    if len(query_shape) < 3 or not len(query_shape) == len(value_shape) == len(key_shape):
        raise ValueError(
            "`query`, `value` and `key` must have the same number of axes, at least three: (batch, tokens, dim). "
            f"Received: query_shape={tuple(query_shape)}, value_shape={tuple(value_shape)} and "
            f"key_shape={tuple(key_shape)}"
        )
    if tuple(value_shape[1:-1]) != tuple(key_shape[1:-1]):
        raise ValueError(
            "All dimensions of `value` and `key`, except the last one, must be equal. Received: "
            f"value_shape={value_shape} and key_shape={key_shape}"
        )


def real_tokens(
    query: Tensor, key: Tensor, query_mask: Any, value_mask: Any, document_ids: Any, start: Any
) -> tuple[Any, Any]:
    """The masks of queries (B, T) and values (B, S) by which positions are counted, each of which may be None.

    Padding between two tokens has no position, whether a mask says so or a 0 in `document_ids`. With a cache (`start`)
    the positions are those of its slots, which only `value_mask` knows.
    """
    if query_mask is not None:
        check_shape("query_mask", query_mask, query.shape[:2], exact=True)
    if start is not None:
        return query_mask, value_mask
    if value_mask is not None:
        check_shape("value_mask", value_mask, key.shape[:2], exact=True)
    if document_ids is None:
        return query_mask, value_mask
    _check_lengths_of_documents(query, key, (1,))
    check_shape("document_ids", document_ids, query.shape[:2], exact=True)
    is_real = ops.not_equal(document_ids, 0)
    return join(query_mask, is_real), join(value_mask, is_real)


def _check_lengths_of_documents(query: Tensor, key: Tensor, axes: Axes) -> None:
    """Raises if queries and keys, which would have the same `document_ids`, differ in number."""
    for axis in axes:
        if None not in (query.shape[axis], key.shape[axis]) and query.shape[axis] != key.shape[axis]:
            raise ValueError(
                "`document_ids` is for self-attention: `query` and `value` must have the same length. Received: "
                f"{query.shape[axis]} queries, {key.shape[axis]} keys"
            )


def visible_keys(
    query: Tensor,
    key: Tensor,
    axes: Axes,
    *,
    query_mask: Tensor | None = None,
    value_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    start: Any = 0,
) -> Visible:
    """All masks of a call as one `Visible`, for the tensors (B', T, N, H) that `fold` makes of `query` and `key`.

    Args:
        query, key: (B, ..., N, H).
        axes: the attended axes.
        query_mask, value_mask, key_mask, attention_mask, document_ids: the call arguments.
        causal, window, start: see `Visible`.
    """
    if None not in (query.shape[0], key.shape[0]) and query.shape[0] != key.shape[0]:
        raise ValueError(
            "`query` and `value` must have the same batch size; likewise `inputs` and `memory`. Received: "
            f"batch sizes {query.shape[0]} and {key.shape[0]}"
        )
    for axis in set(range(1, len(query.shape) - 2)).difference(axes):
        if None not in (query.shape[axis], key.shape[axis]) and query.shape[axis] != key.shape[axis]:
            raise ValueError(
                "`query` and `value` must have the same size along the axes that are not attended over. Received: "
                f"sizes {query.shape[axis]} and {key.shape[axis]} along axis {axis}, attention_axes={axes}"
            )
    if len(axes) > 1 and (causal or window):
        raise ValueError(
            "`use_causal_mask` and `sliding_window` must be used with a single attention axis. Received: "
            f"attention_axes={axes}, use_causal_mask={causal}, sliding_window={window}"
        )
    if attention_mask is not None:
        attention_mask = fold_pairs("attention_mask", ops.cast(attention_mask, "bool"), query, key, axes)
    if query_mask is not None:
        query_mask = fold_padding("query_mask", query_mask, query, axes)
    key_masks = tuple(
        fold_padding(name, mask, key, axes)
        for name, mask in (("value_mask", value_mask), ("key_mask", key_mask))
        if mask is not None
    )
    if document_ids is not None:
        _check_lengths_of_documents(query, key, axes)
        document_ids = fold_padding("document_ids", document_ids, query, axes)
    return Visible(query_mask, key_masks, document_ids, causal, window, attention_mask, start)

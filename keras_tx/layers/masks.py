"""Masks: lengths and ids -> boolean, broadcastable to (B, N, T, S). True = may look.

B batch, N heads, T queries, S keys. A padding mask is (B, T), True at real tokens, as Keras attaches it to tensors.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from keras_tx.functional_graph import source_of
from keras_tx.keras_internals import ELEMENTWISE, get_keras_mask, keep_call_arguments, set_keras_mask
from keras_tx.layers.attention import axes as folding
from keras_tx.layers.configs import Composite
from keras_tx.layers.ids import values_of


def queries(mask):
    """(B, T) real queries -> (B, 1, T, 1)."""
    return ops.expand_dims(ops.cast(mask, "bool"), (1, 3))


def keys(mask):
    """(B, S) real keys -> (B, 1, 1, S)."""
    return ops.expand_dims(ops.cast(mask, "bool"), (1, 2))


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


@dataclass(frozen=True)
class Visible:
    """Which key a query may look at, as parts that cost no (T, S) numbers; True = may look. None allows all.

    Args:
        queries: (B, T), real queries; the others get zeros.
        keys: several (B, S), real keys.
        documents: (B, T) document numbers, T = S: a query looks only at keys of its own; 0 is padding.
        causal: whether query i, standing at key `start + i`, looks at no later key.
        window: how many positions away a key must be less than, on both sides.
        mask: broadcastable to (B, N, T, S), whatever else is to be said.
        start: integer or scalar tensor, the key of the first query.
    """

    queries: Any = None
    keys: tuple = ()
    documents: Any = None
    causal: bool = False
    window: int | None = None
    mask: Any = None
    start: Any = 0

    def whole(self, num_queries, num_keys):
        """All parts joined, broadcastable to (B, N, T, S), or None."""
        parts = [self.mask, None if self.queries is None else queries(self.queries), *map(keys, self.keys)]
        if self.documents is not None:
            parts.append(ops.expand_dims(same_document(self.documents), 1))
        if self.causal:
            parts.append(ops.expand_dims(causal(num_queries, num_keys, self.start), (0, 1)))
        if self.window:
            near = window(num_queries, num_keys, self.window, self.start)
            parts.append(ops.expand_dims(near, (0, 1)))
        return join(*parts)


def for_attention(
    query,
    key,
    axes,
    query_mask=None,
    value_mask=None,
    key_mask=None,
    attention_mask=None,
    document_ids=None,
    *,
    causally=False,
    sliding_window=None,
    start=0,
):
    """All masks of `query` (B, ..., N, H) and `key`, of the tensors (B', T, N, H) that `folding.fold` makes of them.

    The first query stands at the key `start`.
    """
    if len(axes) > 1 and (causally or sliding_window):
        raise ValueError(
            "`use_causal_mask` and `sliding_window` need a single attention axis. Received: "
            f"attention_axes={axes}, use_causal_mask={causally}, sliding_window={sliding_window}"
        )
    if attention_mask is not None:
        _check_no_bias(attention_mask)
        attention_mask = folding.fold_pairs("attention_mask", ops.cast(attention_mask, "bool"), query, key, axes)
    if query_mask is not None:
        query_mask = folding.fold_padding("query_mask", query_mask, query, axes)
    real = [
        folding.fold_padding(name, mask, key, axes)
        for name, mask in (("value_mask", value_mask), ("key_mask", key_mask))
        if mask is not None
    ]
    if document_ids is not None:
        folding.fold_padding("document_ids", document_ids, key, axes)  # raises unless T = S
        document_ids = folding.fold_padding("document_ids", document_ids, query, axes)
    return Visible(query_mask, tuple(real), document_ids, causally, sliding_window, attention_mask, start)


def _check_no_bias(attention_mask):
    """Raises where a mask is seen to be one of 0 and -1e9 that is meant to be added: all it says would be reversed."""
    if "float" in keras.backend.standardize_dtype(attention_mask.dtype):
        values = values_of(attention_mask)
        if values is not None and values.size and values.min() < 0:
            raise ValueError(
                "`attention_mask` must be boolean, or 1 and 0; what is added to the products is `attention_bias`. "
                f"Received: attention_mask with the value {values.min()}"
            )


def same_document(document_ids):
    """(B, T) document numbers of packed sequences -> (B, T, T): a token looks only at its own; 0 is padding."""
    keys = ops.expand_dims(document_ids, 1)
    same = ops.equal(ops.expand_dims(document_ids, 2), keys)
    return ops.logical_and(same, ops.not_equal(keys, 0))


def all_real(key):
    """The keys (B, K, S, H) of a cache -> (B, S), all True."""
    batch, _, slots, _ = ops.shape(key)
    return ops.ones((batch, slots), dtype="bool")


def positions(mask):
    """(B, T) real tokens -> (B, T) int32, the number of real tokens before each: the same with and without padding."""
    return ops.maximum(ops.cumsum(ops.cast(mask, "int32"), axis=1) - 1, 0)


def _indices(num_queries, num_keys, start):
    query, key = ops.arange(num_queries, dtype="int32"), ops.arange(num_keys, dtype="int32")
    return start + ops.expand_dims(query, 1), ops.expand_dims(key, 0)


class MaskedLayer(Composite):
    """A layer whose call argument `mask` (B, T) is filled from the Keras mask of its first argument.

    Keras itself does so only when there is no other tensor argument, and its operators (`x * 8`, `x + y`,
    `ops.tanh(x)`) drop the mask. Here the mask is found in both cases: a symbolic input without one takes that of the
    tensors it was computed from, position by position. An argument `memory` gets its `memory_mask` in the same way.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)
        keep_call_arguments(self)  # `converted` makes them tensors

    def __call__(self, inputs, *args, **kwargs):
        names = list(inspect.signature(self.call).parameters)[1 : 1 + len(args)] if args else []
        arguments = {"inputs": inputs, **dict(zip(names, args, strict=True)), **kwargs}
        if arguments.get("cache") is None:  # with a cache `mask` is that of all keys, not of the inputs
            _fill_mask(arguments, "mask", inputs)
        if arguments.get("memory") is not None:
            _fill_mask(arguments, "memory_mask", arguments["memory"])
        arguments = converted(self, {name: value for name, value in arguments.items() if value is not None})
        outputs = super().__call__(arguments.pop("inputs"), **arguments)
        if arguments.get("cache") is not None:
            set_keras_mask(outputs[0], None)  # where lengths are unknown, Keras takes that of the slots for theirs
        return outputs

    def compute_mask(self, inputs, mask=None):
        return mask if mask is None or mask.shape[1] == inputs.shape[1] else None  # that of the slots of a cache


def _fill_mask(arguments, name, tensor):
    mask = arguments.get(name)
    if mask is None:
        mask = mask_of(tensor) if isinstance(tensor, keras.KerasTensor) else get_keras_mask(tensor)
    if isinstance(mask, (list, tuple)):
        mask = ops.convert_to_tensor(mask)
    if mask is not None:
        folding.check_shape(name, mask, tensor.shape[:2], exact=True)
        arguments[name] = mask


def converted(layer, arguments):
    """The call arguments of `layer` as tensors of its dtype policy; an `attention_bias` keeps the dtype it has.

    Keras would round the bias to bfloat16 before attention, which is float32 there, could add it.
    """

    def convert(x):
        if isinstance(x, keras.KerasTensor):
            return x
        mask = get_keras_mask(x)
        x = layer.dtype_policy.convert_input(x, layer.autocast, layer.input_dtype)
        if mask is not None:
            set_keras_mask(x, mask)
        return x

    return {
        name: _as_it_is(value) if name == "attention_bias" else keras.tree.map_structure(convert, value)
        for name, value in arguments.items()
    }


def _as_it_is(x):
    return x if x is None or isinstance(x, keras.KerasTensor) else ops.convert_to_tensor(x)


def mask_of(x):
    """The mask (B, T) of a symbolic `x`, or, if an operator dropped it, that of the tensors `x` was computed from.

    Looks back through element-wise operators, and through layers that hand the mask of their input on.
    """
    return _mask_of(x, {}) if isinstance(x, keras.KerasTensor) else None


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
    call = source_of(x)
    if call is None or len(x.shape) < 2:
        return []
    operation, sources = call.operation, call.inputs
    if isinstance(operation, keras.layers.Layer):
        if isinstance(operation, _MERGES):
            return sources
        hands_on = operation.supports_masking and type(operation).compute_mask is keras.layers.Layer.compute_mask
        return sources[:1] if hands_on or isinstance(operation, keras.layers.RMSNormalization) else []
    return [source for source in sources if len(source.shape) == len(x.shape)] if type(operation) in ELEMENTWISE else []


_MERGES = (
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Multiply,
    keras.layers.Average,
    keras.layers.Maximum,
    keras.layers.Minimum,
)

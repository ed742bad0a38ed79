"""Finds the padding mask of a symbolic tensor behind operations that lose it: (B, T, ...) -> (B, T).

B batch, T tokens. Keras attaches masks to the outputs of layers. Operators (`x * 8`, `x + y`, `x[:, 1:]`), functions of
`keras.ops` and layers without support for masks lose them. The search goes back to the tensors that still have masks,
and tries out what each operation on the way does (`mask_trial`), once for each call of an operation.
"""

import itertools
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_tx.functional_graph import source_of
from keras_tx.internals.keras_models import (
    Call,
    call_that_made,
    functional_model,
    get_keras_mask,
    inputs_of_nested,
    is_of_keras,
    layers_within,
)
from keras_tx.layers import masks
from keras_tx.layers.mask_patterns import Patterns, Source, patterns_in_trials, sizes_in_trials
from keras_tx.layers.mask_trial import Finding, examine
from keras_tx.layers.trial_runs import Sizes

_MIXES = "mixes padding into other tokens"
_COUNTS = "counts padding tokens, so that its outputs depend on where they stand and how many they are"
_INSIDE = "makes a mask that cannot be read from outside"
# Keras' layers that need no trial where Keras attached a mask: they are frequent, and it is known what they do.
_KNOWN = (keras.layers.Dense, keras.layers.Dropout, keras.layers.Embedding)
_RECURRENT = (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
_PASSED_ON = keras.layers.Layer.compute_mask

_warned: Any = weakref.WeakSet()  # operations
_numbers = itertools.count()


class Loss(NamedTuple):
    """An operation behind which padding changes real tokens.

    Attributes:
        operation: the layer or the operation of `keras.ops`.
        reason: what it does, as a part of a sentence.
    """

    operation: Any
    reason: str


@dataclass(frozen=True)
class Trace:
    """What is known about the mask of a symbolic tensor.

    Attributes:
        tag: the mask that Keras has attached to the tensor.
        mask: symbolic, over the leading axes of the tensor, usually (B, T); None if there is none or it is lost.
        sizes: the sizes of the tensor in trials.
        patterns: its masks in trials; None if there is no mask.
        losses: operations before the tensor that let padding change real tokens.
    """

    tag: Any
    mask: Any
    sizes: Sizes
    patterns: Patterns | None
    losses: tuple[Loss, ...] = ()


def mask_of(x: Any) -> Any:
    """The mask (B, T) of a symbolic `x`, or over all its axes but the last; None if there is none.

    If Keras has lost the mask, it is made from those of the tensors from which `x` was computed.
    """
    return _usable(x, _trace(x)) if isinstance(x, keras.KerasTensor) else None


def find_mask(x: Any, layer: Any, argument: str) -> Any:
    """`mask_of(x)`, with a warning if padding can change real tokens of `x`.

    Args:
        x: a symbolic tensor that is given to `layer`.
        layer: the layer that needs the mask.
        argument: the name of the call argument of `layer` that takes this mask.
    """
    trace = _trace(x)
    mask, losses = _usable(x, trace), trace.losses
    if mask is None and trace.mask is not None:
        losses = (*losses, Loss(_operation_of(x), _MIXES))
    for loss in losses:
        is_seen_later = loss.reason == _INSIDE and loss.operation is _operation_of(x)  # when the model is called
        if is_seen_later or loss.operation in _warned:
            continue
        _warned.add(loss.operation)
        name = loss.operation.name
        # A mask for the layers that follow would be too late: padding is in the real tokens then.
        first = ""
        if loss.reason == _MIXES:
            first = f"Keep padding out of '{name}': by its own mask or, for a convolution, zeros in its place. "
        warnings.warn(
            f"Padding may change the outputs of '{layer.name}' ({type(layer).__name__}) at real tokens, because "
            f"'{name}' ({type(loss.operation).__name__}) before it {loss.reason}. {first}Pass `{argument}=`, True at "
            f"real tokens, to '{layer.name}'.",
            stacklevel=4,
        )
    return mask


def _usable(x: Any, trace: Trace) -> Any:
    """The mask of a trace as layers take it: (B, T), or over all axes of `x` but the last."""
    mask = trace.mask
    if mask is None or len(mask.shape) == 2:
        return mask
    if len(mask.shape) < 2 <= len(x.shape):
        like = x[(slice(None), slice(None), *[0] * (len(x.shape) - 2))]
        return ops.logical_and(ops.expand_dims(mask, 1), ops.ones_like(like, dtype="bool"))
    return mask if len(mask.shape) == len(x.shape) - 1 else None


def _operation_of(x: Any) -> Any:
    call = source_of(x)
    return None if call is None else call.operation


# The search, from a tensor back to those that it was computed from


def _trace(x: Any) -> Trace:
    """The trace of a tensor. It is kept with the tensor, so that each call of an operation is tried out once."""
    waiting, begun = [x], set()
    while waiting:
        tensor = waiting[-1]
        if _known(tensor) is None:
            begun.add(id(tensor))
            made = call_that_made(tensor)
            needed = [] if made is None else _inputs_to_search(made[0], tensor)
            # A layer that returns its input is, for Keras, computed from itself.
            unknown = [one for one in needed if _known(one) is None and id(one) not in begun]
            if unknown:
                waiting += unknown
                continue
            tensor.keras_tx_trace = (
                _begun(tensor, get_keras_mask(tensor)) if made is None else _from_call(tensor, *made)
            )
        waiting.pop()
    found: Trace = x.keras_tx_trace
    return found


def _known(x: Any) -> Trace | None:
    trace = getattr(x, "keras_tx_trace", None)
    return trace if trace is not None and trace.tag is get_keras_mask(x) else None


def _begun(x: Any, mask: Any, losses: tuple[Loss, ...] = (), sizes: Sizes | None = None) -> Trace:
    """The trace of a tensor with a mask that does not depend on others, or with none."""
    sizes, tag = sizes or sizes_in_trials(x), get_keras_mask(x)
    if mask is None:
        return Trace(tag, None, sizes, None, losses)
    if not hasattr(mask, "keras_tx_number"):
        mask.keras_tx_number = next(_numbers)  # different masks must have different patterns
    patterns = patterns_in_trials(sizes[: len(mask.shape)], mask.keras_tx_number)
    return Trace(tag, mask, sizes, patterns, losses)


def _inputs_to_search(call: Call, output: Any) -> list[Any]:
    """The inputs of a call whose traces determine that of its output."""
    if _is_ours(call.operation):
        is_passed_on = get_keras_mask(output) is None and _passes_on(call.operation)
        return call.inputs[:1] if is_passed_on else []
    return [] if type(call.operation) is keras.layers.Embedding and _is_known(call, output) else call.inputs


def _is_known(call: Call, output: Any) -> bool:
    return get_keras_mask(output) is not None and (type(call.operation) in _KNOWN or _skips_padding(call, output))


def _skips_padding(call: Call, output: Any) -> bool:
    """Whether this is a call of a recurrent layer of Keras that was given the mask of its output."""
    layer = call.operation
    directions = [layer.forward_layer, layer.backward_layer] if type(layer) is keras.layers.Bidirectional else [layer]
    return (
        all(type(one) in _RECURRENT for one in directions)
        and not directions[0].go_backwards  # which reverses the tokens, not their mask
        and call.kwargs.get("mask") is get_keras_mask(output)
    )


def _from_call(x: Any, call: Call, place: int) -> Trace:
    """The trace of output `place` of a call, from the traces of its inputs."""
    inputs, tag = _inputs_to_search(call, x), get_keras_mask(x)
    if not inputs:
        return _begun(x, tag)
    traces = [_known(one) or _begun(one, get_keras_mask(one)) for one in inputs]
    losses = tuple(dict.fromkeys(loss for trace in traces for loss in trace.losses))
    if _is_known(call, x):
        return _begun(x, tag, losses)
    if _is_ours(call.operation):
        return replace(traces[0], tag=None, sizes=(*traces[0].sizes[:2], *sizes_in_trials(x)[2:]))
    nested = functional_model(call.operation)
    inner = None if nested is None else _mask_inside(nested, call, place)
    if nested is not None:
        losses += _trace(nested.outputs[place]).losses
    if any(trace.mask is not None for trace in traces):
        return _tried(x, call, place, traces, losses, inner)
    if tag is None and nested is None and _makes_masks(call.operation):
        losses += (Loss(call.operation, _INSIDE),)
    return _begun(x, inner if tag is None else tag, losses)


def _tried(x: Any, call: Call, place: int, traces: list[Any], losses: tuple[Loss, ...], inner: Any) -> Trace:
    """The trace of an output that was computed from tensors with masks."""
    tag = get_keras_mask(x)
    sources = [Source(trace.sizes, trace.mask, trace.patterns) for trace in traces]

    def with_loss(reason: str) -> tuple[Loss, ...]:
        return losses or (Loss(call.operation, reason),)  # the first operation is the cause

    given = inner if any(one is inner for one in call.inputs) else None
    try:
        finding = examine(call, place, sources, has_mask=tag is not None, mask_given=given)
    except Exception as error:  # whatever the operation raises
        is_promised = tag is not None and not is_of_keras(type(call.operation))
        return _begun(x, tag, losses if is_promised else with_loss(f"cannot be tried out ({type(error).__name__})"))
    if finding.counts_padding:
        losses = with_loss(_COUNTS)
    if not (finding.own or finding.kept or finding.moved or finding.clean):
        return _begun(x, tag, with_loss(_MIXES), finding.sizes)
    mask = tag if finding.own else _mask_by(finding, call, place, traces)
    further = (tag if not finding.own and _makes_own_mask(call.operation) else None, None if given is inner else inner)
    found = [one for one in (mask, *further) if one is not None]
    return Trace(tag, _join(found) if found else None, finding.sizes, finding.patterns if found else None, losses)


# Masks for the outputs of calls


def _mask_by(finding: Finding, call: Call, place: int, traces: list[Any]) -> Any:
    if finding.kept is not None:
        return _join([traces[index].mask for index in finding.kept])
    if finding.moved and finding.patterns is not None:
        return _moved_mask(call, place, traces, finding.patterns[0].ndim)
    return None


def _join(found: list[Any]) -> Any:
    """The conjunction of masks over leading axes; those with fewer axes hold for all elements of the other axes."""
    found = list({id(mask): mask for mask in found}.values())
    rank = max(len(mask.shape) for mask in found)
    if len(found) == 1:
        return found[0]
    return masks.join(*[ops.expand_dims(mask, list(range(len(mask.shape), rank))) for mask in found])


def _moved_mask(call: Call, place: int, traces: list[Any], rank: int) -> Any:
    """The mask of a tensor whose elements were moved: what the operation makes of masks in place of its inputs."""
    by_tensor = {id(x): trace.mask for x, trace in zip(call.inputs, traces, strict=True)}

    def mask_for(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            return x
        mask = by_tensor.get(id(x))
        if mask is None:  # tokens without a mask are real; integers and booleans may be indices and conditions
            return ops.ones_like(x) if "float" in x.dtype else x
        mask = ops.cast(mask, x.dtype)
        return ops.ones_like(x) * ops.expand_dims(mask, list(range(len(mask.shape), len(x.shape))))

    operation = call.operation
    if _can_be_copied(operation):  # a second call of a layer would make its `output` ambiguous
        config = {key: value for key, value in operation.get_config().items() if key != "name"}
        operation = type(operation).from_config(config)
    args, kwargs = keras.tree.map_structure(mask_for, (call.args, call.kwargs))
    moved = keras.tree.flatten(operation(*args, **kwargs))[place]
    return ops.not_equal(moved[(*[slice(None)] * rank, *[0] * (len(moved.shape) - rank))], 0)


def _mask_inside(nested: Any, call: Call, place: int) -> Any:
    """The mask that a nested functional model makes for its output, as a function of its inputs here; or None."""
    mask = _trace(nested.outputs[place]).mask
    if mask is None:
        return None
    given = inputs_of_nested(nested, call)
    if len(given) != len(nested.inputs):
        return None
    for inner, outer in zip(nested.inputs, given, strict=True):
        if inner is mask:
            return outer
    return keras.Model(nested.inputs, mask)(given)


# Kinds of operations


def _is_ours(operation: Any) -> bool:
    """Whether this is a layer of keras_tx, which finds masks by itself."""
    return type(operation).__module__.startswith("keras_tx.") and functional_model(operation) is None


def _passes_on(operation: Any) -> bool:
    """Whether a layer of keras_tx treats each token separately or, as attention, needs no mask to hide padding from."""
    return bool(operation.supports_masking) and not _makes_own_mask(operation)


def _makes_own_mask(operation: Any) -> bool:
    """Whether the mask of an output is not just that of the first input."""
    return isinstance(operation, keras.layers.Layer) and type(operation).compute_mask is not _PASSED_ON


def _can_be_copied(operation: Any) -> bool:
    is_plain = isinstance(operation, keras.layers.Layer) and not isinstance(
        operation, keras.layers.Lambda | keras.Model
    )
    return is_plain and is_of_keras(type(operation))


def _makes_masks(operation: Any) -> bool:
    """Whether a layer contains a layer that makes a mask from ids or from values."""
    if not isinstance(operation, keras.layers.Layer) or is_of_keras(type(operation)):
        return False
    return any(
        getattr(layer, "mask_zero", False)
        or getattr(layer, "padding_id", None) is not None
        or isinstance(layer, keras.layers.Masking)
        for layer in layers_within(operation, include_self=False)
    )

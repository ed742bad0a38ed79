"""Finds out what an operation does with padding, by running it on small random tensors: (B, T, ...) -> (B, ...).

A name says little about an operation: `keras.ops` has some hundred that treat each token separately, and a `Lambda` may
do anything. So the operation runs a few times: with other values at padding tokens, with other values everywhere, and
with the real tokens alone. What changes in the output shows what it does.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_tx.internals.keras_models import Call
from keras_tx.layers.mask_patterns import Patterns, Source, distinct, guesses, has_sizes, new_origins
from keras_tx.layers.trial_runs import Arrays, Runner, Sizes, draw, kind_of, quietly, redraw

_LONG = 65537  # more tokens than a slice or a crop keeps
_BASE = 128  # up to this number, bfloat16 represents all integers


@dataclass(frozen=True)
class Finding:
    """What an operation does with padding.

    Attributes:
        sizes: the sizes of the output in trials.
        kept: the indices, among the inputs, of those whose masks are together the mask of the output; or None.
        moved: whether the operation only moves elements (slices, joins, transposes), so that it moves masks as well.
        own: whether the mask that Keras attaches to the output is right.
        clean: whether the output depends on no padding at all.
        counts_padding: whether the output at real tokens depends on how many padding tokens stand before or after them.
        patterns: the mask of the output in trials, over the leading axes; None if it is lost, or not needed.
    """

    sizes: Sizes
    kept: tuple[int, ...] | None = None
    moved: bool = False
    own: bool = False
    clean: bool = False
    counts_padding: bool = False
    patterns: Patterns | None = None


def examine(
    call: Call, place: int, sources: list[Source], *, has_mask: bool = False, mask_given: Any = None
) -> Finding:
    """What the operation of `call` does with padding in its inputs.

    Args:
        call: with at least one input that has a mask.
        place: the index of the output in question.
        sources: one for each of `call.inputs`.
        has_mask: whether Keras attached a mask to the output.
        mask_given: one of the inputs that is known to be the mask of the others.

    Raises:
        Exception: whatever the operation raises for small tensors.
    """
    failure: Exception | None = None
    for guess in guesses(call, place, sources):
        try:
            return _Trial(call, place, distinct(guess), mask_given).finding(has_mask)
        except Exception as error:  # a user's operation may raise anything
            failure = failure or error
    raise failure or ValueError("The operation has no inputs.")


class _Trial:
    """The runs for one call. Values and masks are NumPy arrays by the id of a symbolic tensor."""

    def __init__(self, call: Call, place: int, sources: list[Source], mask_given: Any) -> None:
        self.call, self.place, self.sources = call, place, sources
        self.tensors = {id(x): x for x in call.inputs}
        self.sizes = {id(x): source.sizes for x, source in zip(call.inputs, sources, strict=True)}
        self.patterns = {id(x): one.patterns for x, one in zip(call.inputs, sources, strict=True) if one.patterns}
        self.masked = list(self.patterns)
        self.random = np.random.default_rng(0)
        given = {} if mask_given is None else {id(mask_given): self.masked[0]}
        self.runner = Runner(call, place, {**self._masks_by_name(), **given}, self.random)

    def finding(self, has_mask: bool) -> Finding:
        """See `examine`."""
        masks = {key: patterns[0] for key, patterns in self.patterns.items()}
        values = {key: self._draw(key) for key in self.tensors}
        first, own, changed = self._run_with_other_padding(values, masks)
        if not has_sizes(first.shape, self.call, self.place, self.sources):
            raise ValueError(f"Keras expects another shape. Received: {first.shape}")
        if has_mask and own is not None and not changed[own].any():
            counts = self._counts_padding("own")
            return Finding(first.shape, own=True, counts_padding=counts, patterns=(own, new_origins(own.shape)))
        every = _join(list(masks.values()))
        is_same = every is not None and np.array_equal(every, masks[self.masked[0]])
        places = None
        for kept in [self.masked] if is_same else [*[[key] for key in self.masked], self.masked]:
            mask = _join([masks[key] for key in kept])
            if mask is None or mask.shape != first.shape[: mask.ndim]:
                continue
            if not self._keeps_length(mask.ndim, kept, is_changed=changed.any()):
                continue
            if not changed[mask].any() and np.isfinite(first[mask]).any():
                indices = tuple(index for index, x in enumerate(self.call.inputs) if id(x) in kept)
                patterns = mask, _join_origins([self.patterns[key][1] for key in kept])
                places = self._places(values) if is_same or len(self.masked) == 1 else None
                if places is not None and not self._stay(places, patterns[1]):
                    break  # tokens are permuted; in this mask no padding happened to land on the place of a real one
                if places is None and self._mixes_within_blocks(values, kept):
                    break  # this mask happened to begin and end with a block
                counts = self._counts_padding("kept")
                return Finding(first.shape, kept=indices, counts_padding=counts, patterns=patterns)
        places = self._places(values) if first.ndim and places is None else places
        if places is not None:
            counts, patterns = self._counts_padding("moved"), self._moved_patterns(values, places)
            return Finding(first.shape, moved=True, counts_padding=counts, patterns=patterns)
        return Finding(first.shape, clean=not changed.any())

    # What the operation does

    def _run_with_other_padding(self, values: Arrays, masks: Arrays) -> tuple[Any, Any, Any]:
        """The output, its own mask, and which elements of the output other values at padding change."""
        others = {**values, **{key: self._elsewhere(key, values[key], masks[key]) for key in self.masked}}
        (first, own), (second, _) = (self.runner.run(given, masks) for given in (values, others))
        return first, own, ~_equal(first, second, self._tolerance(1e-4, 1e-2))

    def _mixes_within_blocks(self, values: Arrays, kept: list[int]) -> bool:
        """Whether padding changes real tokens under a mask that begins and ends within a block of tokens."""
        masks = {key: np.ones_like(patterns[0]) for key, patterns in self.patterns.items()}
        for one in masks.values():
            if one.ndim == 2 and one.shape[1] > 2:
                one[0, 0] = one[:, -1] = False
        mask = _join([masks[key] for key in kept])
        return bool(self._run_with_other_padding(values, masks)[2][mask].any())

    def _keeps_length(self, rank: int, kept: list[int], is_changed: bool) -> bool:
        """Whether the output has as many tokens as the inputs `kept` for any number of tokens: `x[:, :100]` has not.

        A shape for inputs of different lengths is no proof: Keras' `Concatenate` has one, and raises when it runs. So
        does attention to tokens whose mask is an argument, but that hides padding: nothing in its output `is_changed`.
        """
        if rank < 2:
            return True
        length = max(self.sizes[key][1] for key in self.masked)
        tokens = [key for key, sizes in self.sizes.items() if len(sizes) > 1 and sizes[1] == length]
        for key in kept if len(tokens) > 1 else []:  # such as the queries of attention to them
            if self._length_with([key], tokens) not in (None, _LONG):
                if not is_changed or self._runs_with_longer(key):
                    return False
        return self._length_with(tokens, tokens) in (None, _LONG)

    def _runs_with_longer(self, key: int) -> bool:
        """Whether the operation runs where this input has a token more than the others."""
        batch, length, *others = self.sizes[key]
        sizes = {**self.sizes, key: (batch, length + 1, *others)}
        try:
            self.runner.run({k: draw(kind_of(x), sizes[k], self.random) for k, x in self.tensors.items()}, {})
        except Exception:  # whatever the operation raises
            return False
        return True

    def _length_with(self, longer: list[int], tokens: list[int]) -> int | None:
        """The number of tokens of the output where these inputs have `_LONG`; None if it is unknown."""

        def resized(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor) or id(x) not in tokens:
                return x
            length = _LONG if id(x) in longer else self.sizes[id(x)][1]
            return keras.KerasTensor((x.shape[0], length, *x.shape[2:]), x.dtype)

        args, kwargs = keras.tree.map_structure(resized, (self.call.args, self.call.kwargs))
        try:
            with quietly():
                specs = keras.tree.flatten(self.call.operation.compute_output_spec(*args, **kwargs))
        except Exception:  # the operation is for one length only, or for inputs of the same length
            return None
        found: int | None = specs[self.place].shape[1]
        return found

    def _counts_padding(self, kind: str) -> bool:
        """Whether the output at real tokens differs from that for the real tokens alone, in a call of any length."""
        rows = {key: masks[0].shape for key, masks in self.patterns.items() if masks[0].ndim == 2}
        free = [shape for key, shape in rows.items() if self.tensors[key].shape[1] is None]
        known = [x.shape[1] for x in (*self.call.inputs, self.call.outputs[self.place]) if len(x.shape) > 1]
        if not free or free[0][1] in known:
            return False
        length = free[0][1]
        real = max(1, length * 7 // 12)
        pattern = np.zeros(free[0], "bool")
        pattern[0, -real - 1 : -1], pattern[1:, :real] = True, True
        padded, alone, masks, ones = {}, {}, {}, {}
        for key, x in self.tensors.items():
            padded[key] = alone[key] = self._draw(key)
            sizes = self.sizes[key]
            if sizes[:2] == pattern.shape and x.shape[1] is None:
                alone[key] = padded[key][pattern].reshape((len(pattern), real, *sizes[2:]))
            elif len(sizes) > 1 and sizes[1] == length and x.shape[1] is None:
                alone[key] = padded[key][:, :real]
            elif sizes and sizes[0] == length and x.shape[0] is None:
                alone[key] = padded[key][:real]
        for key, (given, _) in self.patterns.items():
            masks[key] = pattern if given.shape == pattern.shape else np.ones(given.shape, "bool")
            ones[key] = np.ones(alone[key].shape[: given.ndim], "bool")
        try:
            (first, own), (second, own_alone) = self.runner.run(padded, masks), self.runner.run(alone, ones)
            moved = self._run_on_masks(masks, padded) if kind == "moved" else None
        except Exception:  # the operation is for some lengths only
            return False
        if first.ndim < 2 or first.shape[1] != length:
            return False
        at = own if kind == "own" else pattern if moved is None else moved.any(axis=tuple(range(2, moved.ndim)))
        with_padding = first[at]
        without = second[own_alone] if kind == "own" else second.reshape((-1, *second.shape[2:]))
        is_same = with_padding.shape == without.shape
        return not (is_same and _equal(with_padding, without, self._tolerance(5e-3, 5e-2)).all())

    def _places(self, values: Arrays) -> Any:
        """The place of each element of the output among all elements of the masked inputs; -1 for constants.

        None if the operation does more than to move elements.
        """
        operation = self.call.operation
        is_layer = isinstance(operation, keras.layers.Layer)
        if (is_layer and operation.weights) or any(kind_of(self.tensors[key]) == "bool" for key in self.masked):
            return None
        sizes = [self.sizes[key] for key in self.masked]
        ends = np.cumsum([math.prod(size) for size in sizes])
        digits: list[Any] = []
        codes = np.arange(ends[-1])  # the number of each element, in digits that any dtype represents
        while not digits or codes.any():
            digits.append(codes % _BASE + 1)
            codes = codes // _BASE
        inputs = [*digits, self.random.integers(-_BASE, 0, ends[-1])]  # negative: none is True
        outputs = []
        for numbers in inputs:
            parts = zip(self.masked, np.split(numbers, ends[:-1]), sizes, strict=True)
            given = {**values, **{key: part.reshape(size) for key, part, size in parts}}
            outputs.append(self.runner.run(given, {})[0])
        *found, last = outputs
        is_digit = np.all([(one >= 1) & (one <= _BASE) & (one == np.round(one)) for one in found], axis=0)
        index = sum(np.where(is_digit, one - 1, 0).astype("int64") * _BASE**n for n, one in enumerate(found))
        is_moved = is_digit & (index < ends[-1]) & (last == inputs[-1][np.minimum(index, ends[-1] - 1)])
        is_constant = np.all([_equal(one, last, 0.0) for one in found], axis=0)
        return np.where(is_moved, index, -1) if is_moved.any() and (is_moved | is_constant).all() else None

    def _stay(self, places: Any, origins: Any) -> bool:
        """Whether each element of the output is one of the same token, or a constant."""
        return bool(((places < 0) | (self._origins()[places] == _expand(origins, places.ndim))).all())

    def _moved_patterns(self, values: Arrays, places: Any) -> Patterns:
        """The masks of the output, over as few leading axes as they need, if the operation moves masks as well."""
        moved = self._run_on_masks({key: self.patterns[key][0] for key in self.masked}, values)
        origins = np.where(places < 0, moved, self._origins()[places])
        rank = 1
        while (origins != origins[(..., *[slice(0, 1)] * (origins.ndim - rank))]).any():
            rank += 1
        first, second = (one[(..., *[0] * (one.ndim - rank))] for one in (moved, origins))
        return first, second

    def _run_on_masks(self, masks: Arrays, values: Arrays) -> Any:
        """The output, as booleans, for masks in place of the inputs that have masks."""
        full = {key: self._broadcast(key, masks[key]) for key in self.masked}
        return self.runner.run({**values, **{key: mask.astype("int32") for key, mask in full.items()}}, {})[0] != 0

    # Values and masks

    def _origins(self) -> Any:
        """The origins of the masks of all elements of the masked inputs, in one row."""
        return np.concatenate([self._broadcast(key, self.patterns[key][1]).ravel() for key in self.masked])

    def _broadcast(self, key: int, mask: Any) -> Any:
        """What is given for the leading axes of an input, for all its elements."""
        return np.broadcast_to(_expand(mask, len(self.sizes[key])), self.sizes[key])

    def _masks_by_name(self) -> dict[int, int]:
        """Arguments called `mask`, or `query_mask` beside `query`: {id of such a mask: id of the tensor it is for}."""
        signature = inspect.signature(self.call.operation.call)
        arguments = signature.bind(*self.call.args, **self.call.kwargs).arguments
        found = {}
        for name, x in arguments.items():
            tensor = self.tensors[self.masked[0]] if name == "mask" else arguments.get(name.removesuffix("_mask"))
            is_mask = isinstance(x, keras.KerasTensor) and len(x.shape) == 2 and tensor is not x
            if is_mask and id(tensor) in self.patterns and self.patterns[id(tensor)][0].ndim == 2:
                found[id(x)] = id(tensor)
        return found

    def _draw(self, key: int) -> Any:
        return draw(kind_of(self.tensors[key]), self.sizes[key], self.random)

    def _elsewhere(self, key: int, values: Any, mask: Any) -> Any:
        """`values` with other ones at padding."""
        return np.where(_expand(mask, values.ndim), values, redraw(kind_of(self.tensors[key]), values, self.random))

    def _tolerance(self, usual: float, half: float) -> float:
        dtypes = [x.dtype for x in self.tensors.values()] + [getattr(self.call.operation, "compute_dtype", "float32")]
        return half if {"float16", "bfloat16"} & set(map(str, dtypes)) else usual


def _expand(mask: Any, rank: int) -> Any:
    return mask.reshape(mask.shape + (1,) * (rank - mask.ndim))


def _join(masks: list[Any]) -> Any:
    """The conjunction of masks over the leading axes of tensors, or None if their shapes do not fit together."""
    rank = max(mask.ndim for mask in masks)
    try:
        return np.logical_and.reduce(np.broadcast_arrays(*[_expand(mask, rank) for mask in masks]))
    except ValueError:
        return None


def _join_origins(origins: list[Any]) -> Any:
    """The origins of the elements of a conjunction: the same where those of all its parts are the same."""
    rank = max(one.ndim for one in origins)
    first, *others = np.broadcast_arrays(*[_expand(one, rank) for one in origins])
    for other in others:
        first = np.where(first == other, first, first * 1_000_003 + other)
    return first


def _equal(a: Any, b: Any, tolerance: float) -> Any:
    """Where two arrays are equal up to a tolerance; NaN equals NaN."""
    if a.dtype.kind == "b":
        return a == b
    with np.errstate(all="ignore"):
        return (a == b) | (np.abs(a - b) <= tolerance * (1 + np.abs(a))) | (np.isnan(a) & np.isnan(b))

"""Finds out what an operation does with padding, by running it on small random tensors: (B, T, ...) -> (B, ...).

A name says little about an operation: `keras.ops` has some hundred that treat each token separately, and a `Lambda` may
do anything. So the operation runs a few times: with other values at padding tokens, with other values everywhere, and
with the real tokens alone. What changes in the output shows what it does.
"""

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.keras_internals import Call, get_keras_mask, set_keras_mask
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")

_BATCH, _LENGTH = 2, 12  # in place of sizes that are not known
_LONG = 65537  # more tokens than a slice or a crop keeps
_BASE = 128  # the largest integer up to which bfloat16 represents all
_LARGE = 2**26  # from this number of weights on, a layer runs with the weights that it has

Sizes = tuple[int, ...]
Values = dict[int, Any]


@dataclass(frozen=True)
class Source:
    """A symbolic tensor among the arguments of an operation.

    Attributes:
        sizes: the sizes of the tensor in trials.
        rank: the number of leading axes that its mask has, 2 for a mask (B, T); None if the tensor has no mask.
    """

    sizes: Sizes
    rank: int | None


@dataclass(frozen=True)
class Finding:
    """What an operation does with padding.

    Attributes:
        sizes: the sizes of the output in trials.
        kept: the indices, among the inputs, of those whose masks are together the mask of the output; or None.
        moved: for an operation that only moves elements (slices, joins, transposes), the number of leading axes that
            the mask of the output has; or None.
        own: whether the mask that Keras attaches to the output is right.
        clean: whether the output depends on no padding at all.
        counts_padding: whether the output at real tokens depends on how many padding tokens stand before or after them.
    """

    sizes: Sizes
    kept: tuple[int, ...] | None = None
    moved: int | None = None
    own: bool = False
    clean: bool = False
    counts_padding: bool = False


def sizes_in_trials(x: Any) -> Sizes:
    """The shape of a symbolic tensor, with small numbers in place of unknown sizes."""
    return tuple((_LENGTH if axis else _BATCH) if n is None else n for axis, n in enumerate(x.shape))


def examine(call: Call, place: int, sources: list[Source], has_mask: bool) -> Finding:
    """What the operation of `call` does with padding in its inputs.

    Args:
        call: with at least one input that has a mask.
        place: the index of the output in question.
        sources: one for each of `call.inputs`.
        has_mask: whether Keras attached a mask to the output.

    Raises:
        Exception: whatever the operation raises for small tensors.
    """
    failure: Exception | None = None
    for guess in _guesses(call, place, sources):
        try:
            return _Trial(call, place, guess).finding(has_mask)
        except Exception as error:  # a user's operation may raise anything
            failure = failure or error
    raise failure or ValueError("The operation has no inputs.")


def _guesses(call: Call, place: int, sources: list[Source]) -> Iterator[list[Source]]:
    """The `sources`, and then with other sizes in place of unknown ones, which must fit to known ones."""
    yield sources
    known = [x.shape[1] for x in (*call.inputs, call.outputs[place]) if len(x.shape) > 1 and x.shape[1] is not None]
    for length in dict.fromkeys(known):
        yield [
            Source((s.sizes[0], length, *s.sizes[2:]), s.rank) if len(x.shape) > 1 and x.shape[1] is None else s
            for x, s in zip(call.inputs, sources, strict=True)
        ]
    longest = max((s.sizes for s in sources if s.rank is not None), key=len)
    yield [  # tables such as (T, D), which broadcast from the right
        Source(_aligned(x.shape, longest), None) if s.rank is None and len(s.sizes) < len(longest) else s
        for x, s in zip(call.inputs, sources, strict=True)
    ]


def _aligned(shape: Any, longest: Sizes) -> Sizes:
    return tuple(size if n is None else n for n, size in zip(shape, longest[len(longest) - len(shape) :], strict=True))


class _Trial:
    """Runs the operation of one call. Values and masks are NumPy arrays by the id of a symbolic tensor."""

    def __init__(self, call: Call, place: int, sources: list[Source]) -> None:
        self.call, self.place = call, place
        self.tensors = {id(x): x for x in call.inputs}
        self.sources = {id(x): source for x, source in zip(call.inputs, sources, strict=True)}
        self.masked = [key for key, source in self.sources.items() if source.rank is not None]
        self.given = self._given_masks()
        self.random = np.random.default_rng(0)
        self.weights = _other_weights(call.operation, self.random)

    def finding(self, has_mask: bool) -> Finding:
        """See `examine`."""
        patterns = {key: self._pattern(key, index) for index, key in enumerate(self.masked)}
        values = {key: self._draw(key) for key in self.tensors}
        others = {**values, **{key: self._elsewhere(key, values[key], patterns[key]) for key in self.masked}}
        (first, own), (second, _) = (self._run(given, patterns) for given in (values, others))
        if first.ndim != len(self.call.outputs[self.place].shape):
            raise ValueError(f"Keras expects another number of axes. Received: {first.ndim} axes")
        changed = ~_equal(first, second, self._tolerance(1e-4, 1e-2))
        if has_mask and own is not None and not changed[own].any():
            return Finding(first.shape, own=True, counts_padding=self._counts_padding("own"))
        for kept in ([self.masked[0]], self.masked):
            mask = _join([patterns[key] for key in kept])
            if mask is None or mask.shape != first.shape[: mask.ndim] or not self._keeps_length(mask.ndim):
                continue
            if not changed[mask].any() and np.isfinite(first[mask]).any():
                indices = tuple(index for index, x in enumerate(self.call.inputs) if id(x) in kept)
                return Finding(first.shape, kept=indices, counts_padding=self._counts_padding("kept"))
        if first.ndim and self._only_moves(values):
            return Finding(first.shape, moved=self._rank_of_moved(), counts_padding=self._counts_padding("moved"))
        return Finding(first.shape, clean=not changed.any())

    # What the operation does

    def _keeps_length(self, rank: int) -> bool:
        """Whether the output has as many tokens as the input for any number of tokens: `x[:, :100]` has not."""
        length = max(self.sources[key].sizes[1] for key in self.masked) if rank > 1 else 0

        def longer(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor):
                return x
            is_long = len(x.shape) > 1 and self.sources[id(x)].sizes[1] == length
            return keras.KerasTensor((x.shape[0], _LONG, *x.shape[2:]) if is_long else x.shape, x.dtype)

        if rank < 2:
            return True
        args, kwargs = keras.tree.map_structure(longer, (self.call.args, self.call.kwargs))
        try:
            with _quietly():
                specs = keras.tree.flatten(self.call.operation.compute_output_spec(*args, **kwargs))
        except Exception:  # the operation is for one length only
            return True
        return specs[self.place].shape[1] in (None, _LONG)

    def _counts_padding(self, kind: str) -> bool:
        """Whether the output at real tokens differs from the output without padding, in a call of any length."""
        lengths = [self.sources[key].sizes[1] for key in self.masked if self._is_of_any_length(key)]
        if not lengths:
            return False
        length, patterns, ones = lengths[0], {}, {}
        pattern = self._contiguous(self.sources[self.masked[0]].sizes[:2], 0)
        real = int(pattern[0].sum())
        padded, alone = {}, {}
        for key, x in self.tensors.items():
            padded[key] = alone[key] = self._draw(key)
            sizes = self.sources[key].sizes
            if len(sizes) > 1 and sizes[:2] == pattern.shape and x.shape[1] is None:
                alone[key] = padded[key][pattern].reshape((len(pattern), real, *sizes[2:]))
            elif len(sizes) > 1 and sizes[1] == length and x.shape[1] is None:
                alone[key] = padded[key][:, :real]
            elif sizes and sizes[0] == length and x.shape[0] is None:
                alone[key] = padded[key][:real]
        for key in self.masked:
            sizes, rank = self.sources[key].sizes, self.sources[key].rank
            patterns[key] = pattern if sizes[:rank] == pattern.shape else np.ones(sizes[:rank], "bool")
            ones[key] = np.ones(alone[key].shape[:rank], "bool")
        try:
            (first, own), (second, other_own) = self._run(padded, patterns), self._run(alone, ones)
            if kind == "moved":
                pattern = self._run_on_masks(patterns, padded).reshape((*first.shape[:2], -1)).any(axis=-1)
        except Exception:  # the operation is for some lengths only
            return False
        if kind == "own":
            pattern = own
        if first.ndim < 2 or first.shape[:2] != pattern.shape or first.shape[1] != length:
            return False
        with_padding, without = first[pattern], second.reshape((-1, *second.shape[2:]))
        if kind == "own":
            without = second[other_own]
        if with_padding.shape != without.shape:
            return True
        return not _equal(with_padding, without, self._tolerance(5e-3, 5e-2)).all()

    def _is_of_any_length(self, key: int) -> bool:
        return self.sources[key].rank == 2 and self.tensors[key].shape[1] is None

    def _only_moves(self, values: Values) -> bool:
        """Whether each element of the output is an element of the masked inputs, always the same one, or constant."""
        is_layer = isinstance(self.call.operation, keras.layers.Layer)
        if (is_layer and self.call.operation.weights) or any(self._kind(key) == "bool" for key in self.masked):
            return False
        sizes = [self.sources[key].sizes for key in self.masked]
        count = sum(math.prod(size) for size in sizes)
        digits, codes = [], np.arange(count)
        while not digits or codes.any():
            digits.append(codes % _BASE + 1)
            codes = codes // _BASE
        inputs = [*digits, self.random.integers(-_BASE // 2, _BASE // 2, count)]
        ends = np.cumsum([math.prod(size) for size in sizes])[:-1]
        outputs = []
        for numbers in inputs:
            parts = [part.reshape(size) for part, size in zip(np.split(numbers, ends), sizes, strict=True)]
            outputs.append(self._run({**values, **dict(zip(self.masked, parts, strict=True))}, {})[0])
        *found, last = outputs
        is_digit = np.all([(one >= 1) & (one <= _BASE) & (one == np.round(one)) for one in found], axis=0)
        index = sum(np.where(is_digit, one - 1, 0).astype("int64") * _BASE**n for n, one in enumerate(found))
        is_moved = is_digit & (index < count) & (last == inputs[-1][np.minimum(index, count - 1)])
        is_constant = np.all([_equal(one, last, 0.0) for one in found], axis=0)
        return bool(is_moved.any() and (is_moved | is_constant).all())

    def _rank_of_moved(self) -> int:
        """The number of leading axes of the output over which a mask varies that is moved as the inputs are."""
        rank = 1
        for _ in range(2):
            patterns = {key: self._scattered(self.sources[key].sizes[: self.sources[key].rank]) for key in self.masked}
            mask = self._run_on_masks(patterns, {key: self._draw(key) for key in self.tensors})
            while (mask != mask[(..., *[slice(0, 1)] * (mask.ndim - rank))]).any():
                rank += 1
        return rank

    # Running the operation

    def _run(self, values: Values, patterns: Values) -> tuple[Any, Any]:
        """The output for these values and masks, and the mask that Keras attaches to it, or None."""

        def tensor_of(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor):
                return x
            value, pattern = values[id(x)], patterns.get(id(x))
            if id(x) in self.given and patterns:
                value = patterns[self.given[id(x)]]
            tensor = ops.cast(ops.convert_to_tensor(value), x.dtype)
            if pattern is not None and get_keras_mask(x) is not None:
                set_keras_mask(tensor, ops.convert_to_tensor(pattern))
            return tensor

        kwargs = dict(self.call.kwargs)
        if "training" in kwargs:
            kwargs["training"] = False  # with dropout each run would differ
        with _quietly(), _eagerly(), keras.StatelessScope(self.weights, initialize_variables=False):
            args, kwargs = keras.tree.map_structure(tensor_of, (self.call.args, kwargs))
            output = keras.tree.flatten(self.call.operation(*args, **kwargs))[self.place]
            mask = get_keras_mask(output)
            return _to_numpy(output), None if mask is None else _to_numpy(mask).astype("bool")

    def _run_on_masks(self, patterns: Values, values: Values) -> Any:
        """The output, as booleans, for masks in place of the inputs that have masks."""
        masks = {key: _expand(patterns[key], len(self.sources[key].sizes)) for key in self.masked}
        full = {key: np.broadcast_to(mask, self.sources[key].sizes).astype("int32") for key, mask in masks.items()}
        return self._run({**values, **full}, {})[0] != 0

    def _given_masks(self) -> dict[int, int]:
        """Arguments called `mask`, or `query_mask` beside `query`: {id of such a mask: id of the tensor it is for}."""
        signature = inspect.signature(self.call.operation.call)
        arguments = signature.bind(*self.call.args, **self.call.kwargs).arguments
        found = {}
        for name, x in arguments.items():
            tensor = self.tensors[self.masked[0]] if name == "mask" else arguments.get(name.removesuffix("_mask"))
            is_mask = isinstance(x, keras.KerasTensor) and len(x.shape) == 2 and tensor is not x
            if is_mask and self.sources.get(id(tensor), _UNMASKED).rank == 2:
                found[id(x)] = id(tensor)
        return found

    # Random values and masks

    def _kind(self, key: int) -> str:
        dtype = keras.backend.standardize_dtype(self.tensors[key].dtype)
        return "bool" if dtype == "bool" else "int" if "int" in dtype else "float"

    def _draw(self, key: int) -> Any:
        """Random values: most functions are defined for some of these floats, and most look-ups for 0 and 1."""
        sizes, kind = self.sources[key].sizes, self._kind(key)
        if kind == "float":
            few = np.stack(
                [self.random.normal(size=3361), *self.random.uniform([[0.1], [1.1]], [[0.9], [3]], (2, 3361))]
            )
            return np.resize(self.random.permutation(few.ravel()), sizes).astype("float32")
        return self.random.integers(0, 2, sizes).astype("bool" if kind == "bool" else "int32")

    def _elsewhere(self, key: int, values: Any, pattern: Any) -> Any:
        """`values` with other ones at padding."""
        kind = self._kind(key)
        other = 3 * self._draw(key) + 1 if kind == "float" else ~values if kind == "bool" else 1 - values
        return np.where(_expand(pattern, values.ndim), values, other)

    def _pattern(self, key: int, index: int) -> Any:
        source = self.sources[key]
        sizes = source.sizes[: source.rank]
        return self._contiguous(sizes, index) if source.rank == 2 else self._scattered(sizes)

    def _contiguous(self, sizes: Sizes, index: int) -> Any:
        """A mask (B, T) with padding on the left and right of the first row, and on the right of the others.

        It differs for each `index`, and no reversal of rows or tokens changes it into itself.
        """
        rows, length = sizes
        real = max(1, min(length - 1, length * 7 // 12 - index))
        pattern = np.zeros(sizes, "bool")
        for row in range(rows):
            first = 0 if row else (length - real + 1) // 2 if rows == 1 else max(1, length - real - 1)
            pattern[row, first : first + real] = True
        return pattern

    def _scattered(self, sizes: Sizes) -> Any:
        pattern = self.random.random(sizes) < 0.6
        pattern.flat[0], pattern.flat[-1] = True, False
        return pattern

    def _tolerance(self, usual: float, half: float) -> float:
        dtypes = [x.dtype for x in self.tensors.values()] + [getattr(self.call.operation, "compute_dtype", "float32")]
        return half if {"float16", "bfloat16"} & set(map(str, dtypes)) else usual


_UNMASKED = Source((), None)


def _other_weights(operation: Any, random: Any) -> list[tuple[Any, Any]]:
    """(variable, random value) for a layer: those it begins with may be zero, and hide what it does."""
    if not isinstance(operation, keras.layers.Layer) or isinstance(operation, keras.Model):
        return []
    variables = [one for one in operation.variables if "float" in one.dtype and "float8" not in one.dtype]
    if sum(math.prod(one.shape) for one in variables) > _LARGE:
        return []
    pairs = []
    for one in variables:
        is_matrix = len(one.shape) > 1
        few = random.normal(size=10007) / math.sqrt(one.shape[-2]) if is_matrix else random.uniform(0.5, 1.5, 10007)
        pairs.append((one, np.resize(few, one.shape)))
    return pairs


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _eagerly() -> Any:
    """A context in which operations compute values, also while a graph is being traced."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return tf.init_scope()
    return jax.ensure_compile_time_eval() if backend == "jax" else torch.no_grad()


def _to_numpy(x: Tensor) -> Any:
    dtype = keras.backend.standardize_dtype(x.dtype)
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32") if dtype in ("float16", "bfloat16") else x))


def _expand(pattern: Any, rank: int) -> Any:
    return pattern.reshape(pattern.shape + (1,) * (rank - pattern.ndim))


def _join(patterns: list[Any]) -> Any:
    """The conjunction of masks over the leading axes of tensors, or None if their shapes do not fit together."""
    rank = max(pattern.ndim for pattern in patterns)
    try:
        return np.logical_and.reduce(np.broadcast_arrays(*[_expand(pattern, rank) for pattern in patterns]))
    except ValueError:
        return None


def _equal(a: Any, b: Any, tolerance: float) -> Any:
    """Where two arrays are equal up to a tolerance; NaN equals NaN."""
    if a.dtype.kind == "b":
        return a == b
    with np.errstate(all="ignore"):
        return (a == b) | (np.abs(a - b) <= tolerance * (1 + np.abs(a))) | (np.isnan(a) & np.isnan(b))

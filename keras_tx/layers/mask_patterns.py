"""What an operation is tried out on: the sizes of its inputs, and padding patterns: (B, T, ...)."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keras_tx.internals.keras_models import Call
from keras_tx.layers.trial_runs import Sizes

_BATCH, _LENGTH = 2, 12  # in place of sizes that are not known
_ATTEMPTS = 8  # to find masks that differ
_MOST_ROWS = 7  # of a batch of a known size, which could take gigabytes; a prime, so that a roll by 2 or 4 rows is seen

# Two NumPy arrays: a mask, contiguous as padding is, and numbers, the origins of its elements. Elements of the same
# origin are the same in any mask; in this one, elements may also be the same by chance.
Patterns = tuple[Any, Any]

_masks_seen = itertools.count(1)


@dataclass(frozen=True)
class Source:
    """A symbolic tensor among the arguments of an operation.

    Attributes:
        sizes: the sizes of the tensor in trials.
        mask: symbolic, over its leading axes, usually (B, T); None if the tensor has none.
        patterns: the mask in trials; None if the tensor has none.
    """

    sizes: Sizes
    mask: Any = None
    patterns: Patterns | None = None


def sizes_in_trials(x: Any) -> Sizes:
    """The shape of a symbolic tensor, with small numbers in place of unknown sizes and of a large batch."""
    lengths = (_LENGTH if n is None else n for n in x.shape[1:])
    return (*[_BATCH if n is None else min(n, _MOST_ROWS) for n in x.shape[:1]], *lengths)


def patterns_in_trials(sizes: Sizes, number: int, anywhere: bool = False) -> Patterns:
    """A mask of these sizes, a different one for each `number`, and new origins of its elements.

    A mask of shape (B, T) has padding on both sides of the first row, and on the right of the others, so that no
    reversal of rows or tokens changes it into itself; the tokens in the middle are real in all such masks. With
    `anywhere` each row has padding on any side, or none.
    """
    random = np.random.default_rng([number, *sizes])
    scattered = random.random(sizes) < 0.6
    scattered.flat[0], scattered.flat[-1] = True, False
    if len(sizes) != 2:
        return scattered, new_origins(sizes)
    length, middle = sizes[1], sizes[1] // 2
    contiguous = np.zeros(sizes, "bool")
    for row, mask in enumerate(contiguous):
        begin = 0 if row else random.integers(min(1, middle), middle + 1)
        end = random.integers(middle + 1, max(length, middle + 2))
        if anywhere:
            begin, end = random.integers(0, middle + 1), random.integers(middle + 1, length + 1)
        if len(contiguous) == 1 and begin == length - end and begin > 1:
            begin -= 1
        mask[begin:end] = length > 1 or row == 0
    return contiguous, new_origins(sizes)


def new_origins(sizes: Sizes) -> Any:
    """Numbers, no two of which are the same, in this mask or in others."""
    return (next(_masks_seen) << 32) + np.arange(math.prod(sizes), dtype="int64").reshape(sizes)


def guesses(call: Call, place: int, sources: list[Source]) -> Iterator[list[Source]]:
    """The `sources`, with other sizes in place of unknown ones, which must fit to known ones, and in whole batches."""
    yield from _of_lengths(call, place, sources)
    whole = [_with_whole_batch(source, x) for x, source in zip(call.inputs, sources, strict=True)]
    if any(one is not source for one, source in zip(whole, sources, strict=True)):
        yield from _of_lengths(call, place, whole)


def _of_lengths(call: Call, place: int, sources: list[Source]) -> Iterator[list[Source]]:
    yield sources
    known = [x.shape[1] for x in (*call.inputs, call.outputs[place]) if len(x.shape) > 1 and x.shape[1] is not None]
    for length in dict.fromkeys(known):
        yield [
            _with_sizes(source, (source.sizes[0], length)) if len(x.shape) > 1 and x.shape[1] is None else source
            for x, source in zip(call.inputs, sources, strict=True)
        ]
    longest = max((source.sizes for source in sources if source.patterns), key=len)
    yield [  # tables such as (T, D), which broadcast from the right
        Source(_aligned(x.shape, longest)) if not source.patterns and len(x.shape) < len(longest) else source
        for x, source in zip(call.inputs, sources, strict=True)
    ]


def _with_whole_batch(source: Source, x: Any) -> Source:
    """The source with as many rows as `x` has, if that is known."""
    is_whole = not x.shape or x.shape[0] in (None, source.sizes[0])
    return source if is_whole else _with_sizes(source, x.shape[:1])


def _with_sizes(source: Source, leading: Sizes) -> Source:
    """The source with other sizes of its leading axes."""
    sizes = (*leading, *source.sizes[len(leading) :])
    if source.patterns is None:
        return replace(source, sizes=sizes)
    return replace(source, sizes=sizes, patterns=patterns_in_trials(sizes[: source.patterns[0].ndim], 0))


def has_sizes(found: Sizes, call: Call, place: int, sources: list[Source]) -> bool:
    """Whether an output of a call with `sources` has the shape that Keras expects, in proportion to small batches."""
    expected = call.outputs[place].shape
    if len(found) != len(expected):
        return False
    pairs = [(s.sizes[0], x.shape[0]) for x, s in zip(call.inputs, sources, strict=True) if s.patterns and x.shape[0]]
    small, batch = max(pairs, key=lambda pair: pair[1] / pair[0], default=(1, 1))
    if small == batch:
        return True
    in_proportion = [n is None or size * batch == n * small for size, n in zip(found, expected, strict=True)]
    return in_proportion[0] and all(
        n in (None, size) or fits for size, n, fits in zip(found[1:], expected[1:], in_proportion[1:], strict=True)
    )


def distinct(sources: list[Source]) -> list[Source]:
    """The sources with other patterns where one mask would contain another, so that it is seen which one counts."""
    own = {id(source.mask): source.patterns for source in sources if source.patterns is not None}
    found = next(filter(None, (_overlapping(own, attempt) for attempt in range(_ATTEMPTS))), own)
    return [replace(source, patterns=found.get(id(source.mask))) for source in sources]


def _overlapping(own: dict[int, Patterns], attempt: int) -> dict[int, Patterns] | None:
    """Patterns for some masks, none of which contains another; None if there are none in this attempt.

    The first attempt keeps the patterns that the masks have, if they fit; the last ones have padding anywhere, because
    of a few tokens there are few other masks.
    """
    found: dict[int, Patterns] = {}
    for key, (mask, origins) in own.items():
        numbers = range(30 * attempt, 30 * attempt + 30)
        others = (patterns_in_trials(mask.shape, n, attempt > _ATTEMPTS // 2)[0] for n in numbers)
        masks = itertools.chain([] if attempt else [mask], others)
        fitting = next((one for one in masks if all(_overlaps(one, other) for other, _ in found.values())), None)
        if fitting is None:
            return None
        found[key] = fitting, origins
    return found


def _overlaps(a: Any, b: Any) -> bool:
    """Whether each of two masks has elements that the other lacks; always, if their shapes differ."""
    return a.shape != b.shape or bool((a & ~b).any() and (~a & b).any())


def _aligned(shape: Any, longest: Sizes) -> Sizes:
    return tuple(size if n is None else n for n, size in zip(shape, longest[len(longest) - len(shape) :], strict=True))

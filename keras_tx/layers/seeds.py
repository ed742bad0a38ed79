"""Seeds for computations that are done again: seed generators that return the same seeds both times.

Gradient checkpointing computes a layer a second time. A seed generator would return other seeds then, so that dropout
would drop other elements, and the gradients would be those of another output.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras

from keras_tx.internals.keras_models import seed_generators_within
from keras_tx.types import Tensor

_GIVEN: contextvars.ContextVar[Any] = contextvars.ContextVar("given_seeds", default=None)


class RepeatedSeeds:
    """The seeds of all seed generators within a layer, for a computation that is done several times.

    They are those that the generators would return without it. Create it outside of the function that is computed
    again, enter `run` in the function, and call `finish` after its first run.
    """

    def __init__(self, layer: Any) -> None:
        self._seeds = {generator: generator.next() for generator in seed_generators_within(layer)}
        self._uses: dict[Any, int] | None = None  # of each generator in the first run
        for generator in self._seeds:
            if not isinstance(generator.next, _Next):
                generator.next = _Next(generator)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Within this context the generators return these seeds, from the first one on."""
        given = {generator: [seed, 0] for generator, seed in self._seeds.items()}
        token = _GIVEN.set((_GIVEN.get() or {}) | given)
        try:
            yield
        finally:
            _GIVEN.reset(token)
            if self._uses is None:
                self._uses = {generator: uses for generator, (_, uses) in given.items()}

    def finish(self) -> None:
        """Lets the generators go on behind the seeds that were used."""
        for generator, uses in (self._uses or {}).items():
            outer = (_GIVEN.get() or {}).get(generator)
            if outer is not None:
                outer[1] += uses - 1
            elif uses != 1:
                generator.state.assign(_later(self._seeds[generator], uses))


def given_seed(generator: Any) -> Tensor | None:
    """The next seed of a generator within `RepeatedSeeds.run`; None outside."""
    given = (_GIVEN.get() or {}).get(generator)
    if given is None:
        return None
    given[1] += 1
    return _later(given[0], given[1] - 1)


def _later(seed: Tensor, uses: int) -> Tensor:
    """The seed that a generator returns after so many others, as `keras.random.SeedGenerator` counts."""
    return seed + keras.ops.convert_to_tensor([0, uses], dtype=seed.dtype)


class _Next:
    """The method `next` of a seed generator. A copy of the generator gets a copy of this with itself."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = given_seed(self.generator)
        return type(self.generator).next(self.generator, *args, **kwargs) if given is None else given

"""Progress bars for work that may take minutes."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import keras

Item = TypeVar("Item")

SECONDS = 0.5  # between two updates on the screen
STEP = 1024  # items between two updates of the bar


def bar(unit: str, verbose: Any) -> keras.utils.Progbar:
    """A bar that counts `unit`s of which the number is unknown; `verbose=0` or False shows nothing."""
    return keras.utils.Progbar(None, unit_name=unit, verbose=check_verbose(verbose), interval=SECONDS)


def shown(items: Iterable[Item], unit: str, verbose: Any) -> Iterator[Item]:
    """The items, while a bar counts them."""
    progress, count = bar(unit, verbose), 0
    for count, item in enumerate(items, start=1):
        if count % STEP == 0:
            progress.update(count)
        yield item
    progress.update(count, finalize=True)


def check_verbose(verbose: Any) -> int:
    """Returns 0 or 1; 2 would print a line for each update."""
    if verbose not in (0, 1):
        raise ValueError(f"`verbose` must be 0, 1, False or True. Received: verbose={verbose!r}")
    return int(verbose)

"""The outcome of a case, and the limits that hold for it."""

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = ("refused", "right", "wrong", "hung", "lost")
SECONDS, MEBIBYTES = 20, 1024  # that the package may take for a case
LONGEST = 1000  # characters of a message


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        result: "refused" by a clear ValueError or OSError; the "right" answer; a "wrong" one, which includes every
            other error; "hung" for longer than the limit; "lost" if the process died or has lost something.
        told: the message of an error, or what is wrong.
        changed: what was changed in the files, for a report.
    """

    result: str
    told: str = ""
    changed: str = ""
    seconds: float = 0.0
    mebibytes: float = 0.0


@dataclass
class Case:
    """One case: its random numbers, a new folder for its files, and the limits for what the package does.

    Attributes:
        number: the number in its kind. Together with the seed it determines the case.
        random: the random numbers of this case.
        folder: an empty folder.
        tell: called with "begins" and "ends", so that another process can stop what takes too long.
    """

    number: int
    random: np.random.Generator
    folder: Path
    tell: Callable[[str], Any] = field(default=lambda what: None)
    changed: str = ""
    seconds: float = 0.0
    mebibytes: float = 0.0

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Measures the time and the memory of the body."""
        before = _memory(reset=True)
        self.tell("begins")
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started
            self.tell("ends")
            self.mebibytes = max(self.mebibytes, _memory() - before)

    def attempt(self, function: Callable[[], Any], accepted: tuple[type[Exception], ...] = ()) -> tuple[Any, Any]:
        """Returns (the result of `function`, None), or (None, the outcome of its error).

        Args:
            function: without arguments.
            accepted: errors that are clear too, besides ValueError and OSError.
        """
        try:
            with self.limited():
                return function(), None
        except (ValueError, OSError, *accepted) as error:
            return None, self.refused(error)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            del error
            gc.collect()
            return None, Outcome("wrong", told)

    def refused(self, error: Exception) -> Outcome:
        """The outcome of a clear error; "wrong" if its message is empty or long."""
        text = str(error)
        if not 15 <= len(text) <= LONGEST:
            return Outcome("wrong", f"{type(error).__name__} with a message of {len(text)} characters: {text[:300]}")
        return Outcome("refused", f"{type(error).__name__}: {text}")

    def choice(self, values: Any) -> Any:
        """One of the values; NumPy's `choice` would convert them."""
        values = list(values)
        return values[int(self.random.integers(len(values)))]

    def closed(self, outcome: Outcome) -> Outcome:
        """The outcome with what was measured, and "hung" or "wrong" if that is above the limits."""
        outcome.changed, outcome.seconds, outcome.mebibytes = self.changed, self.seconds, self.mebibytes
        if self.seconds > SECONDS:
            return Outcome("hung", f"{self.seconds:.1f} s; {outcome.told}", self.changed, self.seconds, self.mebibytes)
        if self.mebibytes > MEBIBYTES:
            outcome.result, outcome.told = "wrong", f"{self.mebibytes:,.0f} MiB; {outcome.told}"
        return outcome


@dataclass
class Kind:
    """A kind of cases.

    Attributes:
        run: the function of a case.
        share: of 1,000 cases, how many are of this kind.
    """

    run: Callable[[Case], Outcome]
    share: int = 0


def _memory(reset: bool = False) -> float:
    """The resident memory at present after `reset`, else its peak since then, in MiB."""
    if reset:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
    lines = Path("/proc/self/status").read_text().splitlines()
    name = "VmRSS:" if reset else "VmHWM:"
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

"""Runs timed in turns, and what came out as a table and as JSON lines."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Runs = Mapping[str, Callable[[], object]]
OURS = "keras_tx"  # how our side is called in every table


def parser(description: str, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--rounds", type=int, default=rounds, help="how often each side is timed")
    made.add_argument("--json", type=Path, help="a file that gets a JSON line for each row of the tables")
    return made


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turns(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Seconds of every run by round; each second round in reverse, so that none always follows the same other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(runs[name]))
    return times


def spread(numbers: Sequence[float], form: str) -> str:
    return f"{statistics.median(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


def report(
    case: str,
    times: Mapping[str, Sequence[float]],
    amount: float,
    unit: str,
    ours: str = OURS,
    file: Path | None = None,
) -> dict[str, float]:
    """Prints `amount` a second in every run, and how many times as fast `ours` is by round; returns these medians.

    One run has `amount` of `unit`. The medians are those of the rounds' ratios, not ratios of medians.
    """
    ratios = {}
    print(f"\n{case}")
    for name, taken in times.items():
        rates = [amount / one for one in taken]
        by_round = [theirs / our for our, theirs in zip(times[ours], taken, strict=True)]
        ratios[name] = statistics.median(by_round)
        ratio = "" if name == ours else f"   {ours} is {spread(by_round, '.2f')} times as fast"
        print(f"  {name:32} {spread(rates, ',.1f'):>36} {unit}/s{ratio}")
        if file:
            row = {"case": case, "run": name, "seconds": list(taken), f"{unit}/s": statistics.median(rates)}
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row | {"ratio": ratios[name]}) + "\n")
    return ratios

"""Times several runs in turns and reports their rates, as lines of text and as JSON lines."""

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Runs = Mapping[str, Callable[[], object]]
OURS = "keras_tx"  # the name of our side in every table


def parser(description: str, rounds: int = 5) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--rounds", type=int, default=rounds, help="how often each side is timed")
    made.add_argument("--json", type=Path, help="a file that gets a JSON line for each row of the tables")
    return made


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turns(runs: Runs, rounds: int) -> dict[str, list[float]]:
    """Seconds of every run, by round. Every other round is in reverse, so that no run always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            times[name].append(seconds(runs[name]))
    return times


def warm_up(sides: Mapping[str, Sequence[Callable[[], object]]], times: int = 2) -> None:
    """Calls the functions of every side `times` times, so that what they compile is compiled.

    On JAX the sides are first called once more, each in a thread of its own, because XLA takes long to compile for a
    GPU, and needs the processor for it.
    """
    import keras

    policy = keras.config.dtype_policy()

    def call(functions: Sequence[Callable[[], object]]) -> None:
        keras.config.set_dtype_policy(policy)  # each thread has its own
        for function in functions:
            function()

    if keras.backend.backend() == "jax":
        with concurrent.futures.ThreadPoolExecutor(len(sides)) as pool:
            list(pool.map(call, sides.values()))
    for _ in range(times):
        for functions in sides.values():
            call(functions)


def spread(numbers: Sequence[float], form: str) -> str:
    return f"{statistics.median(numbers):{form}} ({min(numbers):{form}} to {max(numbers):{form}})"


def report(
    case: str,
    times: Mapping[str, Sequence[float]],
    amount: float,
    unit: str,
    ours: str = OURS,
    file: Path | None = None,
    limit: float | None = None,
    variants: Sequence[str] = (),
    steps: int = 1,
) -> dict[str, float]:
    """Prints the rate of every run and how many times as fast `ours` is; returns the medians of these ratios by run.

    Args:
        case: what is measured, the title of the lines.
        times: seconds of every round, by run.
        amount: how much of `unit` one run processes, in `steps` equal steps.
        ours: the run that the others are compared with, round by round: the median is that of the rounds' ratios.
        file: gets a JSON line for each run.
        limit: the rate if a run were nothing but the machine's matrix products, or nothing but its reading of memory.
        variants: names of further runs of ours; the others are compared with these, too.
    """
    medians = {}
    print(f"\n{case}")
    for name, taken in times.items():
        rates = [amount / one for one in taken]
        ratios = [theirs / our for our, theirs in zip(times[ours], taken, strict=True)]
        medians[name] = statistics.median(ratios)
        of_limit = f"   {statistics.median(rates) / limit:.2f} of the limit" if limit else ""
        ratio = "" if name == ours else f"   {ours} is {spread(ratios, '.2f')} times as fast"
        of_variants = {}
        for variant in variants if name not in (ours, *variants) else ():
            of_variants[variant] = [theirs / our for our, theirs in zip(times[variant], taken, strict=True)]
            ratio += f", {variant} {spread(of_variants[variant], '.2f')}"
        print(f"  {name:32} {spread(rates, ',.1f'):>36} {unit}/s{of_limit}{ratio}")
        row = {"case": case, "run": name, "ours": ours, "unit": f"{unit}/s", "rates": rates, "ratios": ratios}
        row["steps"] = [one / steps for one in taken]  # seconds
        write(file, row | {"limit": limit, "of_variants": of_variants})
    return medians


def write(file: Path | None, row: Mapping[str, object]) -> None:
    """Appends `row` and the command of this process to `file` as a JSON line; does nothing if `file` is None.

    In a part of `python -m benchmarks all` the row has the name of the part, too.
    """
    if file:
        row = {**row, "part": os.environ["BENCHMARK_PART"]} if "BENCHMARK_PART" in os.environ else row
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**row, "command": command()}) + "\n")


def command() -> str:
    words = ["python", *sys.orig_argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return " ".join(words)

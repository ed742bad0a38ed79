"""Attacks the package: damaged checkpoints, strange texts, kills, full disks and threads, and counts what comes of it.

python -m benchmarks attack
python -m benchmarks attack --cases 200 --kills 20 --only config.json "kills of save_pretrained"
python -m benchmarks attack --only config.json --number 17

Each case ends in the right answer or a clear ValueError or OSError, within 20 s and 1 GiB, and the process goes on. A
case that does not is printed with the options that repeat it, and the exit status is 1.
"""

import argparse
import collections
import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras

from benchmarks.attack import interrupted, threads
from benchmarks.attack.kinds import KINDS
from benchmarks.attack.outcome import RESULTS, Outcome
from benchmarks.attack.tokenizer_files import WITH_TOKENIZER
from benchmarks.attack.worker import Worker

PER_TEXTS = 100  # texts of a case
IN_THIS_PROCESS = {  # functions of the number of kills and the seed
    "kills of save_pretrained": interrupted.kills_of_save,
    "two writers of save_pretrained": interrupted.two_writers_of_save,
    "kills of export": interrupted.kills_of_export,
    "two writers of export": interrupted.two_writers_of_export,
    "kills of Resume and model.save": interrupted.kills_of_training,
    "full disk": interrupted.full_disk,
    "8 threads": threads.all_models,
}


def plan(cases: int, texts: int) -> dict[str, int]:
    """The number of cases of each kind."""
    whole = sum(kind.share for kind in KINDS.values())
    counts = {name: -(-cases * kind.share // whole) for name, kind in KINDS.items()}
    return {**counts, "texts": len(WITH_TOKENIZER) * -(-texts // PER_TEXTS)}


def table(found: dict[str, list[Outcome]]) -> str:
    """A table in Markdown: how many cases of each kind ended in what."""
    lines = [f"| kind | cases | {' | '.join(RESULTS)} | slowest | most memory |", "|---" * (len(RESULTS) + 4) + "|"]
    total: collections.Counter = collections.Counter()
    for kind, outcomes in found.items():
        counts = collections.Counter(outcome.result for outcome in outcomes)
        total += counts
        slowest, most = max(one.seconds for one in outcomes), max(one.mebibytes for one in outcomes)
        cells = [f"{counts[result]:,}" for result in RESULTS]
        lines.append(f"| {kind} | {len(outcomes):,} | {' | '.join(cells)} | {slowest:.1f} s | {most:,.0f} MiB |")
    cells = [f"{total[result]:,}" for result in RESULTS]
    return "\n".join([*lines, f"| all | {sum(total.values()):,} | {' | '.join(cells)} |  |  |"])


def main() -> None:
    names = [*KINDS, *IN_THIS_PROCESS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="changed files, of all kinds together")
    parser.add_argument("--texts", type=int, default=2000, help="texts for each tokenizer")
    parser.add_argument("--kills", type=int, default=100, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KIND", help=", ".join(names))
    parser.add_argument("--number", type=int, help="runs this one case of --only")
    parser.add_argument("--minutes", type=float, default=1e9, help="begins no further case after that time")
    parser.add_argument("--verbose", action="store_true", help="prints each case")
    arguments = parser.parse_args()
    until, found = time.monotonic() + 60 * arguments.minutes, {}
    counts, worker = plan(arguments.cases, arguments.texts), Worker(arguments.seed)
    try:
        for kind in arguments.only:
            if kind not in KINDS or (arguments.number is None and not counts[kind]):
                continue
            count = counts[kind]
            numbers = range(count) if arguments.number is None else [arguments.number]
            print(f"\n{kind}", flush=True)
            bar, found[kind] = keras.utils.Progbar(len(numbers)), []
            for place, number in enumerate(numbers):
                if time.monotonic() > until:
                    break
                outcome = worker.run(kind, number)
                outcome = worker.after(outcome, last=place + 1 == len(numbers))
                found[kind].append(outcome)
                if arguments.verbose or outcome.result not in ("refused", "right"):
                    report(kind, number, arguments.seed, outcome)
                bar.update(place + 1)
    finally:
        worker.close()
    for kind in arguments.only:
        if kind in IN_THIS_PROCESS and time.monotonic() < until:
            print(f"\n{kind}", flush=True)
            found[kind] = IN_THIS_PROCESS[kind](arguments.kills, arguments.seed)
            for number, outcome in enumerate(found[kind]):
                if arguments.verbose or outcome.result not in ("refused", "right"):
                    report(kind, number, arguments.seed, outcome)
    found = {kind: outcomes for kind, outcomes in found.items() if outcomes}
    print(f"\n{table(found)}")
    sys.exit(any(one.result not in ("refused", "right") for outcomes in found.values() for one in outcomes))


def report(kind: str, number: int, seed: int, outcome: Outcome) -> None:
    again = f'--seed {seed} --only "{kind}" --number {number}'
    text = f"{outcome.result}: {outcome.changed}: {outcome.told}"
    print(f"\n  {text[:700]} ({outcome.seconds:.1f} s, {outcome.mebibytes:,.0f} MiB; {again})", flush=True)


if __name__ == "__main__":
    main()

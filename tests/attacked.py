"""Kinds of cases for a `benchmarks.attack.worker.Worker`: one hangs, one ends the process, one breaks what follows."""

import os
import time

from benchmarks.attack.outcome import Kind, Outcome

broken = []


def hangs(case):
    with case.limited():
        time.sleep(60)


def dies(case):
    with case.limited():
        os._exit(7)


def breaks(case):
    broken.append(case)
    return Outcome("refused", "but the process does not work any more")


def prepare():
    pass


def good(case):
    return Outcome("wrong" if broken else "right", "broken" * len(broken))


KINDS = {
    "hangs": Kind(hangs),
    "dies": Kind(dies),
    "breaks": Kind(breaks),
    "works": Kind(lambda case: case.attempt(lambda: int("x"))[1]),
    "fails": Kind(lambda case: 1 / 0),
}

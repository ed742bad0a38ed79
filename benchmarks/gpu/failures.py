"""A plugin of pytest, `-p benchmarks.gpu.failures`: names each failed test at once, and counts if it is interrupted.

pytest itself names them at its end, which a run that is out of time does not reach.
"""

import os
import time
from collections import Counter
from typing import Any

import pytest


class Failures:
    def __init__(self, config: pytest.Config):
        self._config = config
        self._counts: Counter[str] = Counter()
        self._started = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = " ".join((crash.message if crash else report.longreprtext).split())
            self._say(f"FAILED {report.nodeid} {reason[:300]}\n{report.longreprtext[-1500:]}")
        if report.failed or report.skipped or report.when == "call":
            self._counts[report.outcome] += 1

    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        counts = ", ".join(f"{self._counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        self._say(f"{counts} in {time.monotonic() - self._started:.0f} s, then interrupted")

    def _say(self, words: str) -> None:
        writer = self._config.get_terminal_writer()  # which there is not yet when plugins are registered
        writer.line(f"\n{words}")
        writer.flush()


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # whose reports the process that prints gets
        config.pluginmanager.register(Failures(config))

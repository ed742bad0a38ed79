"""Parts, each of them commands with a time limit, run one part after the other; none stops the others."""

import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
GRACE = 8.0  # seconds in which a command that is out of time may say what it has, before it is killed
FIRST = 0.7  # share of a part's time that a job may take while others of the part wait
REASON = 200  # characters
LONGEST = 2_000_000  # characters of a job's output that are kept, its end


@dataclasses.dataclass(frozen=True)
class Job:
    """A command; `environment` is added to that of this process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Part:
    """Jobs that prove or measure one thing.

    Args:
        share: of the time, relative to the other parts that are chosen.
        together: whether the jobs run at the same time; else one after the other, as timings need.
        summary: a function from a job's output to a few words about it.
    """

    name: str
    jobs: Sequence[Job]
    share: float = 1.0
    together: bool = False
    summary: Callable[[str], str] = lambda output: ""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a job: "ok", "failed" or "out of time"."""

    part: str
    job: str
    status: str
    seconds: float
    words: str
    output: str


class Running:
    """A job that runs in a process group of its own."""

    def __init__(self, part: Part, job: Job, limit: float):
        self.part, self.job, self.limit = part, job, limit
        self.started = time.monotonic()
        self._interrupted = False
        self._output: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **job.environment},
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=_listen_to_interrupts,
            )
        except OSError:
            self._output.close()
            raise

    def result(self) -> Result | None:
        """The result when the job has ended. Interrupts it at its limit, so that pytest still counts, then kills it."""
        seconds = time.monotonic() - self.started
        if self._process.poll() is None:
            if seconds > self.limit + GRACE:
                self._kill()
            elif seconds > self.limit and not self._interrupted:
                self._interrupted = True
                self._process.send_signal(signal.SIGINT)
            if self._process.poll() is None:
                return None
        self._kill()  # its children
        self._output.seek(0)
        output = self._output.read().decode(errors="replace")[-LONGEST:]
        self._output.close()
        words = self.part.summary(output)
        if self._process.returncode == 0:
            status = "ok"  # also where the interruption came when all was done
        elif self._interrupted:
            status, words = "out of time", "; ".join(filter(None, [f"limit {self.limit:.0f} s", words]))
        else:
            died = f"exit status {self._process.returncode}" if self._process.returncode < 0 or not output else ""
            status, words = "failed", "; ".join(filter(None, [died, words or last_line(output)]))
        return Result(self.part.name, self.job.name, status, seconds, words, output)

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def _listen_to_interrupts() -> None:
    """A shell that starts this program in the background makes it, and so its children, ignore interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:REASON] if lines else ""


def run(parts: Sequence[Part], seconds: float, done: Callable[[Result], None]) -> None:
    """Runs all `parts` in at most `seconds`; calls `done` with each result, the failed ones too.

    A part gets its share of the time that is left, so that what one part does not need the later ones have.
    """
    end = time.monotonic() + seconds
    for index, part in enumerate(parts):
        shares = sum(other.share for other in parts[index:])
        part_end = time.monotonic() + (end - time.monotonic()) * part.share / shares
        waiting = list(part.jobs)
        while waiting:
            count = len(waiting) if part.together else 1
            left = max(0.0, part_end - time.monotonic() - GRACE)
            started, waiting = waiting[:count], waiting[count:]
            limit = FIRST * left if waiting else left
            _finish(part, started, limit, done)


def _finish(part: Part, jobs: Sequence[Job], limit: float, done: Callable[[Result], None]) -> None:
    running = []
    for job in jobs:
        try:
            running.append(Running(part, job, limit))
        except OSError as error:
            done(Result(part.name, job.name, "failed", 0.0, str(error)[:REASON], ""))
    while running:
        for one in list(running):
            if result := one.result():
                running.remove(one)
                done(result)
        time.sleep(0.05)

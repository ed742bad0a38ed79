"""A process that runs cases one after the other, and is replaced when it hangs or dies."""

import importlib
import multiprocessing
import os
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.attack.outcome import SECONDS, Case, Outcome

PREPARING = 180  # seconds for what is not the package: making the files of a case, and transformers
SPACE = 4 << 30  # bytes of address space for a case
CHECKED = 20  # cases after which a good checkpoint must still load

Run = Callable[[Case], Outcome]


def new_case(kind: str, number: int, seed: int, folder: Path, **options) -> Case:
    """The case `number` of a kind; the seed, the kind and the number determine its random numbers."""
    import numpy as np

    return Case(number, np.random.default_rng([seed, number, *kind.encode()]), folder, **options)


def run(kind: str, number: int, seed: int, function: Run, **options) -> Outcome:
    """Runs a case in this process, in a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="attack-"))
    try:
        case = new_case(kind, number, seed, folder, **options)
        return case.closed(function(case))
    except Exception:  # of the attack itself
        return Outcome("lost", f"the attack failed: {traceback.format_exc()[-600:]}", case.changed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(connection, module: str, seed: int) -> None:
    """Runs the cases that `connection` names, until it is closed."""
    kinds = importlib.import_module(module)  # with TensorFlow, PyTorch and transformers
    kinds.prepare()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    connection.send("ready")
    while True:
        kind, number = connection.recv()
        function = kinds.good if kind == "good" else kinds.KINDS[kind].run
        connection.send(run(kind, number, seed, function, tell=connection.send))


class Worker:
    """Runs cases in a process of its own.

    Args:
        seed: of all cases.
        module: the module with `KINDS`, `prepare` and `good`.
        limit: the seconds that the package may take for a case.
    """

    def __init__(self, seed: int, module: str = "benchmarks.attack.kinds", limit: float = SECONDS) -> None:
        self.seed, self.module, self.limit = seed, module, limit
        self._process, self._since = None, 0

    def run(self, kind: str, number: int) -> Outcome:
        """The outcome of a case; a process that hangs or dies is replaced."""
        if self._process is None:
            self._start()
        self._connection.send((kind, number))
        limit, result, whose = PREPARING, "lost", "the attack"
        while True:
            if not self._connection.poll(limit):
                self.close()
                return Outcome(result, f"more than {limit} s of {whose}")
            try:
                message = self._connection.recv()
            except EOFError:
                self._process.join(PREPARING)
                status = self._process.exitcode
                self.close()
                return Outcome("lost", f"the process died with the exit status {status}")
            if isinstance(message, Outcome):
                return message
            if message == "begins":
                limit, result, whose = self.limit, "hung", "the package"
            else:
                limit, result, whose = PREPARING, "lost", "the attack"

    def after(self, outcome: Outcome, last: bool = False) -> Outcome:
        """The outcome, or "lost" if the process cannot load a good checkpoint any more, which is tried now and then."""
        self._since += 1
        if self._process is None or not (last or self._since >= CHECKED or outcome.result == "wrong"):
            return outcome
        self._since = 0
        good = self.run("good", 0)
        if good.result == "right":
            return outcome
        self.close()  # so that the next case begins in a good process
        return Outcome(
            "lost", f"a good checkpoint does not load any more: {good.told}; {outcome.told}", outcome.changed
        )

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.module, self.seed), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(2 * PREPARING) or self._connection.recv() != "ready":
            raise RuntimeError("The process of the attack does not start.")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

"""The machines that train together: `TF_CONFIG` read and checked, and the wait until every worker has started."""

import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

TRAINING = ("chief", "worker")
_ADDRESS = re.compile(r"(?:\w+://)?(.+):(\d+)")
_logger = logging.getLogger("keras_tx")


@dataclass(frozen=True)
class Task:
    """A process of a cluster: `type` is "worker", "chief" or "evaluator", `address` is "host:port"."""

    type: str
    index: int
    address: str

    def __str__(self) -> str:
        return f"{self.type} {self.index} ({self.address})"

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, port = _ADDRESS.fullmatch(self.address).groups()  # type: ignore[union-attr]
        return host.strip("[]"), int(port)


class Cluster(NamedTuple):
    """The processes that train together, and which of them this one is."""

    tasks: list[Task]
    own: Task

    @property
    def others(self) -> list[Task]:
        """Those for which this process must wait; none if it does not train itself."""
        return [task for task in self.tasks if task != self.own] if self.own in self.tasks else []


def from_environment() -> Cluster:
    """The cluster that the environment variable TF_CONFIG describes; a ValueError says what is wrong with it."""
    text = os.environ.get("TF_CONFIG", "")
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(
            'The environment variable TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:12345", '
            '"host2:12345"]}, "task": {"type": "worker", "index": 0}}, with another index in each process. For the '
            f"devices of one machine use `mirrored_strategy`. Received: TF_CONFIG={text!r}"
        )
    if "cluster" not in config:
        raise ValueError(f"TF_CONFIG must have the key 'cluster'. Received: TF_CONFIG={text!r}")
    task = config.get("task")
    if not isinstance(task, dict) or not {"type", "index"} <= set(task):
        raise ValueError(f"TF_CONFIG must have the key 'task' with 'type' and 'index'. Received: task={task!r}")
    return checked(config["cluster"], task["type"], task["index"], "TF_CONFIG")


def checked(jobs: Any, task_type: Any, index: Any, source: str) -> Cluster:
    """The cluster of `jobs`, {"worker": [address, ...], ...}, and the type and index of this process in it.

    Args:
        source: from where they come; errors begin with it.
    """
    if not isinstance(jobs, Mapping) or not jobs or not all(isinstance(one, (list, tuple)) for one in jobs.values()):
        raise ValueError(f"{source} must have a 'cluster' of lists of addresses. Received: cluster={jobs!r}")
    if "ps" in jobs:
        raise ValueError(
            f"{source} must not name 'ps': parameter servers (`ParameterServerStrategy`) are not supported. Received: "
            f"cluster={jobs!r}"
        )
    if not set(jobs) <= {*TRAINING, "evaluator"} or len(jobs.get("chief", ())) > 1:
        raise ValueError(
            f"The 'cluster' of {source} must consist of 'worker', and perhaps one 'chief' and 'evaluator'. Received: "
            f"cluster={jobs!r}"
        )
    tasks = [Task(job, i, address) for job, addresses in jobs.items() for i, address in enumerate(addresses)]
    for task in tasks:
        found = _ADDRESS.fullmatch(task.address) if isinstance(task.address, str) else None
        if found is None or not 0 < int(found[2]) < 2**16:
            raise ValueError(f"The addresses in {source} must be 'host:port'. Received: {task.address!r}")
    if len({task.address for task in tasks}) < len(tasks):
        raise ValueError(f"The addresses in {source} must differ. Received: cluster={jobs!r}")
    if task_type not in jobs:
        raise ValueError(f"The task type in {source} must be one of {list(jobs)}. Received: type={task_type!r}")
    own = jobs[task_type]
    if not str(index).isdecimal() or isinstance(index, bool) or int(index) >= len(own):
        raise ValueError(
            f"The task index in {source} must be in [0, {len(own)}), for the {len(own)} addresses of {task_type!r}. "
            f"Received: index={index!r}"
        )
    training = [task for task in tasks if task.type in TRAINING]
    return Cluster(training, Task(task_type, int(index), own[int(index)]))


def wait(cluster: Cluster, timeout: float) -> None:
    """Returns when every other worker has been reached.

    A worker that waits listens at its own port too, so that all of them find each other.

    Raises:
        TimeoutError: some worker did not start within `timeout` seconds.
        RuntimeError: the port of this worker is in use.
    """
    missing, start, told = cluster.others, time.monotonic(), 0.0
    with _listening(cluster.own):
        while missing:
            missing = [task for task in missing if not _is_reached(task)]
            waited = time.monotonic() - start
            if missing and waited >= timeout:
                raise TimeoutError(
                    f"{_names(missing)} could not be reached within {timeout:g} seconds. Start every worker with the "
                    "same 'cluster' in TF_CONFIG, and check that the addresses are right and no firewall closes the "
                    f"ports; `timeout` sets the time. This is {cluster.own}."
                )
            if missing and waited >= told:
                _logger.warning("%s waits for %s.", cluster.own, _names(missing))
                told = waited + 15
            if missing:
                time.sleep(min(0.2, timeout / 10))


def _names(tasks: list[Task]) -> str:
    shown = ", ".join(map(str, tasks[:5]))
    return shown if len(tasks) <= 5 else f"{shown} and {len(tasks) - 5} more"


@contextmanager
def _listening(task: Task) -> Iterator[None]:
    port = task.host_and_port[1]
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        raise RuntimeError(
            f"The port {port} of {task} cannot be opened ({error.strerror}): is an earlier run still alive, or does "
            "another worker have the same task index?"
        ) from error
    with server:
        yield


def _is_reached(task: Task) -> bool:
    try:
        socket.create_connection(task.host_and_port, timeout=2).close()
    except OSError:
        return False
    return True

"""Processes that train under strategies, one for several logical devices and one for each worker, for many tests.

A process takes seconds to start, so that all tests share one. `Devices()(function, ...)` calls a function of
a test module in a process with four logical CPU devices, `Workers(2)(function, ...)` in each worker of a cluster. The
function gets the strategy, and arguments as JSON has them; what it returns comes back as JSON. Errors are raised here
too, by their type and message.
"""

import builtins
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading

from tests import forked, plain_tf_data

MARK = "\x01"  # begins a line that is an answer
LIMIT = 120  # seconds that a call may take


class Process:
    """One process, in which functions of test modules are called."""

    def __init__(self, kind, new=False, **environment):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = forked.start(
            "tests.distribution.processes",
            kind,
            new=new,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
        )

    def ask(self, function, **arguments):
        request = {"module": function.__module__, "name": function.__name__, "arguments": arguments}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """What the function returned that was asked for last; raises if that raised an error, or has ended."""
        timer = threading.Timer(LIMIT, self.process.kill)
        timer.start()
        for line in self.process.stdout:
            if line.startswith(MARK):
                break
        else:
            self.errors.seek(0)
            raise ChildProcessError(f"{self.process.wait()}: {self.errors.read()[-3000:]}")
        timer.cancel()
        answer = json.loads(line[1:])
        if "error" in answer:
            kind = getattr(builtins, answer["error"], RuntimeError)
            raise kind(answer["message"] if kind is not RuntimeError else f"{answer['error']}: {answer['message']}")
        return answer["value"]

    def stop(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


class Devices:
    """A process with four logical CPU devices: `devices(function, replicas=2, ...)`."""

    def __init__(self):
        self.process = Process("devices")

    def __call__(self, function, **arguments):
        self.process.ask(function, **arguments)
        return self.process.answer()

    def stop(self):
        self.process.stop()


class Workers:
    """The processes of a cluster: `workers(function, ...)` returns the list of what each of them returned."""

    def __init__(self, number):
        addresses = free_addresses(number)
        self.addresses = addresses
        # None is a fork: strings have other hashes in each, as in a real cluster, and all servers begin at one time.
        self.processes = [Process("worker", True, TF_CONFIG=tf_config(addresses, i)) for i in range(number)]

    def __call__(self, function, **arguments):
        for process in self.processes:
            process.ask(function, **arguments)
        answers, errors = [], []
        for process in self.processes:  # all of them, so that none is left for the next call
            try:
                answers.append(process.answer())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def are_alive(self):
        return all(process.process.poll() is None for process in self.processes)

    def stop(self):
        for process in self.processes:  # all at once, because at its end each waits for the others
            with contextlib.suppress(BrokenPipeError):
                process.process.stdin.close()
        for process in self.processes:
            process.stop()


def free_addresses(number):
    """Addresses of this machine at which nothing listens."""
    servers = [socket.create_server(("", 0)) for _ in range(number)]
    addresses = [f"localhost:{server.getsockname()[1]}" for server in servers]
    for server in servers:
        server.close()
    return addresses


def tf_config(addresses, index):
    return json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})


def main(kind):
    import tensorflow as tf

    from keras_tx.distribution import mirrored_strategy, multi_worker_strategy

    plain_tf_data.set_up()
    if kind == "devices":
        devices = [tf.config.LogicalDeviceConfiguration()] * 4
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
        strategies = {}
    else:
        strategy = multi_worker_strategy(timeout=60)
    for line in sys.stdin:
        request = json.loads(line)
        arguments = request["arguments"]
        if kind == "devices":
            replicas = arguments.pop("replicas", 2)
            if replicas not in strategies:
                strategies[replicas] = mirrored_strategy([f"CPU:{i}" for i in range(replicas)])
            strategy = strategies[replicas]
        try:
            function = getattr(importlib.import_module(request["module"]), request["name"])
            answer = {"value": function(strategy, **arguments)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

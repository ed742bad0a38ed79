"""Runs the programs of this folder in processes of their own, several at a time if they belong together."""

import json
import os
import socket
import subprocess
import sys

from tests import xla_flags

START = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
WITHOUT = "import sys; sys.modules['tensorflow'] = None; "  # its import takes longer than these programs
SECONDS = 300


def run(module, *arguments, backend, processes=1, devices=1, tensorflow=False):
    """The JSON that each process prints at last. They get `arguments`, and if there are several, number and port."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags.OF_JAX} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "KERAS_BACKEND": backend, "XLA_FLAGS": flags, "CUDA_VISIBLE_DEVICES": ""}
    places = [()] if processes == 1 else [(str(number), str(port)) for port in [_free()] for number in range(processes)]
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                START if tensorflow else WITHOUT + START,
                f"tests.distribution.{module}",
                *place,
                *map(str, arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for place in places
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def _free():
    """A port that no program listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]

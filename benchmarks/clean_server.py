"""Serves a SavedModel and times its answers in a process like a stock server's: without Keras, with XLA off.

`CleanServer` starts this file as a script: python -P clean_server.py VERSION
"""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

BECOMING_A_SERVER = Path(__file__).parents[1] / "keras_tx" / "serving" / "check" / "clean_process.py"


class CleanServer:
    """A process that has loaded an exported version without Keras; a context manager that ends it.

    Args:
        version: the version's folder.
        environment: variables of the environment of the process, in addition to those of this one.
    """

    def __init__(self, version, **environment):
        command = [sys.executable, "-P", __file__, str(Path(version).resolve())]
        environment = {**os.environ, **environment}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def answer(self, signature, **inputs):
        """The outputs by name, as lists, for inputs given as lists."""
        return self._ask(signature=signature, inputs=inputs)

    def prepare(self, name, signature, requests):
        """Turns requests, dicts of lists, into tensors that are kept as `name`, and answers each once to warm up."""
        self._ask(prepare=name, signature=signature, requests=requests)

    def run(self, name):
        """Seconds of each request that was prepared as `name`."""
        return self._ask(run=name)

    def _ask(self, **command):
        print(json.dumps(command), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with exit code {self.process.wait()}")
        return json.loads(line)


def serve(version):
    runpy.run_path(str(BECOMING_A_SERVER))["become_a_server"]()
    import tensorflow as tf  # only after Keras is shut out

    signatures = tf.saved_model.load(version).signatures
    prepared = {}

    def tensors(signature, inputs):
        specs = signature.structured_input_signature[1]
        return {name: tf.constant(values, specs[name].dtype) for name, values in inputs.items()}

    def seconds(signature, inputs):
        started = time.perf_counter()
        signature(**inputs)
        return time.perf_counter() - started

    for line in sys.stdin:
        command = json.loads(line)
        if "run" in command:
            signature, requests = prepared[command["run"]]
            reply = [seconds(signature, inputs) for inputs in requests]
        else:
            signature = signatures[command["signature"]]
            if "prepare" in command:
                requests = [tensors(signature, inputs) for inputs in command["requests"]]
                prepared[command["prepare"]] = signature, requests
                reply = [seconds(signature, inputs) for inputs in requests]
            else:
                outputs = signature(**tensors(signature, command["inputs"]))
                reply = {name: as_json(value.numpy().tolist()) for name, value in outputs.items()}
        print(json.dumps(reply), flush=True)


def as_json(value):
    if isinstance(value, list):
        return [as_json(one) for one in value]
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    serve(sys.argv[1])

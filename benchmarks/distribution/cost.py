"""What strategies cost: the time of a step, and the bytes that workers send.

python -m benchmarks distribution cost

1. `fit` under `mirrored_strategy` with one device against `fit` without a strategy, and two devices of the CPU against
   one with two threads, for the same global batches: alternating rounds in one process, an epoch each. To begin an
   epoch costs more under a strategy (about 0.1 s, whatever the number of steps), so that short epochs mislead.
2. Two workers on this machine: the bytes that go over the network in a step, against the arithmetic of the ring
   all-reduce, in which each of N workers sends 2 (N - 1) / N times the bytes of the gradients.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

from benchmarks.distribution.kills import free_ports

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from keras_tx import distribution, models, training

VOCABULARY, BATCH, LENGTH = 1000, 16, 64
SIZES = {"num_layers": 2, "hidden_dim": 256, "num_heads": 4, "intermediate_dim": 1024, "dropout": 0.0}


def new_model():
    keras.utils.set_random_seed(1)
    model = models.CausalLM(VOCABULARY, **SIZES)
    model.compile(keras.optimizers.Adam(1e-4), training.PaddedCrossentropy())
    return model


def batches(steps):
    ids = np.random.default_rng(1).integers(1, VOCABULARY, (steps * BATCH, LENGTH)).astype("int32")
    return tf.data.Dataset.from_tensor_slices((ids, ids)).batch(BATCH).cache().prefetch(2)


def step_times(rounds, steps):
    """Steps per second of each way, of each round."""
    warnings.filterwarnings("ignore", message="`fit` trains the model")  # outside of the scope, as it is meant to be
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    ways = {"no strategy": new_model()}
    for count in (1, 2):
        with distribution.mirrored_strategy([f"CPU:{i}" for i in range(count)]).scope():
            ways[f"{count} replica{'s' * (count - 1)}"] = new_model()
    data, speeds = batches(steps), {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, model in ways.items():
            start = time.perf_counter()
            model.fit(data, shuffle=False, verbose=0)
            if number:  # the first round traces
                speeds[name].append(steps / (time.perf_counter() - start))
    return speeds


def sent(first, last):
    """A callback that prints how many bytes the loopback device carried between two steps."""
    seen = {}

    def note(step, logs):
        if step in (first, last):
            seen[step] = loopback()
            if step == last:
                print(json.dumps({"bytes": (seen[last] - seen[first]) / (last - first)}), flush=True)

    return keras.callbacks.LambdaCallback(on_train_batch_end=note)


def loopback():
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.split()[0] == "lo:").split()[9])


def worker():
    with distribution.multi_worker_strategy(timeout=120).scope():
        model = new_model()
    model.fit(batches(30), shuffle=False, verbose=0, callbacks=[sent(9, 29)])
    print(json.dumps({"weights": model.count_params()}), flush=True)


def traffic(workers):
    """(bytes that each worker sends in a step, the arithmetic)."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
    running = []
    for index in range(workers):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        command = [sys.executable, "-m", "benchmarks.distribution.cost", "--worker"]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=600)[0] for process in running]
    found = {}
    for line in outputs[0].splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found["bytes"] / workers, 2 * (workers - 1) / workers * 4 * found["weights"]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        worker()
        return 0
    speeds = step_times(given.rounds, given.steps)
    print("| way | steps/s, median | least | most |\n|---|---|---|---|")
    for name, values in speeds.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")
    for one, other in (("1 replica", "no strategy"), ("2 replicas", "1 replica")):
        ratios = [a / b for a, b in zip(speeds[one], speeds[other], strict=True)]
        print(f"{one} against {other}: {statistics.median(ratios):.3f} times ({min(ratios):.3f} to {max(ratios):.3f})")
    for workers in (2, 3):
        measured, expected = traffic(workers)
        print(
            f"{workers} workers: each sends {measured / 1e6:.2f} MB a step; the gradients make {expected / 1e6:.2f} MB"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

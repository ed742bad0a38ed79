"""Kills workers of a training at random moments, and starts the same command again until it has ended.

python -m benchmarks.distribution kills --kills 20

Two workers train a small language model with `Resume`. Of five kills, three hit any worker at a random step, one the
chief while it writes the backup, and one the chief right after. Every other worker must end within a minute with an
error that names the lost one, and at the end the weights must be those of a run that was never interrupted, bit by bit.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 60  # seconds in which a survivor must end
WORKERS, EPOCHS, STEPS, SAVE_FREQ = 2, 3, 8, 3
ROUNDS = ["any", "any", "write", "any", "replaced"]


def child(folder: Path) -> None:
    """Trains as a worker; `KILL` in the environment is "write:N" or "replaced:N", the N-th backup of this process."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import numpy as np
    import tensorflow as tf

    from keras_tx import distribution, models, training
    from keras_tx.training import backups

    strategy = distribution.multi_worker_strategy(timeout=120)
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    place, _, number = os.environ.get("KILL", "never:0").partition(":")
    left = {place: int(number)}

    def reached(here: str) -> None:
        left[here] = left.get(here, 0) - 1
        if left[here] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    save, replace = backups.save, os.replace

    def dying_save(file, state, arrays):
        start = file.tell()
        save(file, state, arrays)
        if left.get("write") == 1:
            file.truncate((start + file.tell()) // 2)
        reached("write")

    def dying_replace(old, new):
        replace(old, new)
        reached("replaced")

    if place != "never":
        backups.save, os.replace = dying_save, dying_replace
    with strategy.scope():
        model = models.CausalLM(29, num_layers=1, hidden_dim=32, num_heads=2, intermediate_dim=64)
        model.compile(keras.optimizers.Adam(0.01), training.PaddedCrossentropy())
    ids = np.random.default_rng(1).integers(0, 29, (8 * STEPS - 3, 11)).astype("int32")
    rows = tf.data.Dataset.from_tensor_slices((ids, ids))
    resume = training.Resume(folder / "backup", save_freq=SAVE_FREQ)
    data = resume.dataset(lambda epoch: rows.shuffle(len(ids), seed=epoch).batch(8))
    tell = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: print("step", batch, flush=True))
    history = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[tell, resume])
    np.savez(folder / f"weights-{os.getpid()}.npz", *model.get_weights(), loss=history.history["loss"])
    print("done", flush=True)


class Run:
    """The workers of one start of the command."""

    def __init__(self, folder: Path, kill: str = ""):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
        self.workers, self.logs = [], []
        for index in range(WORKERS):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            environment = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3"}
            environment |= {"KILL": kill} if kill and index == 0 else {}
            command = [sys.executable, "-m", "benchmarks.distribution.kills", "--child", str(folder)]
            log = tempfile.TemporaryFile("w+")
            self.logs.append(log)
            self.workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        self.addresses = addresses

    def steps(self, index: int) -> int:
        return self.text(index).count("\nstep") + self.text(index).startswith("step")

    def text(self, index: int) -> str:
        self.logs[index].seek(0)
        return self.logs[index].read()

    def wait(self, seconds: float) -> bool:
        """Whether all workers ended within that time; the others are killed."""
        until = time.monotonic() + seconds
        while any(worker.poll() is None for worker in self.workers) and time.monotonic() < until:
            time.sleep(0.1)
        ended = all(worker.poll() is not None for worker in self.workers)
        for worker in self.workers:
            worker.kill()
            worker.wait()
        return ended


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def killed(folder: Path, kind: str, chance: random.Random) -> tuple[str, float]:
    """Starts the command and kills a worker; returns what happened, and the seconds that the survivor took to end."""
    run = Run(folder, f"{kind}:{chance.randint(1, 3)}" if kind != "any" else "")
    victim = chance.randrange(WORKERS) if kind == "any" else 0
    steps, until = chance.randint(1, 12), time.monotonic() + 300
    while run.workers[victim].poll() is None and time.monotonic() < until:
        if kind == "any" and run.steps(victim) >= steps:
            time.sleep(chance.random() * 0.05)
            run.workers[victim].kill()
        time.sleep(0.005)
    begun = time.monotonic()
    ended = run.wait(LIMIT)
    seconds, survivor = time.monotonic() - begun, 1 - victim
    statuses = [worker.returncode for worker in run.workers]
    if statuses == [0, 0]:
        return "ended before the kill", seconds
    if not ended:
        return f"HUNG: worker {survivor} went on for {LIMIT} s", seconds
    named = f"{run.addresses[victim]}) was lost" in run.text(survivor) or statuses[survivor] == 0
    told = "named the lost worker" if named else f"DID NOT NAME IT: {run.text(survivor)[-600:]}"
    return f"worker {victim} killed ({kind}); worker {survivor} {told}", seconds


def weights(folder: Path):
    import numpy as np

    found = [dict(np.load(path)) for path in sorted(folder.glob("weights-*.npz"))]
    return found[-2:]


def compared(found, expected) -> str:
    """Weights must be equal bit by bit. A mean over devices is summed in another order after a restart."""
    for one, other in zip(found, expected, strict=True):
        for key in set(one) | set(other):
            if key != "loss" and not (one[key] == other[key]).all():
                return f"OTHER weights, by up to {abs(one[key] - other[key]).max():.1e} in {key}"
    difference = max(abs(one["loss"] - other["loss"]).max() for one, other in zip(found, expected, strict=True))
    return f"{'OTHER losses' if difference > 1e-5 else 'the same weights'}; losses differ by {difference:.0e}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="the number of kills (default: 20)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(given.child)
        return 0
    chance, wrong, slowest, kills = random.Random(given.seed), 0, 0.0, 0
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name, "whole")
        whole.mkdir()
        assert Run(whole).wait(300)
        expected = weights(whole)
        number = 0
        while kills < given.kills:
            number += 1
            folder = Path(name, str(number))
            folder.mkdir()
            while not list(folder.glob("weights-*.npz")) and kills < given.kills:
                told, seconds = killed(folder, ROUNDS[kills % len(ROUNDS)], chance)
                kills += "killed" in told
                slowest = max(slowest, seconds) if "killed" in told else slowest
                wrong += "HUNG" in told or "NOT NAME" in told
                print(f"{kills:3} {told}; {seconds:.1f} s", flush=True)
            while not list(folder.glob("weights-*.npz")):
                assert Run(folder).wait(300)
            found = weights(folder)
            told = compared(found, expected)
            wrong += "OTHER" in told
            print(f"    run {number} ended with {told}", flush=True)
    print(f"\n{kills} kills, {number} runs, {wrong} wrong; a survivor ended at most {slowest:.0f} s after the kill")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

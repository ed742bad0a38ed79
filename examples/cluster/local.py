"""Starts several workers of a script on this machine, as a cluster would, each with its own TF_CONFIG.

python examples/cluster/local.py examples/write_text.py --strategy multi_worker
python examples/cluster/local.py --workers 3 my_script.py --my-option

Every line that a worker prints begins with its number. If a worker fails, the others end, too: by the error that they
raise, or after a minute. If the lines cannot be printed, as after `| head`, all workers end.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

PATIENCE = 60  # seconds that the other workers have to raise their own error after one has failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="the number of processes (default: 2)")
    parser.add_argument("script", help="the Python script that each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")
    given = parser.parse_args()
    if given.workers < 1:
        parser.error(f"--workers must be at least 1. Received: {given.workers}")
    if not os.path.isfile(given.script):
        parser.error(f"there is no file {given.script}")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(given.workers)]
    # Shells start programs in the background so that they ignore an interrupt; Slurm and Kubernetes send SIGTERM.
    stops = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup sets
        stops.append(signal.SIGHUP)
    for one in stops:
        signal.signal(one, signal.default_int_handler)
    sys.stdout.reconfigure(errors="backslashreplace")  # the encoding of the terminal may lack characters
    workers = []
    try:
        for index in range(given.workers):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            workers.append(start([given.script, *given.arguments], index, config))
        return wait(workers)
    except KeyboardInterrupt:
        return 130
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def free_ports(count):
    """Ports that nobody uses at the moment; they are held open together, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def start(command, index, config):
    """Starts a worker, and a thread that prints its lines with its number."""
    environment = {**os.environ, "TF_CONFIG": json.dumps(config), "PYTHONUNBUFFERED": "1"}
    # Worker i has its own share of the GPUs, if there are any: otherwise each would take the memory of all of them.
    devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[index :: len(config["cluster"]["worker"])])
    worker = subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    worker.unprintable = None
    worker.printer = threading.Thread(target=forward, args=(worker, f"[{index}] "), daemon=True)
    worker.printer.start()
    return worker


def forward(worker, mark):
    """Prints the lines of a worker. Reads them also if they cannot be printed, since a full pipe would block it."""
    for line in worker.stdout:
        if worker.unprintable is None:
            try:
                sys.stdout.write(mark + line)
                sys.stdout.flush()
            except OSError as error:
                worker.unprintable = error


def wait(workers):
    """Returns the exit status of the first worker that failed, or 0; 1 if the lines of a worker cannot be printed."""
    failed, until = 0, None
    while None in (statuses := [worker.poll() for worker in workers]):
        if any(worker.unprintable for worker in workers):
            break
        if not failed and any(statuses):
            failed = next(status for status in statuses if status)
            index, until = statuses.index(failed), time.monotonic() + PATIENCE
            print(f"worker {index} failed with the exit status {failed}; the others must end, too", flush=True)
        if until is not None and time.monotonic() > until:
            break
        time.sleep(0.1)
    for worker in workers:
        worker.kill()
        worker.printer.join(5)
    if error := next((worker.unprintable for worker in workers if worker.unprintable), None):
        print(f"local.py cannot print what the workers print, and ends them: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left at its end
        return 1
    return abs(failed or next((status for status in statuses if status), 0))


if __name__ == "__main__":
    sys.exit(main())

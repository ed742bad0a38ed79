"""Starts tf.data's service, whose machines read and prepare the data for those that train.

On the machine that hands out the work, and that the training asks for data:

    python examples/cluster/data_service.py dispatcher --port 5050 --folder /shared/tf_data_service

On every machine that prepares data:

    python examples/cluster/data_service.py worker --dispatcher HOST:5050 --address THIS_HOST:5051

All of them on one machine, for a trial: `python examples/cluster/data_service.py local --workers 2`.

The training names the dispatcher: `write_text.py --data-service grpc://HOST:5050`. With --folder, a dispatcher that was
stopped goes on where it was.
"""

import argparse
import os
import signal
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the service needs no GPU

import tensorflow as tf

service = tf.data.experimental.service


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    dispatcher = parts.add_parser("dispatcher", help="hands out the work")
    worker = parts.add_parser("worker", help="prepares data")
    local = parts.add_parser("local", help="a dispatcher and workers on this machine")
    for one in (dispatcher, local):
        one.add_argument("--port", type=port, default=5050, help="the port of the dispatcher (default: 5050)")
        one.add_argument("--folder", help="where the dispatcher writes what it has handed out, to survive a restart")
    local.add_argument("--workers", type=positive, default=2, help="the number of workers (default: 2)")
    worker.add_argument("--dispatcher", type=address, required=True, help="the address of the dispatcher, host:port")
    worker.add_argument(
        "--address", type=address, required=True, help="the address of this machine for the trainers, host:port"
    )
    given = parser.parse_args()
    running = []
    if given.part in ("dispatcher", "local"):
        running.append(start_dispatcher(given.port, given.folder))
        print(f"the dispatcher listens at {running[0].target}", flush=True)
    if given.part == "local":
        running += [start_worker(running[0].target.rpartition("/")[2], "localhost:0", 0) for _ in range(given.workers)]
    if given.part == "worker":
        running.append(start_worker(given.dispatcher, given.address, int(given.address.rpartition(":")[2])))
    print(f"{len(running)} of tf.data's service run; stop them with Ctrl+C", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    return 0


def positive(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it must be a positive integer. Received: {text}")
    return int(text)


def port(text):
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"it must be a port, from 0 to 65535, where 0 takes a free one. Received: {text}"
        )
    return int(text)


def address(text):
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal() or int(number) > 65535:
        raise argparse.ArgumentTypeError(f"it must be host:port, with a port from 0 to 65535. Received: {text}")
    return text


def start_dispatcher(port, folder):
    options = {"work_dir": folder, "fault_tolerant_mode": True} if folder else {}
    return service.DispatchServer(service.DispatcherConfig(port=port, **options))


def start_worker(dispatcher, address, port):
    address = address.replace(":0", ":%port%")  # the service puts the port there that it has chosen
    config = service.WorkerConfig(dispatcher_address=dispatcher, worker_address=address, port=port)
    return service.WorkerServer(config)


if __name__ == "__main__":
    sys.exit(main())

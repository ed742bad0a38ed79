"""The options of write_text.py and translate.py for several devices and machines. This module does not import Keras."""

import argparse
import os
import re

import option_checks

BACKENDS = ("tensorflow", "jax")


def add_arguments(parser):
    group = parser.add_argument_group("several devices and machines")
    group.add_argument(
        "--strategy",
        choices=("mirrored", "multi_worker"),
        help="TensorFlow on all GPUs of this machine, or on the machines of TF_CONFIG (see examples/cluster)",
    )
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default=backend(),
        help="the backend of Keras (default: KERAS_BACKEND, or tensorflow)",
    )
    group.add_argument(
        "--mesh",
        type=mesh,
        metavar="DATAxMODEL",
        help="for --backend jax: 4x2 splits every batch into 4 parts and the weights of the model into 2",
    )
    group.add_argument(
        "--cpu-devices",
        type=option_checks.positive,
        default=0,
        help="for a trial without GPUs: treat the CPU as this many devices",
    )


def check(parser, arguments):
    """Ends the program with a message if options do not fit together."""
    if arguments.mesh and arguments.backend != "jax":
        parser.error("--mesh needs --backend jax")
    if arguments.strategy and arguments.backend == "jax":
        parser.error("--strategy is for TensorFlow; --backend jax takes --mesh")
    if arguments.strategy == "multi_worker" and arguments.cpu_devices:
        parser.error("--cpu-devices is for one machine: every worker of --strategy multi_worker has one CPU")


def why_no_export(arguments):
    if arguments.no_export:
        return "No export, because of --no-export. model.keras can be loaded and exported."
    return (
        "No export: this example exports on the TensorFlow backend only. model.keras can be loaded and exported there."
    )


def mesh(text):
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or "0" in (sizes := found.groups()):
        raise argparse.ArgumentTypeError(f"it must be two numbers such as 2x2. Received: {text}")
    return tuple(map(int, sizes))


def backend():
    """The value of --backend, which must be known before Keras is imported.

    Ends the program if KERAS_BACKEND counts and is another one.
    """
    chosen = _given().backend
    if chosen is None:
        chosen = os.environ.get("KERAS_BACKEND") or BACKENDS[0]
        if chosen not in BACKENDS:
            raise SystemExit(
                f"KERAS_BACKEND must be one of {', '.join(BACKENDS)} for this example, or --backend be given. "
                f"Received: KERAS_BACKEND={chosen}"
            )
    return chosen if chosen in BACKENDS else BACKENDS[0]  # the parser of the example refuses any other --backend


def xla_flags():
    """XLA_FLAGS with the number of devices that JAX makes of the CPU."""
    count = _given().cpu_devices
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}" if count.isdecimal() and int(count) else flags


def _given():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--backend")
    parser.add_argument("--cpu-devices", default="0")
    return parser.parse_known_args()[0]

"""Runs tests, training, kernels and benchmarks on a machine with a GPU; writes log.txt, table.md and rows.jsonl.

`scripts/gpu` is this program; its header says how to use it.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import wheels
from benchmarks.gpu.report import document
from benchmarks.parts import ROOT, Job, Part, Result, last_line, run
from benchmarks.reports import Report

NAMES = {"jax": "JAX", "torch": "PyTorch"}
BENCHMARKS = ("encoder", "fused", "decode", "pretrained", "memory", "profile")
# The parts in their order, and their shares of the time.
SHARES = {"tests": 110, "fit": 45, "kernels": 45}
SHARES |= {"encoder": 130, "fused": 45, "decode": 50, "pretrained": 45, "memory": 40, "profile": 30}
TESTS = ("tests/layers/test_fused_attention.py", "tests/layers", "tests/models", "tests/generation", "tests/training")
WORKERS = {"jax": 2, "torch": 1}  # their shares of the cores: JAX compiles, which takes longer
FEW_TESTS = ("tests/layers/test_activations.py", "tests/layers/test_masks.py", "tests/training/test_schedules.py")
# The options of the benchmarks.
GPU_SIZES = {
    "encoder": "--policy mixed_bfloat16 --shapes 64x512 8x2048 --rounds 3 --products 8192 8192 8192",
    "fused": "--policy mixed_bfloat16 --shapes 64x512 8x2048 2x8192 --rounds 3",
    "decode": "--policy bfloat16 --batch-size 8 --rounds 3 --transformers --memory 8",
    "pretrained": "--policy mixed_bfloat16 --batch-size 64 --length 256 --rounds 3",
    "memory": "--policy mixed_bfloat16 --lengths 8192 32768 --rounds 2 --together",
}
SMALL_SIZES = {
    "encoder": "--policy mixed_bfloat16 --shapes 2x32 --layers 1 --rounds 1 --products 256 256 256",
    "fused": "--policy mixed_bfloat16 --shapes 2x64 --rounds 1",
    "decode": "--policy bfloat16 --layers 1 --new-tokens 4 --rounds 1 --transformers --memory 0.1",
    "pretrained": "--policy mixed_bfloat16 --batch-size 2 --length 16 --layers 1 --rounds 1",
    "memory": "--policy mixed_bfloat16 --lengths 256 --only attention --rounds 1",
}
CORRECTNESS = ("tests", "fit", "kernels")  # these parts run on both backends at the same time; timings run alone
ON_JAX_ALONE = ("decode", "pretrained", "profile")  # where the peers on PyTorch are in the same job, if there are any
# Float32 products of float32 numbers, which GPUs round to 10 bits otherwise: for what compares numbers.
EXACT = {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0"}
PROBE_SECONDS = 120
PROBE = """
import importlib.metadata, json, os
words = {}
try:
    import torch
    found = torch.cuda.is_available()
    words["PyTorch computes on"] = torch.cuda.get_device_name(0) if found else "CPU"
except Exception as problem:
    words["PyTorch computes on"] = f"nothing: {problem}"
try:
    import jax
    device = jax.devices()[0]
    words["JAX computes on"] = device.device_kind if device.platform in ("gpu", "cuda") else device.platform.upper()
except Exception as problem:
    words["JAX computes on"] = f"nothing: {problem}"
names = ("keras", "jax", "torch", "keras-hub", "transformers", "numpy", "tensorflow")
versions = []
for name in names:
    try:
        versions.append(f"{name} {importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        versions.append(f"no {name}")
words["Versions"] = ", ".join(versions)
print(json.dumps(words))
"""


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Tests, training, kernels and benchmarks on a machine with an NVIDIA GPU, JAX and PyTorch.",
        epilog=f"Parts: {', '.join(SHARES)}. `benchmarks` stands for {', '.join(BENCHMARKS)}.",
    )
    parser.add_argument("--parts", default=",".join(SHARES), help="names of parts, with commas between them")
    parser.add_argument("--backends", nargs="+", choices=NAMES, default=list(NAMES), help="default: both")
    parser.add_argument("--tests", nargs="+", default=[], help="files or tests that the part tests runs instead")
    parser.add_argument("--out", type=Path, default=Path("logs/gpu"), help="the folder of log, table and rows")
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run; the parts share them")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="the folder with the missing packages")
    parser.add_argument("--small", action="store_true", help="small sizes even where there is a GPU")
    parser.add_argument("--download", type=Path, metavar="FOLDER", help="only fetch the wheels into this folder")
    version = "{}.{}".format(*sys.version_info[:2])
    parser.add_argument("--python", default=version, help="with --download: the Python of the machine with the GPU")
    arguments = parser.parse_args(words)
    parts = []
    for name in arguments.parts.split(","):
        parts += BENCHMARKS if name == "benchmarks" else [name]
    if unknown := set(parts) - set(SHARES):
        parser.error(f"--parts must be of {', '.join(SHARES)}, benchmarks. Received: {', '.join(sorted(unknown))}")
    arguments.parts = [name for name in SHARES if name in parts]
    return arguments


def machine(environment: Mapping[str, str]) -> dict[str, str]:
    """Words about this machine: what the frameworks compute on, and the versions."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        cards = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        cards = "none"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=PROBE_SECONDS,
        )
        found = json.loads(probe.stdout.splitlines()[-1]) if probe.stdout else {"Frameworks": last_line(probe.stderr)}
    except (subprocess.SubprocessError, ValueError) as error:
        found = {"Frameworks": f"could not be asked: {error}"}
    return {
        "Date": datetime.datetime.now().isoformat(" ", "minutes"),
        "GPU": cards.replace("\n", "; "),
        **found,
        "Processor": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def has_gpu(words: Mapping[str, str], backend: str) -> bool:
    device = words.get(f"{NAMES[backend]} computes on", "CPU")
    return device != "CPU" and not device.startswith("nothing")


def tests_summary(output: str) -> str:
    """The last line of pytest, with or without an interruption."""
    lines = [line.strip("= ") for line in output.splitlines() if " in " in line and line.strip("= ")[:1].isdigit()]
    return lines[-1] if lines else last_line(output)


def tests(small: bool, backend: str, backends: Collection[str], chosen: Sequence[str]) -> list[str]:
    """The command of pytest, for the `chosen` files or tests if there are any; all `backends` share the cores.

    Warnings of other versions than ours fail nothing here.
    """
    options = ["-q", "-p", "benchmarks.gpu.failures", "-p", "no:cacheprovider", "-W", "default", "--disable-warnings"]
    options += ["--tb=short", "--show-capture=no"]
    share = WORKERS[backend] / sum(WORKERS[one] for one in backends)
    workers = 0 if small else int(0.9 * share * (os.cpu_count() or 1))
    options += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    options += ["-m", "not slow and not process"]
    return [sys.executable, "-m", "pytest", *options, *(chosen or (FEW_TESTS if small else TESTS))]


def command_of(name: str, small: bool, rows: Path) -> list[str]:
    """The command of a part other than the tests."""
    if name in SMALL_SIZES:
        words = ["benchmarks", name, "--json", str(rows), *(SMALL_SIZES if small else GPU_SIZES)[name].split()]
    else:
        few = {"fit": "--policies mixed_bfloat16", "kernels": "--cases causal padded window"}.get(name, "")
        words = [f"benchmarks.gpu.{name}", "--json", str(rows), *(["--small", *few.split()] if small else [])]
    return [sys.executable, "-m", *words]


def parts(
    chosen: Sequence[str],
    environment: Mapping[str, str],
    small: Mapping[str, bool],
    rows: Path,
    chosen_tests: Sequence[str] = (),
) -> list[Part]:
    """The parts of these names. `small` says for each backend whether its sizes are those without a GPU."""
    summaries = {"tests": tests_summary, "fit": last_line, "kernels": last_line}
    made = []
    for name in chosen:
        shared = {**environment, **(EXACT if name in CORRECTNESS else {})}
        shared |= {"OMP_NUM_THREADS": "1"} if name == "tests" else {}  # each core has a process of its own
        jobs = []
        for backend, is_small in small.items():
            if backend != "jax" and name in ON_JAX_ALONE:
                continue
            is_tests = name == "tests"
            command = tests(is_small, backend, small, chosen_tests) if is_tests else command_of(name, is_small, rows)
            jobs.append(Job(NAMES[backend], command, {**shared, "KERAS_BACKEND": backend}))
        summary = summaries.get(name, lambda output: "")
        made.append(Part(name, jobs, SHARES[name], together=name in CORRECTNESS, summary=summary))
    return made


def main() -> None:
    started, arguments = time.monotonic(), arguments_of()
    if arguments.download:
        return wheels.download(arguments.download, arguments.python)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        packages = wheels.install(arguments.wheels, site)
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the GPU
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder, "jax")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # the tests' processes compile much that is the same
        }
        command = " ".join(["scripts/gpu", *sys.argv[1:]])
        words = {**machine(environment), "Command": f"`{command}`", "Packages": " ".join(packages.split())}
        small = {backend: arguments.small or not has_gpu(words, backend) for backend in arguments.backends}
        if all(small.values()):
            environment["OMP_NUM_THREADS"] = "1"  # small sizes gain nothing from more
        report = Report(arguments.out.resolve(), words, functools.partial(document, any(small.values())))
        left = 60 * arguments.minutes - (time.monotonic() - started)
        statuses = []

        def done(result: Result) -> None:
            statuses.append(result.status)
            report.add(result)

        made = parts(arguments.parts, environment, small, report.rows, arguments.tests)
        run([part for part in made if part.jobs], left, done)
        print(
            f"{statuses.count('ok')} of {len(statuses)} jobs ok; see {arguments.out}/table.md and log.txt", flush=True
        )
    sys.exit(any(status != "ok" for status in statuses))


if __name__ == "__main__":
    main()

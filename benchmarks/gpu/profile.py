"""Where the time of training steps goes on JAX: the shares of matrix products and attention kernels, by `jax.profiler`.

KERAS_BACKEND=jax python -m benchmarks.gpu.profile

The encoder of `python -m benchmarks encoder` in bfloat16, with dropout, and without, where attention takes a kernel.
Prints the ten operations that take longest, so that a reader sees what the shares are made of.
"""

import argparse
import collections
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras

from benchmarks import alternating, encoder

# Names of a GPU's programs: cuBLAS ("nvjet", "gemm", "xmma"), CUTLASS, and those that XLA makes ("gemm_fusion_dot").
ATTENTION = re.compile(r"sdpa|fmha|flash", re.IGNORECASE)
PRODUCTS = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|cublas|(^|_)dot|matmul|convolution", re.IGNORECASE)
WARM_UP, STEPS = 3, 5


def kind(name: str) -> str:
    if ATTENTION.search(name):
        return "attention kernels"
    return "matrix products" if PRODUCTS.search(name) else "the rest"


def operations(folder: str) -> dict[str, float]:
    """Seconds by operation, of the trace in `folder`: of the GPU's streams, or of XLA's threads on a CPU."""
    trace = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    planes = [plane for plane in trace.planes if plane.name.startswith("/device:GPU")]
    on_gpu = bool(planes)
    planes = planes or [plane for plane in trace.planes if plane.name == "/host:CPU"]
    seconds: collections.Counter[str] = collections.Counter()
    for plane in planes:
        lines = list(plane.lines)
        if on_gpu:  # the other lines say the same once more, by module and by framework
            streams = [line for line in lines if line.name.startswith("Stream")]
            lines = streams or [line for line in lines if line.name == "XLA Ops"]
        for line in lines:
            for event in line.events:
                if on_gpu or "hlo_op" in dict(event.stats):
                    seconds[event.name] += event.duration_ns / 1e9
    return dict(seconds)


def traced(step: Callable[[], object]) -> tuple[dict[str, float], list[float]]:
    """Seconds by operation over `STEPS` steps, and seconds of each step without the profiler."""
    for _ in range(WARM_UP):
        step()
    times = [alternating.seconds(step) for _ in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                step()
        return operations(folder), times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file that gets a JSON line for each program")
    parser.add_argument("--small", action="store_true", help="small sizes, for a machine without a GPU")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy("mixed_bfloat16")
    encoder.STEPS = 1
    encoder.LAYERS = 1 if arguments.small else encoder.LAYERS
    steps = {}
    for size, length in [(2, 32)] if arguments.small else [(64, 512), (8, 2048)]:
        for dropout in (0.1, 0.0):
            encoder.DROPOUT = dropout
            case = f"training step, encoder, {size}x{length}, dropout {dropout}, mixed_bfloat16"
            steps[case], _ = encoder.ours(*encoder.batch(size, length))
    alternating.warm_up({case: [step] for case, step in steps.items()}, times=1)
    for case, step in steps.items():
        seconds, times = traced(step)
        total = sum(seconds.values())
        if not total:
            raise SystemExit("The trace has no operations of the device.")
        shares = collections.Counter[str]({"matrix products": 0, "attention kernels": 0, "the rest": 0})
        for name, taken in seconds.items():
            shares[kind(name)] += taken / total
        row = {"kind": "profile", "case": case, "steps": times, "busy": total / STEPS, "shares": dict(shares)}
        alternating.write(arguments.json, row)
        print(f"{case}: the device computes {1000 * total / STEPS:.2f} ms a step")
        for name, taken in sorted(seconds.items(), key=lambda item: -item[1])[:10]:
            print(f"  {taken / total:6.1%} {1000 * taken / STEPS:8.3f} ms  {kind(name):18} {name[:90]}")
        print("  " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), flush=True)


if __name__ == "__main__":
    main()

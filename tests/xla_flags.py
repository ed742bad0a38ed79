"""Options with which XLA compiles soon: the programs of tests are small and run once, as in JAX's own tests."""

import importlib.metadata
import os

OF_ALL = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def of_jax(version: str) -> str:
    """The options for this version of JAX, "" for none; a version that does not know one of them ends the process."""
    if not version:
        return ""
    options = ["--xla_cpu_parallel_codegen_split_count=1", "--xla_gpu_autotune_level=0"]
    if tuple(map(int, version.split(".")[:2])) < (0, 11):
        # XLA has two ways to write kernels; without the newer one it compiles in half of the time.
        options.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(options)


def _version_of_jax() -> str:
    try:
        return importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        return ""


OF_JAX = of_jax(_version_of_jax())
OF_BACKEND = f"{OF_ALL} {OF_JAX}" if os.environ.get("KERAS_BACKEND") == "jax" else OF_ALL

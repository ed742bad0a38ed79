"""Options with which XLA compiles soon: the programs of tests are small and run once, as in JAX's own tests."""

import os

OF_ALL = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Without the newer of its two ways to write kernels, the XLA of JAX compiles in half of the time. Versions of JAX that
# do not know these options end the process; setup.cfg names those that do.
OF_JAX = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
OF_BACKEND = f"{OF_ALL} {OF_JAX}" if os.environ.get("KERAS_BACKEND") == "jax" else OF_ALL

"""The fused kernels against dense attention in float32, forward and backward: the largest errors.

KERAS_BACKEND=torch python -m benchmarks.gpu.kernels
KERAS_BACKEND=jax python -m benchmarks.gpu.kernels --small

An error is the largest difference divided by the largest number of the float32 result; both sides get the same numbers,
rounded to the kernel's dtype. Prints which kernels ran, and fails where an error is above what is allowed, or where a
GPU has a kernel that keras_tx says it takes and that did not run.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # else JAX rounds float32 products on GPUs
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")  # the float32 side need not be fast

import keras
import numpy as np

from benchmarks import alternating
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.attention.fused import attend_fused, prefers_fused
from keras_tx.layers.masks import Visible

# By dtype: the largest errors that are allowed, forward and backward. Rounding once costs 0.004, 0.0005 and 6e-8.
ALLOWED = {"bfloat16": (0.01, 0.02), "float16": (0.002, 0.004), "float32": (1e-4, 1e-4)}
# By name: batch, queries, keys, heads, key heads, head size, and what each query may look at.
CASES: dict[str, tuple[tuple[int, int, int, int, int, int], dict[str, Any]]] = {
    "all keys": ((4, 512, 512, 8, 8, 64), {}),
    "causal": ((4, 512, 512, 8, 8, 64), {"causal": True}),
    "causal, head size 128": ((2, 512, 512, 4, 4, 128), {"causal": True}),
    "padded": ((4, 512, 512, 8, 8, 64), {"padded": True}),
    "padded and causal": ((4, 512, 512, 8, 8, 64), {"padded": True, "causal": True}),
    "cross-attention, padded": ((4, 128, 512, 8, 8, 64), {"padded": True, "cross": True}),
    "grouped heads, causal": ((4, 512, 512, 8, 2, 64), {"causal": True}),
    "grouped heads, padded": ((4, 512, 512, 8, 2, 64), {"padded": True}),
    "window": ((4, 512, 512, 8, 8, 64), {"window": 64}),
    "window, causal": ((4, 512, 512, 8, 8, 64), {"causal": True, "window": 64}),
    "window, causal, padded, grouped heads": ((4, 512, 512, 8, 2, 64), {"causal": True, "window": 64, "padded": True}),
    "odd lengths": ((4, 511, 511, 8, 8, 64), {"causal": True}),
}
SMALLER = 8  # by what lengths are divided where there is no GPU
Outputs = tuple[list[np.ndarray], list[str]]  # the output and the three gradients, and the kernels that ran


def visible(batch: int, queries: int, keys: int, options: dict[str, Any]) -> Visible:
    """Which keys each query may look at. Of padded sequences each next one is shorter; the first is whole."""
    lengths = np.maximum(1, keys - np.arange(batch) * keys // batch)
    real = np.arange(keys)[None] < lengths[:, None]
    padded = {"keys": (real,)} if options.get("padded") else {}
    if padded and not options.get("cross"):
        padded["queries"] = real
    return Visible(causal=options.get("causal", False), window=options.get("window"), **padded)


def on_torch(function: Callable[..., Any], tensors: Sequence[np.ndarray], weights: np.ndarray, dtype: str) -> Outputs:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    names = set()

    class Names(TorchDispatchMode):
        """Keeps the names of the operations of attention; PyTorch has one for each kernel."""

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if match := re.search(r"_scaled_dot_product_(?:fused_)?(\w+?)_?attention(\w*)", operation.name()):
                names.add((match[1] + match[2].replace("_", " ")).removesuffix(" backward"))
            return operation(*args, **(kwargs or {}))

    device = keras.ops.convert_to_tensor(0.0).device
    made = [torch.tensor(x, device=device).to(getattr(torch, dtype)).requires_grad_() for x in tensors]
    with Names():
        output = function(*made)
        (output.float() * torch.tensor(weights, device=device)).sum().backward()
    return [x.detach().float().cpu().numpy() for x in (output, *[x.grad for x in made])], sorted(names)


def on_jax(function: Callable[..., Any], tensors: Sequence[np.ndarray], weights: np.ndarray, dtype: str) -> Outputs:
    import jax

    def both(tensors: Any, weights: Any) -> Any:
        output, backward = jax.vjp(function, *tensors)
        return output, *backward(weights.astype(output.dtype))

    made = [jax.numpy.asarray(x).astype(dtype) for x in tensors]
    compiled = jax.jit(both).lower(made, jax.numpy.asarray(weights)).compile()
    names = set(re.findall(r"__cudnn\$(fmha\w+)", compiled.as_text()))
    return [np.asarray(x.astype("float32")) for x in compiled(made, jax.numpy.asarray(weights))], sorted(names)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """NaN where the actual numbers are not finite."""
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


def row(name: str, dtype: str, small: bool) -> dict[str, Any]:
    """What came out of the case `name`."""
    (batch, queries, keys, heads, key_heads, size), options = CASES[name]
    if small:
        batch, queries, keys = min(batch, 2), queries // SMALLER, keys // SMALLER
        options = {**options, **({"window": 8} if "window" in options else {})}
    random = np.random.default_rng(7)
    shapes = (queries, heads), (keys, key_heads), (keys, key_heads)
    tensors = [random.normal(size=(batch, length, each, size)).astype("float32") for length, each in shapes]
    weights = random.normal(size=(batch, queries, heads, size)).astype("float32")
    seen = visible(batch, queries, keys, options)
    outputs_of = on_torch if keras.backend.backend() == "torch" else on_jax
    tensors = [keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.cast(x, dtype), "float32")) for x in tensors]

    def dense(query: Any, key: Any, value: Any) -> Any:
        return attend(query, key, value, mask=seen.whole(queries, keys))[0]

    expected, _ = outputs_of(dense, tensors, weights, "float32")
    actual, kernels = outputs_of(lambda *x: attend_fused(*x, seen), tensors, weights, dtype)
    errors = [error(one, other) for one, other in zip(actual, expected, strict=True)]
    allowed = ALLOWED[dtype]
    forward, backward = errors[0], float(np.max(errors[1:]))
    made = [keras.ops.cast(keras.ops.convert_to_tensor(x), dtype) for x in tensors]
    taken = prefers_fused(*made, seen, bias=None, training=True, long=False)
    absent = taken and (not kernels or kernels == ["math"])  # PyTorch's "math" is no kernel
    ok = forward <= allowed[0] and backward <= allowed[1] and not absent
    reason = {"reason": "keras_tx takes a kernel here, and none ran"} if absent else {}
    return {"forward": forward, "backward": backward, "allowed": allowed, "kernels": kernels, "ok": ok, **reason}


def row_or_reason(dtype: str, name: str, small: bool) -> dict[str, Any]:
    """A line of the table; of a case that raises an error it has the reason, as the others are still worth having."""
    one = {"kind": "kernel", "case": name, "backend": keras.backend.backend(), "dtype": dtype}
    try:
        return one | row(name, dtype, small)
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}"
        nothing = {"forward": float("nan"), "backward": float("nan"), "kernels": [], "allowed": ALLOWED[dtype]}
        return one | {"ok": False, "reason": reason[:300], **nothing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file that gets a JSON line for each case")
    parser.add_argument("--small", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    backend = keras.backend.backend()
    dtypes = ["bfloat16", "float16", "float32"] if backend == "torch" else ["bfloat16"]
    if backend == "jax" and not arguments.small:
        dtypes.append("float16")  # JAX has it on GPUs alone; cuDNN has no kernel for float32
    cases = [(dtype, name) for dtype in dtypes for name in arguments.cases]
    rows = []
    for dtype, name in cases:
        one = row_or_reason(dtype, name, arguments.small)
        rows.append(one)
        alternating.write(arguments.json, one)
        result = "ok" if one["ok"] else "FAILED"
        print(
            f"{dtype:9} {name:38} forward {one['forward']:.1e}  backward {one['backward']:.1e}  "
            f"{', '.join(one['kernels']) or 'no kernel'}  {result}  {one.get('reason', '')}",
            flush=True,
        )
    failed = [one for one in rows if not one["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} cases within the allowed errors")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

"""What processor this is: timings of different ones must not be compared."""

import platform
from pathlib import Path

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # that matter here


def processor() -> str:
    """Its name, family and model, and which of the instructions that matter here it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    # Each core has the same lines. Of equal keys the last counts, so reversed it is the first core.
    words = dict(reversed([[one.strip() for one in line.split(":", 1)] for line in lines if ":" in line]))
    name = words.get("model name", platform.machine())
    instructions = ", ".join(sorted({*INSTRUCTIONS} & {*words.get("flags", "").split()}))
    return f"{name}, family {words.get('cpu family', '?')} model {words.get('model', '?')} ({instructions})"

"""Two processes with other hash seeds, for what is to be the same in all."""

import os
import subprocess
import sys


def same_in_every_process(module, function):
    """True if `function` of `module` makes the same in both."""
    code = (
        f"import hashlib, runpy; made = runpy.run_path({module.__file__!r})[{function!r}](); "
        "print(hashlib.sha256(repr(made).encode()).hexdigest())"
    )
    digests = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    return digests[0] == digests[1] != ""

"""How long `import keras_tx` takes after `import keras`: medians over fresh processes.

python -m benchmarks import_time
"""

import statistics
import subprocess
import sys

RUNS = 7
CODE = (
    "import time; a = time.perf_counter(); import keras; b = time.perf_counter(); import keras_tx; "
    "print(b - a, time.perf_counter() - b)"
)


def main():
    runs = []
    for _ in range(RUNS + 1):  # the first one fills the file cache and does not count
        output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
        runs.append([float(seconds) for seconds in output.split()])
    for name, times in zip(("import keras", "import keras_tx after it"), zip(*runs[1:], strict=True), strict=True):
        print(f"{name}: {statistics.median(times):.3f} s (median of {RUNS}, {min(times):.3f} to {max(times):.3f})")


if __name__ == "__main__":
    main()

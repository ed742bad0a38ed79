"""What `import keras_tx` costs over `import keras`: fresh processes in turn, medians.

python -m benchmarks.import_time
"""

import statistics
import subprocess
import sys

RUNS = 9


def seconds(module):
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main():
    seconds("keras_tx")  # the first run fills the file cache
    times = {module: [] for module in ("keras", "keras_tx")}
    for _ in range(RUNS):
        for module, runs in times.items():
            runs.append(seconds(module))
    medians = {module: statistics.median(runs) for module, runs in times.items()}
    for module, median in medians.items():
        print(
            f"import {module}: {median:.2f} s (median of {RUNS}, {min(times[module]):.2f} to {max(times[module]):.2f})"
        )
    print(f"keras_tx over keras: {medians['keras_tx'] - medians['keras']:+.2f} s")


if __name__ == "__main__":
    main()

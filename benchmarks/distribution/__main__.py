"""Training on several devices and machines: python -m benchmarks distribution PART [options]."""

import argparse
import importlib
import sys

PARTS = {
    "cost": "steps under strategies against one device, and the bytes that workers send",
    "kills": "workers that are killed, and the weights at the end",
    "data": "memory and speed with a file larger than memory",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(f"{name}: {text}" for name, text in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args(sys.argv[1:2]).part
    sys.argv[:2] = [f"{sys.argv[0]} {part}"]
    return importlib.import_module(f"benchmarks.distribution.{part}").main() or 0


if __name__ == "__main__":
    sys.exit(main())

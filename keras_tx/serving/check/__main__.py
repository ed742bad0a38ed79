"""python -m keras_tx.serving.check PATH: prints the report of `keras_tx.serving.check`; exit code 1 if it isn't ok."""

import argparse
import sys
from collections.abc import Sequence

from keras_tx.serving.check import check

DESCRIPTION = (
    "Checks a version in a clean process. Exit code: 0 it is in order, 1 it is not, 2 it cannot be checked: there is "
    "no version, or it needs tensorflow_text, which is not installed."
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keras_tx.serving.check", description=DESCRIPTION)
    parser.add_argument("path", help="the version's folder, such as saved_models/reviews/1")
    try:
        report = check(parser.parse_args(arguments).path)
    except (FileNotFoundError, ImportError, ValueError) as error:
        parser.error(str(error))
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

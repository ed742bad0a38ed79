"""Makes tables in Markdown, with the command of each row, from the JSON lines of other benchmarks.

python -m benchmarks encoder --json lines.jsonl
python -m benchmarks table lines.jsonl
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import alternating

Row = Mapping[str, object]


def of_speed(row: Row) -> list[str]:
    limit = f"{statistics.median(row['rates']) / row['limit']:.2f}" if row["limit"] else ""
    ratio = "" if row["run"] == row["ours"] else alternating.spread(row["ratios"], ".2f")
    for variant, ratios in row.get("of_variants", {}).items():
        ratio += f"; {variant.removeprefix(row['ours'] + ', ')} {alternating.spread(ratios, '.2f')}"
    rate = f"{alternating.spread(row['rates'], ',.0f')} {row['unit']}"
    step = f"{1000 * statistics.median(row['steps']):,.2f} ms"
    return [row["case"], row["run"], rate, step, limit, ratio, f"`{row['command']}`"]


def of_memory(row: Row) -> list[str]:
    if "error" in row:
        return [row["case"], row["run"], "fails", "", f"`{row['command']}`"]
    return [row["case"], row["run"], f"{row['GiB']:.2f} GiB", f"{row['seconds']:.2f} s", f"`{row['command']}`"]


def lines(title: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    made = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(title)} |", "|---" * len(title) + "|", *made, ""] if made else []


def tables(rows: Sequence[Row]) -> str:
    """One table for the rows with rates, and one for those with a peak of memory."""
    speed = [of_speed(row) for row in rows if "rates" in row]
    memory = [of_memory(row) for row in rows if "GiB" in row or "error" in row]
    columns = [
        "what",
        "run",
        "median (least to most)",
        "a step",
        "of the limit",
        "keras_tx is times as fast",
        "command",
    ]
    made = lines(columns, speed)
    made += lines(["what", "run", "peak", "a step", "command"], memory)
    return "\n".join(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "file", type=Path, nargs="+", help="JSON lines, as the option --json of the other benchmarks writes them"
    )
    files = parser.parse_args().file
    print(tables([json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()

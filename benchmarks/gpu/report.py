"""The table of what ran on a machine with a GPU."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks import table
from benchmarks.parts import Result
from benchmarks.reports import cell

Row = Mapping[str, object]


def document(small: bool, machine: Mapping[str, str], results: Sequence[Result], rows: Sequence[Row]) -> str:
    """The table of all parts, then one for each kind of row."""
    sizes = "small: there is no GPU, so the timings say nothing about one" if small else "for a GPU"
    lines = ["# keras_tx on one machine", ""]
    lines += [f"- {name}: {words}" for name, words in {**machine, "Sizes": sizes}.items()]
    parts = [[r.part, r.job, r.status, f"{r.seconds:.0f} s", cell(r.words)] for r in results]
    lines += ["", "## Parts", "", *table.lines(["part", "job", "result", "time", "what"], parts)]
    failed = [name for result in results for name in failures(result.output)]
    lines += [f"- `{name}`" for name in failed] + ([""] if failed else [])
    for title, columns, made in (
        (
            "`model.fit`",
            ["model", "backend", "policy", "loss before and at the end", "first epoch", "a step"],
            fits(rows),
        ),
        ("Fused kernels", KERNEL_COLUMNS, kernels(rows)),
        (
            "Where the time goes",
            ["program", "a step", "matrix products", "attention kernels", "the rest"],
            shares(rows),
        ),
    ):
        if made:
            lines += [f"## {title}", "", *table.lines(columns, made)]
    speed = [row for row in rows if "kind" not in row]  # those of the other benchmarks
    if speed:
        lines += ["## Speed and memory", "", table.tables(speed)]
    return "\n".join(lines).rstrip() + "\n"


def failures(output: str) -> list[str]:
    """The names of the tests that pytest says have failed."""
    lines = [line.split() for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return sorted({words[1] for words in lines if len(words) > 1})


def fits(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row["case"],
            row["backend"],
            row["policy"],
            " to ".join(f"{loss:.3f}" for loss in (row["losses"][0], row["losses"][-1])),
            f"{row['first']:.1f} s",
            f"{1000 * row['step']:.1f} ms",
        ]
        for row in rows
        if row.get("kind") == "fit"
    ]


KERNEL_COLUMNS = ["case", "backend", "dtype", "kernel", "largest error, forward", "backward", "allowed", "result"]


def kernels(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row["case"],
            row["backend"],
            row["dtype"],
            ", ".join(row["kernels"]) or "none",
            f"{row['forward']:.1e}",
            f"{row['backward']:.1e}",
            " and ".join(f"{number:.0e}" for number in row["allowed"]),
            "ok" if row["ok"] else "**failed**",
        ]
        for row in rows
        if row.get("kind") == "kernel"
    ]


def shares(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row["case"],
            f"{1000 * statistics.median(row['steps']):.2f} ms",
            *(f"{row['shares'][name]:.0%}" for name in ("matrix products", "attention kernels", "the rest")),
        ]
        for row in rows
        if row.get("kind") == "profile"
    ]

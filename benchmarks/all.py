"""Holds the aims of speed on CPUs against other packages, in two hours; writes table.md, log.txt and rows.jsonl.

python -m benchmarks all --multi30k FOLDER --imdb TFDS_FOLDER --out logs/all

The table says of each aim what was measured and whether it is reached. What a benchmark needs (torch, keras-hub,
onnxruntime, openvino, ctranslate2) has to be installed. A part that fails is a row of its own and stops no other.
"""

import argparse
import dataclasses
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import alternating, table
from benchmarks.parts import Job, Part, Result, last_line, run
from benchmarks.processor import processor
from benchmarks.reports import Report, cell, read_rows

# The parts in their order: their options, and their shares of the time. N is the number of rounds, and INT8 stands for
# exports in int8 where the processor has them.
DECODE = "decode --exported float32 bfloat16 INT8 --ctranslate2 float32 int8 --rounds N"
PARTS = {
    "encoder": ("encoder --rounds N", 12),
    "encoder in bfloat16": ("encoder --policy mixed_bfloat16 --rounds N", 12),
    "encoder without padding": ("encoder --padding 0 --parts inference --rounds N", 5),
    "bert_serving": ("bert_serving --precision float32 bfloat16 INT8 unset --rounds N", 12),
    "first call": ("decode --first-call --new-tokens 4", 1),
    "decode 1": (f"{DECODE} --batch-size 1 --new-tokens 48", 12),
    "decode 8": (f"{DECODE} --batch-size 8 --new-tokens 48", 12),
    "decode 32": (f"{DECODE} --batch-size 32 --new-tokens 32", 12),
    "beam": ("beam --exported float32 bfloat16 INT8 --ctranslate2 float32 int8 --rounds N", 8),
    "speculative": ("speculative --every 0 16 --rounds N", 10),
    "fit": ("fit --pytorch --rounds N", 4),
    "memory": ("memory --only attention --lengths 4096 8192 --rounds N", 5),
    "policy_errors": ("policy_errors", 1),
    "real_text": ("real_text --rounds N", 10),
}
LOWER = ("bfloat16", "int8")  # precisions of exports that are held against the int8 of others
FOLDERS = ("multi30k", "imdb")  # of data, which `real_text` needs
PACKAGES = ("tensorflow", "keras", "keras-hub", "torch", "transformers", "onnxruntime", "openvino", "ctranslate2")


@dataclasses.dataclass(frozen=True)
class Aim:
    """How many times as fast keras_tx should be as a peer.

    Args:
        what: what is measured.
        part: the name of the part that measures it.
        case: a part of the row's case, which tells it from the other rows.
        peer: the name of the other run.
        least: the aim.
        ours: our run, if it is not `alternating.OURS`.
        base: the name of another part, if the peer is our own run there.
    """

    what: str
    part: str
    case: str
    peer: str
    least: float
    ours: str = alternating.OURS
    base: str = ""

    def ratios(self, rows: Sequence[Mapping]) -> Sequence[float]:
        """How many times as fast ours is, by round; nothing if it was not measured."""
        if self.base:
            ours, base = (self._rates(rows, part) for part in (self.part, self.base))
            return [one / another for one, another in zip(ours, base, strict=False)]
        for row in rows:
            if row.get("part") != self.part or self.case not in row["case"] or row["run"] != self.peer:
                continue
            if "GiB" in row:
                return [row["seconds"] / one for one in _seconds(rows, row["case"], self.ours)]
            if row.get("ours") == self.ours:
                return row["ratios"]
            if self.ours in row.get("of_variants", {}):
                return row["of_variants"][self.ours]
        return []

    def _rates(self, rows: Sequence[Mapping], part: str) -> Sequence[float]:
        for row in rows:
            if row.get("part") == part and self.case in row["case"] and row["run"] == self.ours:
                return row["rates"]
        return []


def _seconds(rows: Sequence[Mapping], case: str, run: str) -> list[float]:
    return [row["seconds"] for row in rows if row["case"] == case and row["run"] == run and "seconds" in row]


def _aims() -> list[Aim]:
    hub, torch, ours = "KerasHub, TensorFlow", "PyTorch, nn.Transformer", alternating.OURS
    made = []
    for shape, training in (("16x128", 1.25), ("4x512", 1.3), ("1x2048", 1.8)):
        for peer in (hub, torch):
            made.append(Aim(f"training, float32, {shape}", "encoder", f"training, {shape}", peer, training))
            made.append(Aim(f"inference, float32, {shape}", "encoder", f"inference, {shape}", peer, 1.1))
            name = "encoder in bfloat16"
            made.append(Aim(f"training, mixed bfloat16, {shape}", name, f"training, {shape}", peer, 1.3))
        made.append(Aim(f"inference, mixed bfloat16, {shape}", name, f"inference, {shape}", torch, 1.1))
        case = f"training, {shape}"
        made.append(Aim(f"training, mixed bfloat16, {shape}", name, case, "its own float32", 1.5, base="encoder"))
        name = "encoder without padding"
        made.append(Aim(f"inference without padding, {shape}", name, f"inference, {shape}", torch, 1.05))
    for shape in ("1 x 16", "1 x 64", "8 x 64"):
        case = f"BERT-base, {shape},"
        for peer in ("ONNX Runtime", "OpenVINO"):
            made.append(Aim(f"exported BERT-base, {shape}, float32", "bert_serving", case, peer, 1.0))
        int8 = "ONNX Runtime, dynamic int8"
        for precision in LOWER:
            made.append(
                Aim(f"the same in {precision}, {shape}", "bert_serving", case, int8, 1.0, f"{ours}, {precision}")
            )
    exported = {one: f"{ours}, exported {one}" for one in ("float32", *LOWER)}
    for batch, least in ((1, 1.0), (8, 1.5), (32, 1.8)):
        what, part, case = f"decoding, batch {batch}", f"decode {batch}", f"batch {batch},"
        for precision in LOWER:
            made.append(Aim(f"{what}, {precision}", part, case, "ctranslate2, int8", least, exported[precision]))
    for batch, side, floats, keras_hub in ((1, ours, 1.35, 1.9), (8, exported["float32"], 1.6, 2.8)):
        what, part, case = f"decoding, batch {batch}, {side}", f"decode {batch}", f"batch {batch},"
        made.append(Aim(what, part, case, "ctranslate2", floats, side))
        made.append(Aim(what, part, case, "keras_hub", keras_hub, side))
    sides = {ours: "float32", exported["float32"]: "float32", **{exported[one]: "int8" for one in LOWER}}
    for side, peer in sides.items():
        made.append(Aim(f"4 beams of a translator, {side}", "beam", "beam 4", f"CTranslate2, {peer}", 1.2, side))
    for method in ("generate", "predict"):
        made.append(Aim(f"first call of {method}", "first call", f"first call of {method}", "3 seconds", 1.0))
    made.append(Aim("training step, 4,096 tokens", "memory", "4,096", "KerasHub", 1.1))
    made.append(Aim("training step, 8,192 tokens", "memory", "8,192", "KerasHub", 1.2))
    for case, of in (
        ("every token is the same", "n-grams"),
        ("one of 16 tokens", "n-grams"),
        ("one of 16 tokens", "draft model"),
    ):
        made.append(Aim(f"speculative decoding, {of}, {case}", "speculative", case, "Greedy", 1.8, of))
    skipping = f"{ours}, skip_padding"
    made.append(Aim("training on captions", "real_text", "Multi30k", "PyTorch, sorted by length", 1.3, skipping))
    made.append(Aim("training on reviews", "real_text", "IMDB", "PyTorch, sorted by length", 1.4, skipping))
    for peer in ("PyTorch", "PyTorch, torch.compile"):
        made.append(Aim("training a small model", "fit", "fit, width 128", peer, 1.3))
    return made


AIMS = _aims()


def aims_table(rows: Sequence[Mapping]) -> str:
    """What was aimed at and what was measured, one line for each aim whose part ran."""
    parts = {row.get("part") for row in rows}
    lines = []
    for aim in AIMS:
        if aim.part not in parts:
            continue
        ratios = aim.ratios(rows)
        measured = alternating.spread(ratios, ".2f") if ratios else "not measured"
        reached = "" if not ratios else "yes" if statistics.median(ratios) >= aim.least else "**no**"
        lines.append([aim.what, aim.peer, f"{aim.least:g}", measured, reached])
    return "\n".join(table.lines(["what", "against", "aim", "times as fast", "reached"], lines))


def document(machine: Mapping[str, str], results: Sequence[Result], rows: Sequence[Mapping]) -> str:
    lines = ["# keras_tx beside others on CPUs", "", *[f"- {name}: {words}" for name, words in machine.items()], ""]
    parts = [[one.part, one.status, f"{one.seconds:.0f} s", cell(one.words)] for one in results]
    lines += ["## Parts", "", *table.lines(["part", "result", "time", "what"], parts)]
    lines += ["## Aims", "", aims_table(rows), "## All rows", "", table.tables(rows)]
    return "\n".join(lines).rstrip() + "\n"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    made.add_argument("--rounds", type=int, default=3, help="how often each side is timed")
    made.add_argument("--minutes", type=float, default=120.0, help="of the whole run; the parts share them")
    made.add_argument("--out", type=Path, default=Path("logs/all"), help="the folder of table, log and rows")
    for name in FOLDERS:
        made.add_argument(
            f"--{name}", type=Path, help=f"folder of {name} for real_text, which is left out without both"
        )
    return made


def main() -> None:
    arguments = parser().parse_args()
    names = [name for name in PARTS if name in arguments.only]
    if None in (arguments.multi30k, arguments.imdb) and "real_text" in names:
        print("real_text is left out: it needs --multi30k and --imdb.")
        names.remove("real_text")
    machine = {"Processor": f"{processor()}, {os.cpu_count()} cores", "Packages": versions(), "Commit": commit()}
    report = Report(arguments.out, machine, document)
    parts = [part(name, arguments, report.rows) for name in names]
    run(parts, 60 * arguments.minutes, report.add)
    print(aims_table(read_rows(report.rows)))
    print(f"The table is in {arguments.out / 'table.md'}.")


def versions() -> str:
    made = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            made.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            made.append(f"no {name}")
    return ", ".join(made)


def commit() -> str:
    """The commit that is measured, and whether files were changed since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: this is no clone of the repository"


def has_int8() -> bool:
    """Whether this processor runs exports in int8."""
    from keras_tx.serving import int8_support

    try:
        int8_support.check_int8_products()
    except ValueError:
        return False
    return True


def part(name: str, arguments: argparse.Namespace, rows: Path) -> Part:
    options, share = PARTS[name]
    options = options.replace("--rounds N", f"--rounds {arguments.rounds}")
    words = options.replace("INT8", "int8" if has_int8() else "").split()
    if name == "real_text":
        words += [word for one in FOLDERS for word in (f"--{one}", str(getattr(arguments, one).resolve()))]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "BENCHMARK_PART": name}
    command = [sys.executable, "-m", "benchmarks", *words, "--json", str(rows.resolve())]
    return Part(name, [Job("", command, environment)], share, summary=last_line)


if __name__ == "__main__":
    main()

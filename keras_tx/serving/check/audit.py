"""A version directory -> a report: would a stock TensorFlow Serving load it and answer as the live model did?"""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

SECONDS = 300

# What TensorFlow Serving links beside TensorFlow's own ops: the kernels of tensorflow_text's ops_lib. Its trimmers are
# left out, some servers lack them (tensorflow/serving#2267).
TEXT_OPS = frozenset(
    "CaseFoldUTF8 NormalizeUTF8 NormalizeUTF8WithOffsetsMap FastBertNormalize TFText>FastBertNormalize "
    "FastWordpieceTokenizeWithOffsets TFText>FastWordpieceTokenizeWithOffsets TFText>FastWordpieceDetokenize "
    "WordpieceTokenizeWithOffsets RegexSplitWithOffsets WhitespaceTokenizeWithOffsetsV2 SentencepieceOp "
    "SentencepieceTokenizeOp SentencepieceTokenizeWithOffsetsOp SentencepieceDetokenizeOp".split()
)
# What TensorFlow has, but a server cannot run: XLA is off there, and there is no Python.
UNSERVABLE = ("Xla", "PyFunc", "EagerPyFunc")


@dataclass
class Report:
    """What `check` found; `print` shows it, `ok` says whether nothing is wrong."""

    path: Path
    signatures: dict = field(default_factory=dict)
    milliseconds: dict = field(default_factory=dict)
    saved_by: str = ""
    parity: dict = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{self.path}: {'ok' if self.ok else 'NOT SERVABLE'}"]
        lines += [f"  problem: {problem}" for problem in self.problems]
        for name, signature in self.signatures.items():
            sides = [
                ", ".join(f"{k} {dtype}{'[...]' if shape is None else shape}" for k, (dtype, shape) in side.items())
                for side in signature.values()
            ]
            took = f"; {self.milliseconds[name]:.1f} ms" if name in self.milliseconds else ""
            lines.append(f"  {name}: {sides[0]} -> {sides[1]}{took}")
        if self.saved_by:
            lines.append(f"  saved by TensorFlow {self.saved_by}; an older server may not read it")
        if self.parity:
            lines.append(
                f"  clean process, XLA off: {self.parity['texts']} requests, largest difference to the live model "
                f"{self.parity['difference']:.1e}"
            )
        elif self.ok:
            lines.append("  clean process, XLA off: no answers of the live model to compare with")
        return "\n".join(lines)


def check(path: str | Path) -> Report:
    """Loads a version by TensorFlow's C++ loader in a clean process, without Keras and with XLA off, and judges it.

    It is in order if it loads, has only ops that a stock TensorFlow Serving links, and if it answers the requests that
    `export` left beside it, for every signature and with the texts of `warmup` among them, as the live model did: the
    same labels and texts, probabilities to 1e-6 (in half precision, to eight roundings of 1). A signature without such
    requests must answer inputs made up by their dtypes.

    Args:
        path: the version's folder, such as "saved_models/reviews/1".

    Returns:
        A `Report`, with `ok`, `problems`, `signatures`, `milliseconds` (the median call of each, one row, warmed
        up), `saved_by` and `parity`.

    Raises:
        FileNotFoundError: there is no SavedModel in `path`.
    """
    path = Path(path)
    if not (path / "saved_model.pb").is_file():
        raise FileNotFoundError(
            f"`path` must be a version's folder, with a saved_model.pb. Received: path={str(path)!r}"
        )
    script = Path(__file__).with_name("clean_process.py")
    try:
        run = subprocess.run(
            [sys.executable, "-P", str(script), str(path.resolve())], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return Report(path, problems=[f"it did not load and answer in {SECONDS} seconds"])
    if run.returncode:
        lines = [line for line in run.stderr.strip().splitlines() if line.strip()] or ["no message"]
        return Report(path, problems=[f"it does not load and answer (exit code {run.returncode}): {lines[-1].strip()}"])
    found = json.loads(run.stdout.strip().splitlines()[-1])
    parity = found.get("parity", {})
    unservable = [op for op in found.get("ops", []) if op.startswith(UNSERVABLE)]
    unknown = [op for op in found.get("custom_ops", []) if op not in TEXT_OPS and op not in unservable]
    problems = [f"the op {op} cannot run on a stock server" for op in unservable]
    problems += [f"the op {op} is not in a stock server" for op in unknown]
    problems += found["problems"]
    if not (found["problems"] or found["signatures"]):
        problems.append("it has no signatures, so nothing to answer")
    if parity and not parity["difference"] <= parity["tolerance"]:  # NaN is not
        problems.append(
            f"numbers differ from the live model's by {parity['difference']:.1e}, over {parity['tolerance']:.1e}"
        )
    if parity and not parity["same_labels"]:
        problems.append("labels or texts differ from the live model's")
    if parity and not parity["empty_batch"]:
        problems.append("an empty batch has no empty answer")
    return Report(path, found["signatures"], found.get("milliseconds", {}), found.get("saved_by", ""), parity, problems)

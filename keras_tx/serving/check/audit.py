"""Checks whether an unmodified TensorFlow Serving loads a version and gives the answers of the Keras model."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_tx import checks
from keras_tx.serving.versions import check_characters, versions_in

SECONDS = 300

# The ops that TensorFlow Serving has in addition to TensorFlow's own: those of tensorflow_text's ops_lib. Its trimmers
# are left out, since some servers lack them (tensorflow/serving#2267).
TEXT_OPS = frozenset(
    "CaseFoldUTF8 NormalizeUTF8 NormalizeUTF8WithOffsetsMap FastBertNormalize TFText>FastBertNormalize "
    "FastWordpieceTokenizeWithOffsets TFText>FastWordpieceTokenizeWithOffsets TFText>FastWordpieceDetokenize "
    "WordpieceTokenizeWithOffsets RegexSplitWithOffsets WhitespaceTokenizeWithOffsetsV2 SentencepieceOp "
    "SentencepieceTokenizeOp SentencepieceTokenizeWithOffsetsOp SentencepieceDetokenizeOp".split()
)
# Prefixes of TensorFlow's ops that a server cannot run, since XLA is off there and there is no Python.
UNSERVABLE = ("Xla", "PyFunc", "EagerPyFunc")


@dataclass
class Report:
    """The result of `check`. `print(report)` shows all of it.

    Attributes:
        path: the version's folder.
        signatures: {name: {"inputs": {input: [dtype, shape]}, "outputs": {output: [dtype, shape]}}}, with -1 for an
            axis of unknown size, and None for a shape of unknown rank.
        milliseconds: {name of a signature: the median duration in milliseconds of a call with the first request, after
            a warm-up call}.
        saved_by: the version of TensorFlow that saved it.
        parity: the comparison with the answers of the Keras model, a dict: the number of requests whose answers are
            compared ("texts"), the "difference" that exceeds its "tolerance" most, or the largest one if all are within
            their tolerances (both are None if no numbers are compared), whether strings and integers are equal
            ("same_labels"), and whether an empty batch gives an empty answer ("empty_batch"). Empty if the version has
            no requests of the Keras model.
        problems: one sentence for each problem.

    Examples:
        >>> report = keras_tx.serving.Report("saved_models/reviews/1", problems=["it has no signatures"])
        >>> report.ok
        False
        >>> print(report)
        saved_models/reviews/1: NOT SERVABLE
          problem: it has no signatures
    """

    path: str | Path
    signatures: dict[str, dict[str, Any]] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    saved_by: str = ""
    parity: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
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
        if self.parity.get("texts"):
            largest = self.parity["difference"]
            of_numbers = (
                "strings and integers only"
                if largest is None
                else f"largest difference to the Keras model {largest:.1e}"
            )
            lines.append(f"  clean process, XLA off: {self.parity['texts']} requests, {of_numbers}")
        elif self.ok:
            lines.append("  clean process, XLA off: no answers of the Keras model to compare with")
        return "\n".join(lines)


def check(path: str | Path) -> Report:
    """Checks that a version runs on an unmodified TensorFlow Serving and gives the answers of the Keras model.

    A separate process loads the version with TensorFlow's C++ loader, without Keras and with XLA off, as a server does.
    The check succeeds if the version loads, if an unmodified server has all of its ops, and if every signature gives
    the answers of the Keras model to the requests that `export` saved with the version (texts of `warmup` among them):
    the same labels and texts, and probabilities that differ by at most 1e-5, in half precision by eight times the
    machine epsilon, or in int8 by 1/8. For other numbers, and for all numbers of `explain`, the tolerance is up to ten
    times that, multiplied by the largest number of the answer if it exceeds 1. A label, id or word is not compared if
    its probability is so near to that of the next one, or to the threshold of a multi-label head, that rounding may
    change it. Sampled text is not compared either, and in half precision or int8 nothing that depends on the tokens
    that a generative model chooses. A signature without saved requests must accept made-up inputs of its dtypes. A
    server refuses a version if one of its warm-up requests fails, so all of them are read, and run for up to 60
    seconds. The process has a time limit of 300 seconds.

    Args:
        path: the version's folder, such as "saved_models/reviews/1".

    Returns:
        A `Report`: `report.ok` is whether the check succeeded, and `report.problems` lists what is wrong.

    Raises:
        FileNotFoundError: there is no SavedModel in `path`.
        ValueError: `path` is a URL, or TensorFlow cannot load from a folder of its name.
        ImportError: the version holds a tokenizer, and tensorflow_text is not installed.

    Examples:
        >>> model = keras_tx.models.TextClassifier(9, 2, num_layers=1, hidden_dim=4, num_heads=2, intermediate_dim=4)
        >>> report = keras_tx.serving.check(keras_tx.serving.export(model, "saved_models/ids"))
        >>> report.ok
        True
        >>> sorted(report.signatures)
        ['serving_default', 'tokens']
        >>> keras_tx.serving.check("saved_models/nothing/1")
        Traceback (most recent call last):
        FileNotFoundError: `path` must be a version's folder, with a saved_model.pb. Received:
        path='saved_models/nothing/1'
    """
    path = checks.local_path("path", path)
    if not (path / "saved_model.pb").is_file():
        versions = versions_in(path, complete=True)
        newest = f". The newest version there is {str(versions[-1])!r}" if versions else ""
        raise FileNotFoundError(
            f"`path` must be a version's folder, with a saved_model.pb. Received: path={str(path)!r}{newest}"
        )
    check_characters("path", path.resolve())
    script = str(Path(__file__).with_name("clean_process.py"))
    command = [sys.executable, "-P", script, str(path.resolve())]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Report(path, problems=[f"it did not load and answer in {SECONDS} seconds"])
    if run.returncode:
        lines = [line for line in run.stderr.strip().splitlines() if line.strip()] or ["no message"]
        return Report(path, problems=[f"it does not load and answer (exit code {run.returncode}): {lines[-1].strip()}"])
    return report_of(path, run.stdout.strip().splitlines()[-1])


def report_of(path: str | Path, line: str) -> Report:
    """The report for the output of the separate process, one line of JSON."""
    found = json.loads(line)
    need_text_ops(path, found.get("custom_ops", []))
    parity = found.get("parity", {})
    unservable = [op for op in found.get("ops", []) if op.startswith(UNSERVABLE)]
    unknown = [op for op in found.get("custom_ops", []) if op not in TEXT_OPS and op not in unservable]
    problems = [f"the op {op} cannot run on a stock server" for op in unservable]
    problems += [f"the op {op} is not in a stock server" for op in unknown]
    problems += found["problems"]
    if not (found["problems"] or found["signatures"]):
        problems.append("it has no signatures, so nothing to answer")
    difference = parity.get("difference")
    if difference is not None and not difference <= parity["tolerance"]:  # also for NaN
        problems.append(f"numbers differ from the Keras model's by {difference:.1e}, over {parity['tolerance']:.1e}")
    if parity and not parity["same_labels"]:
        problems.append("labels or texts differ from the Keras model's")
    if parity and not parity["empty_batch"]:
        problems.append("an empty batch has no empty answer")
    return Report(path, found["signatures"], found.get("milliseconds", {}), found.get("saved_by", ""), parity, problems)


def need_text_ops(path: str | Path, ops: Iterable[str]) -> None:
    """Raises ImportError if some of the ops of a version are tensorflow_text's, and it is not installed here."""
    if not TEXT_OPS.isdisjoint(ops) and importlib.util.find_spec("tensorflow_text") is None:
        raise ImportError(
            f"`{path}` holds a tokenizer, which needs tensorflow_text. Install it: pip install 'keras-tx[text]'"
        )

"""The log of all that was run, and the table of what came out, both rewritten after each job."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.parts import Result

Row = Mapping[str, object]


class Report:
    """`log.txt` and `table.md` in `folder`, and `rows.jsonl`, to which the jobs add their rows.

    Args:
        folder: is made if it is not there.
        machine: words about it, by name.
        document: makes the text of `table.md` of these words, the results so far, and the rows.
    """

    def __init__(
        self,
        folder: Path,
        machine: Mapping[str, str],
        document: Callable[[Mapping[str, str], Sequence[Result], Sequence[Row]], str],
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._table, self.rows = folder / "log.txt", folder / "table.md", folder / "rows.jsonl"
        self._machine, self._document = machine, document
        self._results: list[Result] = []
        lines = [f"{name}: {words}" for name, words in machine.items()]
        self._log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.rows.write_text("", encoding="utf-8")
        self.write()

    def add(self, result: Result) -> None:
        self._results.append(result)
        names = ", ".join(filter(None, [result.part, result.job]))
        line = f"{names}: {result.status} after {result.seconds:.1f} s. {result.words}".strip()
        print(line, flush=True)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n===== {line}\n{result.output}")
        self.write()

    def write(self) -> None:
        text = self._document(self._machine, self._results, read_rows(self.rows))
        self._table.write_text(text, encoding="utf-8")


def read_rows(file: Path) -> list[Row]:
    """The JSON lines of `file`; a last line that a killed job left unfinished is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def cell(words: str) -> str:
    """`words` as they may stand in a table."""
    return " ".join(words.replace("|", "\\|").split())

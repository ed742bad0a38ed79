"""Runs a benchmark: python -m benchmarks NAME [options]. Without a name it lists the benchmarks."""

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def described() -> dict[str, str]:
    """The benchmarks (modules with a function `main`) and the first line of their docstrings; imports none of them."""
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("[!_]*.py"))}
    return {
        name: (ast.get_docstring(tree) or "").partition("\n")[0]
        for name, tree in trees.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    }


def main() -> None:
    names = described()
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(__doc__, *(f"{name:12} {line}" for name, line in names.items()), sep="\n")
        sys.exit(len(sys.argv) > 1)
    name = sys.argv.pop(1)
    importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()

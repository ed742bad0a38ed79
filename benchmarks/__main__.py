"""Runs a benchmark: python -m benchmarks NAME [options]. Without a name it lists the benchmarks."""

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def described() -> dict[str, str]:
    """The benchmarks (files with a function `main`) and the first line of their docstrings; imports none of them."""
    paths = {path.stem: path for path in FOLDER.glob("[!_]*.py")}
    paths |= {path.parent.name: path for path in FOLDER.glob("*/__main__.py")}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in sorted(paths.items())}
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
    module = f"{name}.__main__" if (FOLDER / name).is_dir() else name
    importlib.import_module(f"benchmarks.{module}").main()


if __name__ == "__main__":
    main()

"""Makes the notebooks of the tutorials: `python docs/make_notebooks.py` writes docs/notebooks, in a few minutes.

Each page of docs/tutorials with code becomes a notebook with the same text and code, which runs in an empty folder.
What its code printed is kept, and must be what the page says; see blocks.py. A page that continues another begins with
that one. `python docs/make_notebooks.py docs/tutorials/translate.md` makes one notebook. Needs the extra `docs`.

Run it again when a tutorial has changed: tests/test_notebooks.py compares the notebooks with the pages.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

import blocks
import nbclient
import nbformat

TUTORIALS, NOTEBOOKS = blocks.DOCS / "tutorials", blocks.DOCS / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
FIRST = """*This notebook has the text and the code of [a tutorial](../tutorials/{name}.md), and what the code printed.
To run it, `pip install "keras-tx[all]"`, or `pip install ".[all]"` in a clone of the repository.*"""
SECONDS = 600  # for a cell


def pages():
    """The tutorials with code."""
    return [page for page in sorted(TUTORIALS.glob("*.md")) if any(_runs(block) for block in blocks.blocks(page))]


def code(block):
    """The code of the cells that stand for a block: its own code, or that which writes its file."""
    if block.title is None:
        return [block.code.rstrip("\n")]
    run = [f"%run {block.title}"] if block.language == "python" else []
    return [f"%%writefile {block.title}\n{block.code}".rstrip("\n"), *run]


def cells(page):
    """The cells of the notebook of a page: pairs of the text or code, and the block, which is None for text."""
    yield FIRST.format(name=page.stem), None
    for one in blocks.chain(page):
        text, end = re.sub(r"\A---\n.*?\n---\n", "", one.read_text(encoding="utf-8"), flags=re.S), 0
        skipped = one.read_text(encoding="utf-8").count("\n") - text.count("\n")
        found = {block.line - skipped: block for block in blocks.blocks(one)}
        outputs = {block.output.line - skipped for block in found.values() if block.output}
        for match in blocks.FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            block = found.get(line)
            if line not in outputs and not (block and _runs(block)):
                continue  # it stays in the text
            yield from _text(text[end : match.start()])
            end = match.end()
            if block is not None:
                yield from ((source, block) for source in code(block))
        yield from _text(text[end:])


def _runs(block):
    is_file = block.title is not None and block.language not in ("text", "bash")
    return block.reason is None and (block.language == "python" or is_file)


def _text(text):
    """A cell of text, with links to pages of the same folder mended."""
    text = re.sub(r"\]\(([\w-]+\.md)", r"](../tutorials/\1", text.strip())
    if text:
        yield text, None


def make(page):
    """Runs the notebook of a page, and writes it if it printed what the page says."""
    notebook, of_cells = nbformat.v4.new_notebook(metadata=METADATA), []
    for index, (source, block) in enumerate(cells(page)):
        new = nbformat.v4.new_markdown_cell if block is None else nbformat.v4.new_code_cell
        notebook.cells.append(new(source, id=f"cell-{index}"))
        of_cells.append(block)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        options = {"timeout": SECONDS, "kernel_name": "python3", "record_timing": False}
        nbclient.NotebookClient(notebook, resources=resources, **options).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell, block in zip(notebook.cells, of_cells, strict=True):
        if block is not None:
            cell.metadata, cell.outputs = {}, _printed(cell)
            if block.title is None:
                blocks.compare(block, "".join(one["text"] for one in cell.outputs))
    path = NOTEBOOKS / f"{page.stem}.ipynb"
    path.parent.mkdir(exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    print(path.relative_to(blocks.ROOT), f"{path.stat().st_size / 1000:.0f} kB", flush=True)


def _printed(cell):
    """What a cell wrote to stdout, as one output; not its last value, warnings and the lines of TensorFlow."""
    outputs = [one for one in cell.outputs if one["output_type"] == "stream" and one["name"] == "stdout"]
    text = "".join(one["text"] for one in outputs)
    return [nbformat.v4.new_output("stream", name="stdout", text=text)] if text else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="tutorials (default: all)")
    given = parser.parse_args().pages
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(blocks.ROOT), os.environ.get("PYTHONPATH")]))
    for page in given or pages():
        make(page.resolve())


if __name__ == "__main__":
    main()

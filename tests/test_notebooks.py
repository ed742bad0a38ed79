"""The notebooks of the tutorials have the code of the pages, and what it printed.

They are not run here: tests/test_docs.py runs the same code, from the pages, and `python docs/make_notebooks.py` ran it
in a notebook and compared what it printed. If a page has changed, run that again.
"""

import json
import re
from pathlib import Path

import pytest

from tests.test_docs import blocks

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "docs" / "notebooks"
PAGES = [page for page in sorted((ROOT / "docs/tutorials").glob("*.md")) if page.stem != "index"]
AGAIN = "python docs/make_notebooks.py"


def ids(paths):
    return [path.stem for path in paths]


def cells(page, kind):
    notebook = json.loads((NOTEBOOKS / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def printed(cell):
    return "".join(line for output in cell["outputs"] for line in output["text"])


def code_of(page):
    """The blocks of code of a page and of those that it continues; a block with the name of a file is its content."""
    found = [block for one in blocks.chain(page) for block in blocks.blocks(one)]
    found = [block for block in found if block.language not in ("bash", "text", "mermaid") and block.reason is None]
    return [block for block in found if block.language == "python" or block.title]


def test_every_tutorial_has_a_notebook_to_which_the_list_of_tutorials_links():
    assert ids(sorted(NOTEBOOKS.iterdir())) == ids(PAGES) and len(PAGES) >= 5
    index = (ROOT / "docs/tutorials/index.md").read_text()
    assert set(re.findall(r"\]\(\.\./notebooks/([\w-]+)\.ipynb\)", index)) == set(ids(PAGES))


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_the_code_of_a_notebook_is_that_of_its_page(page):
    found = [source(cell) for cell in cells(page, "code") if not source(cell).startswith("%run ")]
    expected = [
        block.code.rstrip("\n") if block.title is None else f"%%writefile {block.title}\n{block.code}".rstrip("\n")
        for block in code_of(page)
    ]
    assert found == expected, f"Run {AGAIN}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_a_notebook_holds_what_its_code_printed(page):
    of_code = [cell for cell in cells(page, "code") if not source(cell).startswith("%run ")]
    assert [cell["execution_count"] for cell in cells(page, "code")] == list(range(1, 1 + len(cells(page, "code"))))
    shown = 0
    for cell, block in zip(of_code, code_of(page), strict=True):
        if block.title is None:
            blocks.compare(block, printed(cell))
            shown += bool(printed(cell))
    assert shown >= 3


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_the_text_of_a_notebook_is_that_of_its_page(page):
    words = " ".join(" ".join(source(cell) for cell in cells(page, "markdown")).split())
    for one in blocks.chain(page):
        text = re.sub(r"\A---\n.*?\n---\n", "", one.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(r"\]\(([\w-]+\.md)", r"](../tutorials/\1", blocks.FENCE.sub("\n\n", text))
        for paragraph in re.split(r"\n\s*\n", text):
            assert " ".join(paragraph.split()) in words, f"Run {AGAIN}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_a_notebook_is_small_and_says_nothing_of_the_machine_that_ran_it(page):
    path = NOTEBOOKS / f"{page.stem}.ipynb"
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 100_000
    assert not re.search(
        r"/(?:root|home|Users|tmp|work|usr|opt|var)/|site-packages|\d{4}-\d\d-\d\dT|0x[0-9a-f]{8}", text
    )
    notebook = json.loads(text)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert not any(cell["metadata"] for cell in notebook["cells"])
    for link in re.findall(r"\]\((\.\./[^)#]+)", text):
        assert (NOTEBOOKS / link).exists(), link

"""The code of the documentation runs and prints what the pages say, and the site is whole."""

import configparser
import importlib.util
import re
import sys
from pathlib import Path

import keras
import pytest

import keras_tx

ROOT = Path(__file__).resolve().parents[1]


def program(name):
    """A file of docs as a module; `make_pictures` imports `blocks`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


blocks = program("blocks")
make_pictures = program("make_pictures")
EXTRAS = configparser.ConfigParser(interpolation=None)
EXTRAS.read(ROOT / "setup.cfg")
EXTRAS = dict(EXTRAS["options.extras_require"])
PAGES = blocks.pages()
CONTINUED = {path for page in PAGES for path in blocks.chain(page)[:-1]}
WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks.blocks(page))]
NOT_RUN = 5  # blocks of the whole documentation, each with a reason for the reader


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


OF_BACKENDS = {page for page in WITH_CODE if "backend" in blocks.front_matter(page)}  # test_backend_pages.py runs them
RUN = [page for page in WITH_CODE if page not in CONTINUED | OF_BACKENDS]


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:Layer 'position_embedding':UserWarning")  # of KerasHub
@pytest.mark.filterwarnings("ignore:In the future `np.object`:FutureWarning")  # of Keras' patch of tf2onnx
@pytest.mark.parametrize("page", RUN, ids=names(RUN))
def test_the_code_of_a_page_prints_what_the_page_says(page, tmp_path):
    package = blocks.front_matter(page).get("needs")
    if package is not None:
        pytest.importorskip(package)
    keras.utils.set_random_seed(7)
    blocks.run(page, tmp_path)
    for one in blocks.chain(page):
        for name in make_pictures.pictures(one)[1]:
            assert (tmp_path / name).stat().st_size > 1000, f"{one} shows {name}, which its code does not draw"


def page_of(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_other_output_is_an_error(in_tmp):
    for wrong in ("```python\nprint(1)\n```\n", "```python\nprint(1)\n```\n\n```text\n2\n```\n"):
        with pytest.raises(AssertionError, match="page.md, line 1 prints something else"):
            blocks.run(page_of(in_tmp, wrong), in_tmp / "empty")
    with pytest.raises(AssertionError, match="another number of lines"):
        page = page_of(in_tmp, '```python\nprint(1)\n```\n\n```text title="for example"\n2\n2\n```\n')
        blocks.run(page, in_tmp / "empty")
    blocks.run(page_of(in_tmp, "```python\nprint(12)\n```\n\n```text\n1...\n```\n"), in_tmp / "empty")


def test_blocks_share_names_files_and_the_page_before(in_tmp):
    (in_tmp / "first.md").write_text('```csv title="a.csv"\nx\n1\n```\n\n```python\nvalue = 5\n```\n')
    code = "from pathlib import Path\nprint(value, Path('a.csv').read_text())"
    page = page_of(in_tmp, f"---\ncontinues: first.md\n---\n```python\n{code}\n```\n")
    shown = {}
    blocks.run(page, in_tmp / "empty", lambda block, printed: shown.update({block.line: printed}))
    assert shown[4] == "5 x\n1\n\n"


def test_a_block_that_does_not_run_says_why(in_tmp):
    page = page_of(in_tmp, "Not run here: it needs a server.\n\n```python\nraise OSError\n```\n")
    blocks.run(page, in_tmp / "empty")
    assert [block.reason for block in blocks.blocks(page)] == ["Not run here: it needs a server."]


def test_few_blocks_do_not_run():
    silent = [block for page in PAGES for block in blocks.blocks(page) if block.reason is not None]
    assert len(silent) <= NOT_RUN, [block.where for block in silent]
    assert all(len(block.reason) > 30 for block in silent)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_is_of_a_known_kind(page):
    kinds = {block.language for block in blocks.blocks(page)}
    assert kinds <= {"python", "bash", *blocks.SHOWN}, kinds


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_programs_and_options_of_commands_exist(page):
    commands = [block for block in blocks.blocks(page) if block.language == "bash"]
    assert not [sentence for block in commands for sentence in blocks.wrong_commands(block, EXTRAS)]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("python examples/nothing.py", "there is no file examples/nothing.py"),
        ("python examples/serve.py --port 1", "examples/serve.py has no option --port"),
        ("python -m benchmarks encoder --nothing", "no option --nothing"),
        ("cd x && scripts/check --slow", "scripts/check has no option --slow"),
        ("pip install '.[all,nothing]'", "there is no extra 'nothing'"),
        ("curl --nothing http://localhost", "curl has no option --nothing"),
        ("kubectl apply", "the program 'kubectl' is not known"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command, sentence):
    block = blocks.Block(ROOT / "README.md", 1, "bash", None, command, None)
    assert any(sentence in one for one in blocks.wrong_commands(block, EXTRAS))


def test_every_picture_is_made_by_code():
    shown = {name for page in PAGES for name in make_pictures.pictures(page)[0]}
    made = {name for page in PAGES for name in make_pictures.pictures(page)[1]} | set(make_pictures.EXAMPLES)
    made |= set(make_pictures.BROWSED)
    assert shown == made == {path.name for path in (ROOT / "docs/images").iterdir()}
    assert all(path.stat().st_size < 200_000 for path in (ROOT / "docs/images").iterdir())


def test_the_reference_names_all_public_names():
    index = (ROOT / "docs/reference/index.md").read_text()
    rows = dict(re.findall(r"^\| \[`keras_tx\.(\w+)`\]\(\w+\.md\) \| (.*) \|$", index, re.M))
    assert set(rows) == set(keras_tx.__all__) - {"__version__"}
    for folder, row in rows.items():
        public = set(getattr(keras_tx, folder).__all__)
        assert set(re.findall(r"\[`(\w+)`\]", row)) == public
        page = (ROOT / f"docs/reference/{folder}.md").read_text()
        assert set(re.findall(rf"^::: keras_tx\.{folder}\.(\w+)$", page, re.M)) == public


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(listed) == sorted(str(page.relative_to(blocks.DOCS)) for page in PAGES if page.name != "README.md")


def test_drawings_name_no_node_by_a_word_of_mermaid():
    drawings = [block for page in PAGES for block in blocks.blocks(page) if block.language == "mermaid"]
    assert len(drawings) >= 9
    for block in drawings:
        nodes = set(re.findall(r"(?:^|[>.]) *(\w+)(?=[\[{]| -)", block.code, re.M)) - {"subgraph"}
        assert nodes and not nodes & {"graph", "end", "class", "style", "click", "default", "flowchart"}, block.where


def test_the_site_loads_nothing_from_other_servers():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings and "https://" not in settings
    assert "assets/mermaid.tiny.js" in (blocks.DOCS / "overrides/main.html").read_text()
    assert (blocks.DOCS / "assets/mermaid.tiny.js").stat().st_size > 1e6
    for path in [*(blocks.DOCS / "images").glob("*.svg"), *(blocks.DOCS / "assets").glob("*.css")]:
        assert not re.search(r"url\(.?http", path.read_text())

"""CONTRIBUTING.md names files, tests and classes that exist, and its commands are those of the project."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S))
SOURCES = "\n".join(path.read_text() for folder in ("keras_tx", "tests") for path in (ROOT / folder).rglob("*.py"))
WALKS = ("Add a layer", "Add a checkpoint family", "Add a tokenizer", "Add a signature")


def test_every_path_exists():
    named = re.findall(r"`((?:keras_tx|tests|docs|examples|benchmarks|saved_models|scripts)[\w/]*(?:\.\w+)?)`", TEXT)
    named += re.findall(r"\]\(([^)]+)\)", TEXT) + re.findall(r"python ((?:docs|examples)/\S+\.py)", TEXT)
    assert len(named) > 50
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_name_in_code_exists():
    names = re.findall(r"`(test_\w+|[A-Z][a-zA-Z]+|[A-Z][A-Z_]+|_\w+|sinusoids|graph_function|not_in_graph)`", TEXT)
    assert len(names) > 25
    defined = r"(?:^ *(?:def|class) {0}\b|^ *{0}\b(?:: .*)? (?:\|)?= )"
    assert not [name for name in names if not re.search(defined.format(name), SOURCES, re.M)]


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_names_code_tests_and_documentation(walk):
    steps = re.findall(r"^\d\. .*?(?=^\d\. |\Z)", SECTIONS[walk], re.M | re.S)
    assert len(steps) >= 4
    for folder in ("keras_tx/", "tests/", "docs/"):
        assert any(f"`{folder}" in step for step in steps)


def test_it_is_set_up_in_two_commands():
    (commands,) = re.findall(r"```bash\n(.*?)```", SECTIONS["Set up"], re.S)
    assert commands.splitlines() == ['pip install -e ".[all,test]"', "scripts/check --fast"]


def test_issue_templates_ask_for_the_versions_where_they_matter():
    templates = {path.stem: path.read_text() for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()}
    assert set(templates) == {"bug", "question", "wish"}
    assert all(re.match(r"---\nname: .+\nabout: .+\n---\n", text) for text in templates.values())
    assert all("`python -m keras_tx`" in templates[name] for name in ("bug", "question"))

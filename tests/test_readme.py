"""The README is short, and its two commands are what the project runs. tests/test_docs.py runs its code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_is_read_in_five_minutes():
    assert len(README.split()) <= 700


def test_the_links_of_the_readme_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def test_ci_runs_the_test_line_of_the_readme():
    lines = re.findall(r"^    (pip install .*)$", README, re.M)
    assert len(lines) == 2 and lines[1].endswith("scripts/check")
    assert "scripts/check$' README.md" in (ROOT / ".ci" / "run").read_text()

"""The wheel and the source distribution: what they hold, and what their metadata say."""

import configparser
import email
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import keras_tx

ROOT = Path(__file__).resolve().parents[1]
FILES = ["setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "mkdocs.yml", *(f.name for f in ROOT.glob("*.md"))]
BUILD = """
import sys
from setuptools import build_meta

folder = sys.argv[1]  # which setuptools changes
print(build_meta.build_sdist(folder), build_meta.build_wheel(folder))
"""
SETTINGS = configparser.ConfigParser(interpolation=None)
SETTINGS.read(ROOT / "setup.cfg")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names of the files of the sdist and the wheel, and the metadata; made without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in (*FILES, "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    for name in ("keras_tx", "docs", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests/test_one.py", "benchmarks/__main__.py", "saved_models/README.md"):  # what must stay out
        (source / name).parent.mkdir()
        (source / name).write_text("")
    done = subprocess.run([sys.executable, "-c", BUILD, out], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    sdist, wheel = (out / name for name in done.stdout.splitlines()[-1].split())
    with tarfile.open(sdist) as file:
        in_sdist = [name.partition("/")[2] for name in file.getnames()]
    with zipfile.ZipFile(wheel) as file:
        in_wheel = file.namelist()
        metadata = next(name for name in in_wheel if name.endswith("/METADATA"))
        return in_sdist, in_wheel, email.message_from_bytes(file.read(metadata)), wheel.name


@pytest.mark.process
def test_the_wheel_holds_the_package_alone(built):
    _, files, _, name = built
    assert name == f"keras_tx-{keras_tx.__version__}-py3-none-any.whl"
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "keras_tx").rglob("*.py")}
    others = {"keras_tx/py.typed", "keras_tx/serving/page.html"}
    assert {file for file in files if ".dist-info/" not in file} == modules | others
    assert f"keras_tx-{keras_tx.__version__}.dist-info/licenses/LICENSE" in files


@pytest.mark.process
def test_the_source_distribution_holds_documentation_and_examples_and_no_tests(built):
    files = built[0]
    assert {"LICENSE", "setup.cfg", "pyproject.toml", "README.md", "CHANGELOG.md", "keras_tx/py.typed"} < set(files)
    assert {"docs/get-started.md", "docs/images/attention.png", "examples/translate.py", "mkdocs.yml"} < set(files)
    assert not [
        file for file in files if re.match(r"tests|benchmarks.*py|saved_models|build", file) or "__pycache__" in file
    ]


@pytest.mark.process
def test_the_metadata_name_what_the_project_is(built):
    metadata = built[2]
    assert metadata["License"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Version"] == keras_tx.__version__ and metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "DESCRIPTION.md").read_text().strip()
    assert set(metadata.get_all("Provides-Extra")) == set(SETTINGS["options.extras_require"])
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"\w+", line)[0] for line in needed] == ["keras", "tensorflow", "numpy"]


def test_the_description_has_only_links_that_work_everywhere_and_code_of_the_readme():
    """It is shown where packages are listed, where relative links and pictures lead nowhere."""
    description, readme = (ROOT / "DESCRIPTION.md").read_text(), (ROOT / "README.md").read_text()
    assert not re.findall(r"\]\((?!https?://)", description)
    blocks = re.findall(r"```python\n.*?```", description, re.S)
    assert len(blocks) == 3 and all(block in readme for block in blocks)
    assert description.split("\n\n")[1] in readme


def test_the_citation_names_the_version_and_the_licence():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {keras_tx.__version__}\n" in citation
    assert f"\nlicense: {SETTINGS['metadata']['license']}\n" in citation
    assert f"name: {SETTINGS['metadata']['author']}\n" in citation

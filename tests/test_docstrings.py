"""Every public name has a docstring with an example, and every example runs and prints what it says."""

import doctest
import importlib
import inspect

import keras
import numpy as np
import pytest

import keras_tx

pytestmark = pytest.mark.tensorflow
FOLDERS = [name for name in keras_tx.__all__ if name != "__version__"]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SECTIONS = ("Args:", "Call arguments:", "Returns:", "Yields:", "Raises:", "Examples:", "Attributes:", "Reference:")


def public_names():
    for folder in FOLDERS:
        module = importlib.import_module(f"keras_tx.{folder}")
        for name in module.__all__:
            yield f"{folder}.{name}"


def documented(path):
    """The public thing, and the methods that it defines itself: {name: docstring}."""
    folder, name = path.split(".")
    thing = getattr(importlib.import_module(f"keras_tx.{folder}"), name)
    found = {name: inspect.getdoc(thing)}
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            if not method.startswith("_") and inspect.getdoc(value):
                function = getattr(value, "__func__", getattr(value, "fget", value))
                found[f"{name}.{method}"] = inspect.cleandoc(getattr(function, "__doc__", None) or "")
    return found


@pytest.mark.parametrize("path", public_names())
def test_the_examples_of_a_public_name_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for name, text in documented(path).items():
        test = parser.get_doctest(text, {"keras": keras, "keras_tx": keras_tx, "np": np}, name, path, 0)
        if name == path.split(".")[1]:
            assert test.examples, f"keras_tx.{path} has no example in its docstring."
        report = []
        runner.run(test, out=report.append)
        assert not report, "".join(report)


@pytest.mark.parametrize("path", public_names())
def test_the_docstring_of_a_public_name_explains_its_arguments(path):
    folder, name = path.split(".")
    thing = getattr(importlib.import_module(f"keras_tx.{folder}"), name)
    text = inspect.getdoc(thing)
    headings = [line.strip() for line in text.splitlines() if line.strip() in SECTIONS and not line.startswith(" ")]
    assert len(headings) == len(set(headings)), f"keras_tx.{path} has a section twice: {headings}"
    parameters = inspect.signature(thing).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    missing = [argument for argument in named if argument not in text]
    assert not missing, f"The docstring of keras_tx.{path} does not name {missing}."

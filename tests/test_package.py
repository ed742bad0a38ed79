"""What holds for the package as a whole: its face, its imports, its manners."""

import ast
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_tx
from keras_tx.optional import Lazy, once_imported

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "keras_tx").rglob("*.py"))
# A file imports only from folders to the left of its own; those in one place import nothing of each other.
ORDER = [
    ["types", "version"],
    ["optional"],
    ["internals"],
    ["under_strategy"],
    ["checks", "disk", "functional_graph", "json_text", "locks", "progress"],
    ["replace", "training_history"],
    ["text"],
    ["data"],
    ["layers"],
    ["generation", "training"],
    ["models", "distribution"],
]
ORDER += [["distribution", "pretrained"], ["serving"], ["plots"], ["__main__"]]
RANK = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders}
PUBLIC = [
    "data",
    "distribution",
    "generation",
    "layers",
    "models",
    "pretrained",
    "serving",
    "text",
    "training",
    "plots",
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "keras_tx":
            yield from (f"keras_tx.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def rule_breaks(path, root=ROOT):
    """Each rule that a file of the package breaks, as the rest of a sentence about the file."""
    source, folder = path.read_text(), path.relative_to(root / "keras_tx").parts[0].removesuffix(".py")
    tree = ast.parse(source)
    for name in imports(path):
        parts = name.split(".")
        other = parts[1] if parts[0] == "keras_tx" and len(parts) > 1 else folder
        if folder != "__init__" and other != folder and RANK[other] >= RANK[folder]:
            yield f"imports {name}, which does not stand to the left of {folder}"
        if parts[0] in ("pickle", "joblib", "dill", "shelve", "marshal"):
            yield f"imports {name}, which reads pickles"
    if len(source.splitlines()) > 400:
        yield f"has {len(source.splitlines())} lines, more than 400"
    if any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        yield "has an assert, which `python -O` leaves out"
    if path.name not in ("__init__.py", "version.py") and not ast.get_docstring(tree):
        yield "has no docstring"


def test_files_import_from_the_left_and_are_short_without_assert_and_pickle():
    found = {str(path.relative_to(ROOT)): list(rule_breaks(path)) for path in FILES}
    assert not {path: breaks for path, breaks in found.items() if breaks}


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ('"""It."""\nimport pickle', "reads pickles"),
        ('"""It."""\nfrom keras_tx.serving import export', "does not stand to the left of layers"),
        ('"""It."""\nassert True', "has an assert"),
        ('"""It."""' + "\n" * 401, "more than 400"),
        ("import keras", "has no docstring"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(source, sentence, tmp_path):
    path = tmp_path / "keras_tx" / "layers" / "one.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert any(sentence in found for found in rule_breaks(path, tmp_path))


@pytest.mark.parametrize("folder", PUBLIC)
def test_public_names_are_made_in_the_package(folder):
    module = importlib.import_module(f"keras_tx.{folder}")
    for name in module.__all__:
        assert getattr(module, name).__module__.startswith("keras_tx.")


def test_init_files_only_import():
    for path in FILES:
        if path.name == "__init__.py":
            for node in ast.parse(path.read_text()).body:
                is_all = isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
                assert is_all or isinstance(node, (ast.ImportFrom, ast.Expr)), path


def test_all_names_are_those_that_are_imported():
    for folder in PUBLIC:
        path = ROOT / "keras_tx" / folder / "__init__.py"
        if path.exists():
            imported = [
                a.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ImportFrom) for a in n.names
            ]
            assert sorted(imported) == importlib.import_module(f"keras_tx.{folder}").__all__


def test_every_public_layer_and_model_registers_under_keras_tx():
    import keras

    for module in (keras_tx.layers, keras_tx.models):
        for name in module.__all__:
            assert keras.saving.get_registered_name(getattr(module, name)) == f"keras_tx>{name}"


@pytest.mark.process
def test_importing_the_package_imports_no_extra():
    code = (
        "import json, sys, keras; before = set(sys.modules); import keras_tx; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"tensorflow_text", "tensorflow_datasets", "tokenizers", "transformers", "sacrebleu"}
    assert not heavy & {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


@pytest.mark.process
def test_layers_and_models_run_on_jax_where_tensorflow_is_not_installed():
    # As one program: JAX would compile each operation by itself.
    assert "(1, 2)" in run_without_tensorflow("jax", "print(model.predict_on_batch(ids).shape)")


@pytest.mark.process
def test_models_and_the_kernels_of_this_machine_run_on_pytorch_where_tensorflow_is_not_installed():
    """One process for what two could show: to import PyTorch takes longer. The kernels are a part of scripts/gpu."""
    pytest.importorskip("torch")
    command = ["benchmarks.gpu.kernels", "--small", "--cases", "window, causal"]
    code = f"""
import runpy
print(model(ids).shape)
sys.argv = {command}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
    printed = run_without_tensorflow("torch", code)
    assert "torch.Size([1, 2])" in printed and "3 of 3 cases within the allowed errors" in printed, printed


def run_without_tensorflow(backend, code):
    """What code prints that has a `model` and `ids`."""
    start = """
import sys
sys.modules["tensorflow"] = None
import keras_tx, numpy as np
model, ids = keras_tx.models.TextClassifier(11, 2), np.array([[1, 2, 0]])
"""
    run = subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "KERAS_BACKEND": backend},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_missing_extra_is_named_with_what_to_install():
    with pytest.raises(ImportError, match=r"`no_such_module` is needed here .* pip install 'keras-tx\[text\]'"):
        Lazy("no_such_module", extra="text").anything
    with pytest.raises(ImportError, match="pip install 'no_such_module'"):
        Lazy("no_such_module").anything


def test_what_waits_for_a_module_is_called_once_when_it_is_imported():
    calls = []
    once_imported("sys", lambda: calls.append("sys"))
    once_imported("this", lambda: calls.append("this"))
    assert calls == ["sys"]
    with contextlib.redirect_stdout(None):  # which `this` prints to
        for _ in range(2):
            assert Lazy("this").d["a"] == "n"
    assert calls == ["sys", "this"]


def test_the_version_is_the_changelog_s():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == keras_tx.__version__


def test_every_entry_of_the_changelog_is_one_short_line():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("- ")]) > 200
    assert not [line for line in lines if line and not re.match(r'#{1,3} |- [A-Z`"].{,125}$', line)]

"""`python -m keras_tx` prints what a bug report needs, whatever is missing."""

import configparser
import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

import keras
import pytest

from keras_tx import __main__ as report
from keras_tx import __version__

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.filterwarnings("ignore:'keras_tx.__main__' found in sys.modules:RuntimeWarning")


def test_it_prints_the_versions_the_machine_and_the_extras(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["keras_tx"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("keras_tx", run_name="__main__")
    assert ended.value.code == 0
    found = dict(re.split("  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert found["keras_tx"] == __version__
    assert found["Keras"] == f"{keras.__version__}, backend {keras.backend.backend()}"
    assert found["NumPy"] == importlib.metadata.version("numpy")
    assert found["PyTorch"] == report.version_of("torch") and found["CPUs"].isdecimal()
    assert set(found) >= {
        "TensorFlow",
        "tensorflow-text",
        "JAX",
        "tokenizers",
        "transformers",
        "Python",
        "system",
        "GPUs",
    }
    assert f"matplotlib {importlib.metadata.version('matplotlib')}" in found["extra plots"]


def test_it_explains_itself_and_refuses_other_arguments(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        report.main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "usage: python -m keras_tx " in printed and "Prints what a bug report needs: the versions" in printed
    for module in ("check", "serve"):
        assert f"python -m keras_tx.serving.{module} " in printed
    with pytest.raises(SystemExit, match="^2$"):
        report.main(["foo", "--bar"])
    assert "unrecognized arguments: foo --bar" in capsys.readouterr().err


def test_it_names_what_is_missing_or_broken(monkeypatch, capsys):
    def version(name):
        if name == "jax":
            raise OSError("damaged\nmetadata")
        if name == "transformers":
            return None
        if name != "tf-nightly":
            raise importlib.metadata.PackageNotFoundError(name)
        return "9.9"

    def no_driver(backend):
        raise RuntimeError("no driver\nfound")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(report, "_accelerators", no_driver)
    assert report.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = dict(re.split("  +", line, maxsplit=1) for line in lines)
    assert len(lines) == len(report.rows())
    assert found["PyTorch"] == "not installed" and found["TensorFlow"] == "9.9"
    assert found["JAX"] == "cannot be read (OSError: damaged metadata)"
    assert found["transformers"] == "unknown version"
    assert found["GPUs"] == "cannot be listed (RuntimeError: no driver found)"
    assert found["extra files"] == "pyarrow not installed"


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch", "numpy"])
def test_the_devices_of_every_backend_are_listed(backend, monkeypatch):
    class Device:
        name, platform, device_kind = "one", "gpu", "H"

    class Library:
        """Stands for TensorFlow, JAX and PyTorch on a machine with a GPU."""

        config = property(lambda self: self)
        experimental = cuda = config
        list_physical_devices = staticmethod(lambda kind: [Device] if kind == "GPU" else [])
        get_device_details = staticmethod(lambda device: {"device_name": "H"})
        devices = staticmethod(lambda: [Device])
        device_count = staticmethod(lambda: 1)
        get_device_name = staticmethod(lambda index: "H")

    for name in ("tf", "jax", "torch"):
        monkeypatch.setattr(report, name, Library())
    monkeypatch.setattr(keras.backend, "backend", lambda: backend)
    assert report.gpus() == ("none" if backend == "numpy" else "H")


def test_the_extras_are_those_of_setup_cfg():
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    named = {extra: re.findall(r"^[\w-]+", extras[extra].strip(), re.M) for extra in extras}
    of_users = {extra: [name.replace("_", "-") for name in named[extra]] for extra in named}
    for extra in ("all", "docs", "test"):
        of_users.pop(extra)
    assert of_users == {extra: list(packages) for extra, packages in report.EXTRAS.items()}

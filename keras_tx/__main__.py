"""Prints what a bug report needs: `python -m keras_tx` shows the versions, the devices and the optional packages.

A package that is missing or broken is named as such; it never ends the program.
"""

import argparse
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence

import keras

from keras_tx.optional import Lazy
from keras_tx.version import __version__

tf, torch, jax = Lazy("tensorflow"), Lazy("torch"), Lazy("jax")

DESCRIPTION = (
    "Prints what a bug report needs: the versions of Python, Keras and this package, the system and the devices, and "
    "which optional packages are installed."
)
OTHERS = (
    "Other commands: python -m keras_tx.serving.check checks an exported version, python -m keras_tx.serving.serve "
    "serves an exported model on this machine. Each has a --help of its own."
)
MISSING = "not installed"
MAIN = {"TensorFlow": "tensorflow", "tensorflow-text": "tensorflow-text", "JAX": "jax", "PyTorch": "torch"}
MAIN |= {"tokenizers": "tokenizers", "transformers": "transformers", "NumPy": "numpy"}
# Other names under which TensorFlow is installed.
ALSO = {"tensorflow": ("tensorflow-cpu", "tensorflow-macos", "tf-nightly", "tf-nightly-cpu")}
# The packages of each extra, as in setup.cfg.
EXTRAS = {
    "text": ("tensorflow-text", "tokenizers", "sentencepiece", "protobuf", "transformers"),
    "hub": ("huggingface-hub",),
    "data": ("tensorflow-datasets", "importlib-resources"),
    "files": ("pyarrow",),
    "plots": ("matplotlib", "pydot", "tensorboard"),
    "metrics": ("sacrebleu",),
    "formats": ("tf2onnx", "onnx"),
}


def version_of(package: str) -> str:
    """The installed version of a package, without importing it; "not installed" if there is none."""
    for name in (package, *ALSO.get(package, ())):
        try:
            return str(importlib.metadata.version(name) or "unknown version")
        except importlib.metadata.PackageNotFoundError:
            continue
        except Exception as error:  # of a damaged installation
            return f"cannot be read ({type(error).__name__}: {error})".replace("\n", " ")
    return MISSING


def gpus() -> str:
    """The GPUs and TPUs that the backend of Keras sees."""
    try:
        found = _accelerators(keras.backend.backend())
    except Exception as error:  # of a driver, or of a library that is missing
        return f"cannot be listed ({type(error).__name__}: {error})".replace("\n", " ")
    return ", ".join(found) or "none"


def _accelerators(backend: str) -> list[str]:
    if backend == "tensorflow":
        devices = [device for kind in ("GPU", "TPU") for device in tf.config.list_physical_devices(kind)]
        details = tf.config.experimental.get_device_details
        return [str(details(device).get("device_name", device.name)) for device in devices]
    if backend == "jax":
        return [str(device.device_kind) for device in jax.devices() if device.platform != "cpu"]
    if backend == "torch":
        return [str(torch.cuda.get_device_name(index)) for index in range(torch.cuda.device_count())]
    return []


def rows() -> list[tuple[str, str]]:
    """Pairs of a name and what is known of it, in the order in which they are printed."""
    found = [("keras_tx", __version__), ("Keras", f"{keras.__version__}, backend {keras.backend.backend()}")]
    found += [(name, version_of(package)) for name, package in MAIN.items()]
    found += [("Python", platform.python_version()), ("system", platform.platform()), ("processor", platform.machine())]
    found += [("CPUs", str(os.cpu_count())), ("GPUs", gpus())]
    for extra, packages in EXTRAS.items():
        versions = [f"{package} {version_of(package)}" for package in packages]
        found.append((f"extra {extra}", ", ".join(versions)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the rows."""
    parser = argparse.ArgumentParser(prog="python -m keras_tx", description=DESCRIPTION, epilog=OTHERS)
    parser.parse_args(arguments)
    found = rows()
    width = max(len(name) for name, _ in found)
    for name, value in found:
        print(f"{name:{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

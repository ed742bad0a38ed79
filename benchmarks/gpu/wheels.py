"""The packages that a machine with JAX and PyTorch alone lacks, as wheels: downloaded here, installed there."""

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path

MIB = 2**20
LIMIT = 50 * MIB  # all wheels together
# Wheels for Linux say the oldest glibc that they run on, and pip takes none but those that it is told of.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# These are installed from the wheels unless the machine has exactly this version.
PINNED = {"keras": "3.15.1", "keras-hub": "0.32.0"}
# These are installed from the wheels only if the machine has none, in any version.
OTHERS = (
    *("absl-py", "h5py", "namex", "optree", "packaging", "rich"),  # Keras
    *("markdown-it-py", "mdurl", "pygments"),  # rich
    *("transformers", "huggingface-hub", "pyyaml", "regex", "safetensors", "tokenizers", "tqdm"),
    *("httpx2", "httpcore2", "h11", "idna", "truststore", "anyio"),  # huggingface-hub
    *("pytest", "iniconfig", "pluggy", "pytest-xdist", "execnet", "hypothesis", "sortedcontainers"),  # the tests
)


def download(folder: Path, python: str) -> None:
    """Fetches the wheels for Python `python`, such as "3.12", on 64-bit x86 Linux, and prints their sizes."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    wanted = [f"{name}=={version}" for name, version in PINNED.items()] + list(OTHERS)
    subprocess.run([*command, *wanted], check=True)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / MIB:6.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / MIB:6.2f} MiB in all, for Python {python}")
    if total > LIMIT:
        raise SystemExit(f"The wheels must be at most {LIMIT / MIB:.0f} MiB. Received: {total / MIB:.1f} MiB")


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing() -> list[str]:
    pinned = [f"{name}=={version}" for name, version in PINNED.items() if installed(name) != version]
    return pinned + [name for name in OTHERS if installed(name) is None]


def install(folder: Path, target: Path) -> str:
    """Installs what is missing from `folder` into `target`, without a network; says what was installed and what not."""
    stems = {path.name.split("-")[0].lower() for path in folder.glob("*.whl")}
    wanted = missing()
    there = [one for one in wanted if one.partition("==")[0].replace("-", "_") in stems]
    absent = [one for one in wanted if one not in there]
    words = f"{len(there)} packages installed from {folder.name}/" if there else "no package installed"
    if there:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--root-user-action=ignore", "--find-links", str(folder)]
        done = subprocess.run([*command, "--target", str(target), *there], capture_output=True, text=True)
        if done.returncode:
            words = f"nothing installed from {folder.name}/: {done.stderr.strip()}"
    return words + (f"; missing: {', '.join(absent)}" if absent else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info[:2]))
    arguments = parser.parse_args()
    download(arguments.folder, arguments.python)


if __name__ == "__main__":
    main()

"""A server that watches the folder sees only whole versions, whatever happens to the process that writes them."""

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from keras_tx import disk
from keras_tx.serving import check, export, versions
from keras_tx.serving.rest import latest_version
from keras_tx.serving.versions import MARKER, check_path, next_version, write_version


def write(folder):
    (folder / "saved_model.pb").write_text("graph")
    (folder / "variables").mkdir()
    (folder / "variables" / "variables.index").write_text("weights")


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def process(code, *arguments):
    """Runs code that has `write_version`, in a process without Keras or TensorFlow."""
    head = f"""
import runpy, sys, types
from pathlib import Path
sys.modules["keras_tx"] = types.ModuleType("keras_tx")  # whose own file would import Keras
sys.modules["keras_tx"].__path__ = [{str(Path(disk.__file__).parent)!r}]
vars().update(runpy.run_path({versions.__file__!r}))
"""
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "names, expected",
    [
        ([], 1),
        (["1", "2"], 3),
        (["9", "10"], 11),  # numbers, not words
        (["3"], 4),  # no gap is filled: 1 may have been withdrawn
        (["007"], 8),  # a server reads it as 7
        (["0"], 1),
        (["latest", "v4", "-5", "1.5", "2_0", "²", "incomplete-6", ".7"], 1),
    ],
)
def test_the_next_version_is_one_more_than_the_highest_number(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).mkdir()
    assert next_version(tmp_path) == expected


def test_a_file_with_a_number_for_a_name_takes_the_number(tmp_path):
    (tmp_path / "4").write_text("not a folder, and yet a folder cannot be renamed onto it")
    assert write_version(tmp_path, write) == tmp_path / "5"


def test_a_folder_that_is_not_there_begins_at_one(tmp_path):
    base = tmp_path / "saved_models" / "reviews"
    assert next_version(base) == 1
    for version in ("1", "2", "3"):
        path = write_version(base, write)
        assert path == base / version and files(path) == {"saved_model.pb", "variables/variables.index"}
        assert path.stat().st_mode & 0o777 == 0o755  # the server is another user


@pytest.mark.parametrize("error", [ValueError("the graph"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_nothing(tmp_path, error):
    def fail(folder):
        write(folder)
        raise error

    with pytest.raises(type(error)) as caught:
        write_version(tmp_path, fail)
    assert caught.value is error and not list(tmp_path.iterdir())
    assert write_version(tmp_path, write).name == "1"


def test_threads_that_finish_together_get_different_numbers(tmp_path):
    barrier, paths = threading.Barrier(8), []

    def write_together(folder):
        write(folder)
        barrier.wait(30)

    threads = [threading.Thread(target=lambda: paths.append(write_version(tmp_path, write_together))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in paths) == list("12345678")
    assert all(files(path) == {"saved_model.pb", "variables/variables.index"} for path in paths)
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.process
def test_processes_that_write_at_once_get_different_numbers(tmp_path):
    code = """
for i in range(25):
    print(write_version(Path(sys.argv[1]), lambda folder: (folder / "file").write_text("content")).name)
"""
    writers = [process(code, tmp_path) for _ in range(3)]
    names = [name for writer in writers for name in writer.communicate()[0].split()]
    assert sorted(map(int, names)) == list(range(1, 76))
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert all((path / "file").read_text() == "content" for path in tmp_path.iterdir())


@pytest.mark.process
def test_a_killed_process_leaves_no_version(tmp_path):
    code = """
def stop_halfway(folder):
    (folder / "saved_model.pb").write_text("half")
    print("halfway", flush=True)
    sys.stdin.read()
write_version(Path(sys.argv[1]), stop_halfway)
"""
    writer = process(code.replace("sys.stdin.read()", "__import__('time').sleep(60)"), tmp_path)
    assert writer.stdout.readline() == "halfway\n"
    writer.kill()
    writer.communicate()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("incomplete-") and files(left) == {"saved_model.pb", MARKER}
    assert write_version(tmp_path, write) == tmp_path / "1"
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # and it took away what the dead one left


def test_files_of_a_user_are_never_removed(tmp_path):
    """Whatever its name, a folder is removed only if an export made it."""
    elsewhere = tmp_path / "elsewhere"
    base = tmp_path / "reviews"
    for folder in (base / "incomplete-notes", base / "incomplete-ab12cd34", elsewhere):
        folder.mkdir(parents=True)
        (folder / "thesis.txt").write_text("years of work")
    (base / "incomplete-ef56gh78").symlink_to(elsewhere)
    (base / "incomplete-ij90kl12").write_text("a file")
    copied = base / "incomplete-mn34op56"  # a copy of what an export left, under another name
    copied.mkdir()
    (copied / MARKER).write_text("incomplete-00000000")
    (copied / "thesis.txt").write_text("years of work")
    (base / "incomplete-qr78st90").mkdir()
    (base / "incomplete-qr78st90" / MARKER).write_text("incomplete-qr78st90")
    before = {path.name for path in base.iterdir()}
    assert files(write_version(base, write)) == {"saved_model.pb", "variables/variables.index"}
    assert {path.name for path in base.iterdir()} == before - {"incomplete-qr78st90"} | {"1"}
    assert len([*tmp_path.rglob("thesis.txt")]) == 4


def test_what_another_export_still_writes_is_left_alone(tmp_path):
    def write_within(folder):
        write(folder)
        assert write_version(tmp_path, write) == tmp_path / "1"

    assert write_version(tmp_path, write_within) == tmp_path / "2"
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"} and len(files(tmp_path / "2")) == 2


@pytest.mark.process
def test_a_process_killed_at_any_moment_leaves_no_half_version(tmp_path):
    code = """
import time
def slowly(folder):
    for name in "abcdef":
        (folder / name).write_text(name)
        time.sleep(0.002)
while True:
    write_version(Path(sys.argv[1]), slowly)
    print("written", flush=True)
"""
    generator = random.Random(0)
    for _ in range(12):
        writer = process(code, tmp_path)
        assert writer.stdout.readline() == "written\n"
        time.sleep(generator.random() / 30)
        writer.kill()
        writer.communicate()
        names = [path.name for path in tmp_path.iterdir()]
        # One that was killed right after the renaming still has its marker.
        assert all(files(tmp_path / name) - {MARKER} == set("abcdef") for name in names if name.isdecimal())
    write_version(tmp_path, write)
    names = [int(path.name) for path in tmp_path.iterdir()]  # none is incomplete
    assert sorted(names) == list(range(1, len(names) + 1))


def test_all_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    happened, sync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def renamed(folder, version):
        happened.append("renamed")
        return rename(folder, version)

    monkeypatch.setattr(disk.os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    write_version(tmp_path, write)
    before = happened[: happened.index("renamed")]
    assert {"saved_model.pb", "variables.index", "variables", MARKER} < set(before) and len(before) == 5
    assert happened[len(before) :] == ["renamed", tmp_path.name]


@pytest.mark.parametrize("missing", ["module", "locks"])
def test_without_locks_versions_are_written_and_nothing_is_removed(tmp_path, monkeypatch, missing):
    def no_locks(descriptor, operation):
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    (tmp_path / "incomplete-of-another").mkdir()
    fcntl = None if missing == "module" else SimpleNamespace(flock=no_locks, LOCK_EX=2, LOCK_NB=4)
    monkeypatch.setattr(disk, "fcntl", fcntl)
    assert [write_version(tmp_path, write).name for _ in range(2)] == ["1", "2"]
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "incomplete-of-another"}


def test_another_failure_of_a_lock_names_the_folder(tmp_path, monkeypatch):
    def broken(descriptor, operation):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(disk, "fcntl", SimpleNamespace(flock=broken, LOCK_EX=2, LOCK_NB=4))
    with pytest.raises(OSError, match="`path` must be a folder that can be written. Received: path=.*broken"):
        write_version(tmp_path, write)


@pytest.mark.tensorflow
def test_a_watcher_never_sees_half_a_version(exported, tmp_path):
    whole, seen, done = files(exported.path), [], threading.Event()
    assert {"saved_model.pb", "variables/variables.index"} < whole

    def copy_slowly(folder):
        for name in sorted(whole):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(exported.path / name, folder / name)
            time.sleep(0.01)

    def watch():
        while not done.is_set():
            names = [path.name for path in tmp_path.iterdir()]
            seen.extend((name, files(tmp_path / name)) for name in names if name.isdecimal())
            seen.extend((name, None) for name in names if not name.isdecimal())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(4):
        write_version(tmp_path, copy_slowly)
    time.sleep(0.05)
    done.set()
    watcher.join()
    assert {name for name, _ in seen if name.isdecimal()} == set("1234")
    assert all(found == whole for _, found in seen if found is not None)
    assert any(found is None for _, found in seen)  # it also looked while a version was being written


@pytest.mark.parametrize("below", ["file", "file/reviews"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, below):
    (tmp_path / "file").write_text("")
    path = tmp_path / below
    with pytest.raises(OSError, match="`path` must be a folder that can be written. Received: path=") as error:
        write_version(path, write)
    assert repr(str(path)) in str(error.value)


@pytest.mark.tensorflow
def test_a_version_is_no_folder_for_versions(exported):
    with pytest.raises(
        ValueError, match="`path` must be the model's folder.* and not a version. Received: path="
    ) as error:
        export(exported.model, exported.path)
    assert repr(str(exported.path)) in str(error.value)


@pytest.mark.tensorflow
def test_a_number_is_no_name_of_a_model(exported, tmp_path):
    with pytest.raises(
        ValueError, match="`path` must be the model's folder.* and not a number itself. Received: path="
    ):
        export(exported.model, tmp_path / "1")
    assert not (tmp_path / "1").exists()


def test_there_is_no_version_above_the_largest(tmp_path):
    (tmp_path / str(2**63 - 1)).mkdir()
    with pytest.raises(ValueError, match="`path` must have versions below 9223372036854775807. Received: version 9223"):
        next_version(tmp_path)


def test_what_another_user_is_writing_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "incomplete-of-another").mkdir()
    lock = disk.lock

    def not_allowed(folder, *, wait):
        if folder.name.startswith("incomplete-of"):
            raise PermissionError(13, "Permission denied")
        return lock(folder, wait=wait)

    monkeypatch.setattr(disk, "lock", not_allowed)
    assert write_version(tmp_path, lambda folder: None).name == "1"
    assert (tmp_path / "incomplete-of-another").is_dir()


@pytest.mark.tensorflow
def test_export_names_the_folder_that_it_cannot_write(exported, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Received: path='.*file/reviews'"):
        export(exported.model, tmp_path / "file" / "reviews")


def test_a_rename_that_cannot_work_raises_and_leaves_nothing(tmp_path):
    def vanish(folder):
        shutil.rmtree(folder)

    with pytest.raises(FileNotFoundError):
        write_version(Path(tmp_path), vanish)
    assert not list(tmp_path.iterdir())


def test_a_folder_has_versions_of_one_format(tmp_path, make):
    base = tmp_path / "reviews"
    for version, file in (("1", "saved_model.pb"), ("2", "model.onnx")):
        (base / version).mkdir(parents=True)
        check_path(base, "tf_saved_model")
        (base / version / file).write_text("")
    for format, version, file in (("onnx", 1, "saved_model.pb"), ("tf_saved_model", 2, "model.onnx")):
        message = (
            f"versions have one format.* Received: path=.*format='{format}', and version {version}, which has a {file}"
        )
        with pytest.raises(ValueError, match=message):
            export(make(), base, format=format)
    assert len(list(base.iterdir())) == 2


def test_a_folder_has_its_name_however_it_is_given(tmp_path, monkeypatch):
    (tmp_path / "my model" / "7").mkdir(parents=True)
    for folder, path in ((".", "my model"), ("my model", "."), ("my model/7", ".."), (".", tmp_path / "my model/")):
        monkeypatch.chdir(tmp_path / folder)
        assert versions.model_name(path) == "my model"
        check_path(Path(path), "tf_saved_model")
    monkeypatch.chdir(tmp_path / "my model" / "7")
    with pytest.raises(ValueError, match="and not a number itself. Received: path='.'"):
        check_path(Path("."), "tf_saved_model")


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["v [2]", "[2", "a\\b", "v ]2", "a*b?", "é", "r\udcffaw"])
def test_a_folder_is_refused_if_tensorflow_cannot_load_from_it(tmp_path, name, make, exported, monkeypatch):
    """A lone opening bracket is refused, too: the rule is easier to say so."""
    import tensorflow as tf

    folder = tmp_path / name / "reviews"
    shutil.copytree(exported.path, folder / "1")
    monkeypatch.chdir(folder)
    try:
        tf.saved_model.load(str(folder / "1"))
        is_refused = name == "[2"
    except (RuntimeError, OSError, UnicodeEncodeError):
        is_refused = True
    rules = {
        "[": "not contain a square bracket, because",
        "\\": "not contain a backslash, because",
        "\udcff": "be a path in UTF-8",
    }
    rule = next((rule for sign, rule in rules.items() if sign in name), "")
    received = re.escape(repr(str(folder))[1:-1])
    calls = (
        (lambda: export(make(), "."), f"`path` must {rule}.* Received: path='{received}'$"),
        (lambda: check(folder / "1"), f"`path` must {rule}.* Received: path='{received}/1'$"),
        (lambda: latest_version(folder), f"`folder` must {rule}.* Received: folder='{received}'$"),
    )
    for call, message in calls if is_refused else ():
        with pytest.raises(ValueError, match=message):
            call()
    if not is_refused:
        assert latest_version(folder).name == "1"
        check_path(folder, "tf_saved_model")
    assert [entry.name for entry in folder.iterdir()] == ["1"]
    if name.isprintable():
        check_path(folder.with_name("new"), "onnx")  # which TensorFlow does not load

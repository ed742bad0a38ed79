"""A checkpoint is replaced whole: for readers beside, after a kill at any moment, by two writers, over links."""

import errno
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.attack import kills
from keras_tx import disk, pretrained, replace
from keras_tx.pretrained import snapshot
from keras_tx.pretrained.files import open_tensors, write_tensors
from keras_tx.replace import replacing
from tests.pretrained.tiny import checkpoint, copied, loaded

SHARDS = {"max_shard_bytes": 20_000}
NEVER = lambda name, new: False


@pytest.fixture(params=["links", "no links", "no hard links"])
def system(request, monkeypatch):
    """Runs a test as on each kind of file system."""

    def refuse(*args, **options):
        raise OSError(errno.EPERM, "not here")

    if request.param == "no links":
        monkeypatch.setattr(Path, "symlink_to", refuse)
    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", refuse)
    return request.param


@pytest.fixture
def writers(tmp_path):
    """The writers of two checkpoints of different architectures in one folder, and what each makes there."""
    folder = tmp_path / "ours"
    found = {}
    for name, options in (("bert", SHARDS), ("gpt2", {})):
        write = kills.checkpoint_writer(folder, loaded(name), **options)
        write()
        found[name] = SimpleNamespace(write=write, state=kills.state_of(folder), files=names_in(folder))
        assert kills.seen_by_others(folder) == found[name].state
    return SimpleNamespace(folder=folder, **found)


def names_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# Kills, readers and writers beside


@pytest.mark.process
def test_killed_at_any_call_it_leaves_the_old_checkpoint_or_the_new_one(writers, system):
    generator, seen, killed = random.Random(7), set(), 0
    new, other = writers.bert, writers.gpt2
    now, steps = other.state, min(kills.steps_of(new.write), kills.steps_of(other.write))
    for part in (0.1, 0.9, 0.4, 0.7, 0.6, 0.8):  # of a save over what the one before left
        killed += kills.killed_before(new.write, int(steps * generator.uniform(part, part + 0.1)))
        found = kills.state_of(writers.folder)
        assert found in (now, new.state)
        # Without links other programs find no checkpoint between the two.
        assert kills.seen_by_others(writers.folder) in ((found, "nothing") if system == "no links" else (found,))
        seen.add(found == new.state)
        now, new, other = found, other, new
    assert seen == {True, False} and killed > 3
    new.write()
    assert names_in(writers.folder) == new.files and kills.state_of(writers.folder) == new.state


@pytest.mark.process
def test_killed_at_any_time_it_leaves_one_of_two_checkpoints(writers):
    generator = random.Random(7)
    for _ in range(3):
        assert kills.killed_after([writers.bert.write, writers.gpt2.write], generator.uniform(0.1, 0.4))
        assert kills.state_of(writers.folder) in (writers.bert.state, writers.gpt2.state)
        assert kills.seen_by_others(writers.folder) == kills.state_of(writers.folder)


@pytest.mark.process
def test_readers_beside_two_writers_get_one_of_two_checkpoints(writers, system):
    states = []
    with kills.writing_beside([writers.bert.write, writers.gpt2.write], [writers.gpt2.write]):
        while len(states) < 20 or (len(set(states)) < 2 and len(states) < 300):
            states.append(kills.state_of(writers.folder))
    assert set(states) == {writers.bert.state, writers.gpt2.state}
    writers.bert.write()
    assert names_in(writers.folder) == writers.bert.files


@pytest.mark.process
def test_a_child_that_fails_is_told():
    with pytest.raises(RuntimeError, match="the child ended with the exit status 3"):
        kills.ended(kills.forked(lambda: 1 / 0))
    assert not kills.killed_before(lambda: None, 0)


def test_what_is_read_stays_what_was_opened(tmp_path):
    write_tensors(tmp_path, [("a", np.arange(5)), ("b", np.arange(7))], max_shard_bytes=1)
    tensors = open_tensors(tmp_path)
    write_tensors(tmp_path, [("a", np.zeros(5, int)), ("b", np.zeros(7, int))])
    np.testing.assert_array_equal(tensors.read("b"), np.arange(7))  # from a file that is gone
    tensors.check_unchanged()
    tensors = open_tensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes())  # the same again, into the same file
    with pytest.raises(ValueError, match="model.safetensors must not change while it is read. Received: a file that w"):
        tensors.check_unchanged()


def test_a_model_whose_file_was_written_into_is_refused(tmp_path, monkeypatch):
    source = copied("bert", tmp_path)
    load_state = pretrained.load.VariableLoader.finish

    def finish(self):
        load_state(self)
        with open(source / "model.safetensors", "r+b") as file:
            file.write(file.read(1) and b"")
            file.seek(0)
            file.write(b"\x00")

    monkeypatch.setattr(pretrained.load.VariableLoader, "finish", finish)
    with pytest.raises(ValueError, match="must not change while it is read. Received: a file that was written into"):
        pretrained.from_pretrained(source)


@pytest.mark.parametrize("other", [None, "another"])
def test_a_file_that_was_away_for_a_moment_is_read_again(tmp_path, other):
    """Two writers at once can move a file away and back, and then all is as it was found."""
    path, away = tmp_path / "a.json", tmp_path / "away"
    path.write_text("1")
    attempts = []

    def read(found):
        assert "a.json" in found
        attempts.append(found)
        if len(attempts) == 1:
            path.rename(away)
            if other:
                path.write_text(other)
        try:
            file = found.open("a.json")
            return file.stream().read()
        finally:
            if len(attempts) == 1:
                away.replace(path)

    assert snapshot.consistent(tmp_path, read) == b"1"
    assert len(attempts) == 2


def test_files_that_never_stand_still_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "PAUSE", 0)
    attempts = []

    def read(found):
        attempts.append("config.json" in found)
        (tmp_path / "config.json").write_text("x" * len(attempts))
        if len(attempts) % 2:
            raise ValueError("half of a file")

    with pytest.raises(
        OSError, match=f"must not change while they are opened. Received: changes at {snapshot.TRIES} at"
    ):
        snapshot.consistent(tmp_path, read)
    assert attempts == [False] + [True] * (snapshot.TRIES - 1)
    with pytest.raises(ValueError, match="at the first attempt"):
        snapshot.consistent(tmp_path, lambda found: int("at the first attempt"))


# What is replaced, and what stays


def test_links_are_replaced_and_what_they_lead_to_stays(tmp_path, system):
    """As in the cache of the hub, where several revisions share files."""
    if system == "no links":
        pytest.skip("no links to replace")
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    folder.mkdir(parents=True)
    for path in checkpoint("bert").iterdir():
        (blobs / f"of-{path.name}").write_bytes(path.read_bytes())
        (folder / path.name).symlink_to(f"../../blobs/of-{path.name}")
    (folder / "generation_config.json").symlink_to("../../blobs/missing")
    before = {path.name: path.read_bytes() for path in blobs.iterdir()}
    model = pretrained.from_pretrained(folder)
    pretrained.save_pretrained(model, folder, dtype="float16")
    assert {path.name: path.read_bytes() for path in blobs.iterdir()} == before
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    links = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert "reference.npz" in links and not links & {"config.json", "model.safetensors", "vocab.txt"}
    assert "generation_config.json" not in os.listdir(folder)


def test_the_folder_may_be_a_link_and_hold_other_files(tmp_path, monkeypatch, system):
    folder, link = tmp_path / "ours", tmp_path / "link"
    (folder / ".git" / "objects").mkdir(parents=True)
    os.symlink(folder, link)
    others = {".git/objects/1", "README.md", "model.onnx", ".keras_tx-save-notes/thesis.txt", "pytorch_model.bin"}
    others |= {".keras_tx-save-0123456789abcdef/thesis.txt"}  # a name like ours, and nothing that shows that it is
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.chdir(folder)
    for directory, name in ((link, "bert"), (Path("."), "gpt2"), (folder, "bert")):
        pretrained.save_pretrained(loaded(name), directory, **SHARDS)
    assert {name for name in others if (folder / name).read_text() == name} == others
    assert link.is_symlink() and Path.cwd() == folder.resolve() and "config.json" in os.listdir()
    assert not [path for path in folder.iterdir() if path.is_symlink()]


def test_nothing_of_another_architecture_is_left(tmp_path):
    pretrained.save_pretrained(loaded("gpt2"), tmp_path, **SHARDS)
    assert {"generation_config.json", "merges.txt"} <= names_in(tmp_path)
    pretrained.save_pretrained(loaded("bert"), tmp_path)
    fresh = tmp_path.with_name("fresh")
    pretrained.save_pretrained(loaded("bert"), fresh)
    assert names_in(tmp_path) == names_in(fresh)
    (tmp_path / "vocab.txt").write_text("mine")
    pretrained.save_pretrained(pretrained.PretrainedModel(loaded("bert").config), tmp_path)  # has no tokenizer
    assert (tmp_path / "vocab.txt").read_text() == "mine"


def test_files_in_folders_below_are_replaced_too(tmp_path, system):
    for count in (3, 2):
        with replacing(tmp_path, NEVER, gate="a.txt") as folder:
            for index in range(count):
                (folder / f"in/to/{index}").mkdir(parents=True)
                (folder / f"in/to/{index}/b.txt").write_text(str(count))
            (folder / "a.txt").write_text(str(count))
    texts = {name: (tmp_path / name).read_text() for name in names_in(tmp_path)}
    assert texts == {"a.txt": "2", "in/to/0/b.txt": "2", "in/to/1/b.txt": "2", "in/to/2/b.txt": "3"}


@pytest.mark.parametrize("kind", ["now", "old", "removed", "record"])
def test_a_downloaded_folder_cannot_reach_files_elsewhere(tmp_path, kind):
    """What looks like the rest of a killed process may have been made to move or delete other files."""
    folder, private = tmp_path / "ours", tmp_path / "private"
    work = folder / ".keras_tx-save-0123456789abcdef"
    (work / "new").mkdir(parents=True)
    private.mkdir()
    (private / "config.json").write_text("mine")
    (work / "about.txt").write_bytes(replace._TEXT)
    (work / "new" / "config.json").write_text("theirs")
    if kind in ("now", "old"):
        (folder / "config.json").symlink_to(f"{work.name}/now/config.json")
        (work / "now").symlink_to(private if kind == "now" else "old")
        if kind == "old":
            (work / "old").symlink_to(private)
    else:
        record = {"removed": ["../private/config.json", 3], "gate": "../private"} if kind == "removed" else [1]
        (work / "removed.json").write_text(json.dumps(record))
    pretrained.save_pretrained(loaded("bert"), folder)
    assert (private / "config.json").read_text() == "mine" and os.listdir(private) == ["config.json"]
    assert pretrained.from_pretrained(folder).task == "masked_lm"


# Errors


def test_a_folder_in_the_place_of_a_file_changes_nothing(tmp_path, system):
    (tmp_path / "config.json").mkdir()
    (tmp_path / "model.safetensors").write_text("old")
    with pytest.raises(IsADirectoryError, match="`directory` must have no folder named 'config.json'. Received: .*'"):
        pretrained.save_pretrained(loaded("bert"), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize("at", range(4))
def test_an_error_at_any_moment_leaves_the_old_files_or_the_new_ones(tmp_path, monkeypatch, at):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("old")
    original, calls = os.replace, []

    def failing(*paths):
        calls.append(paths)
        if len(calls) == at + 1:
            raise OSError(errno.ENOSPC, "no space")
        original(*paths)

    with pytest.raises(OSError, match="no space"), replacing(tmp_path, lambda name, new: name == "b") as folder:
        (folder / "a").write_text("new")
        (folder / "c").write_text("new")
        monkeypatch.setattr(os, "replace", failing)
    monkeypatch.setattr(os, "replace", original)
    assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == {"a": "old", "b": "old"}


def test_without_links_an_error_in_between_is_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "symlink_to", lambda *args, **options: os.unlink(tmp_path / "nothing"))
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").write_text("old")
    original = os.replace

    def failing(source, target):
        if Path(target).name == "c":
            raise PermissionError(errno.EACCES, "opened by another program")
        original(source, target)

    with (
        pytest.raises(PermissionError, match="opened by another"),
        replacing(tmp_path, lambda *_: True, gate="a") as new,
    ):
        (new / "a").write_text("new")
        (new / "c").write_text("new")
        monkeypatch.setattr(os, "replace", failing)
    monkeypatch.setattr(os, "replace", original)
    assert not [name for name in os.listdir(tmp_path) if not name.startswith(".")]  # others see nothing
    path = replace.located(tmp_path)
    assert path("a").read_text() == path("c").read_text() == "new" and not path("b").exists()
    with replacing(tmp_path, NEVER) as new:
        (new / "d").write_text("new")
    assert {name: (tmp_path / name).read_text() for name in os.listdir(tmp_path)} == dict.fromkeys("acd", "new")
    assert replace.located(tmp_path)("b") == tmp_path / "b"


def test_where_folders_cannot_be_locked_it_is_written_and_nothing_else_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "fcntl", None)
    (tmp_path / ".keras_tx-save-0123456789abcdef").mkdir()  # of whom?
    write_tensors(tmp_path, [("a", np.arange(5))])
    assert sorted(os.listdir(tmp_path)) == [".keras_tx-save-0123456789abcdef", "model.safetensors"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_only_a_system_that_cannot_flush_is_left_unflushed(tmp_path, monkeypatch, number):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if number == errno.EINVAL:
        write_tensors(tmp_path, [("a", np.arange(5))])
        assert open_tensors(tmp_path).names == ("a",)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            write_tensors(tmp_path, [("a", np.arange(5))])
        assert not os.listdir(tmp_path)

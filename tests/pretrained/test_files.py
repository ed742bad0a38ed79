"""Files of weights: what the safetensors library writes and reads, and hostile files."""

import json
import os
import shlex
import shutil
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from keras_tx.pretrained import files, headers
from keras_tx.pretrained.files import open_tensors, write_tensors
from tests.pretrained.tiny import checkpoint


def arrays():
    """One of each dtype, among them no numbers, one number, and a transposed matrix."""
    generator = np.random.default_rng(3)
    made = {"transposed": generator.normal(size=(5, 3)).astype("float32").T, "number": np.array(7, "int64")}
    for index, dtype in enumerate(headers.CODES):
        made[f"of_{dtype}"] = (100 * generator.normal(size=(3, 5, index + 1))).astype(dtype)
    return {**made, "none": np.zeros((5, 0, 7), "float16"), "naïve ☃": np.ones(11, ml_dtypes.bfloat16)}


def assert_holds(tensors, expected):
    assert set(tensors) == set(tensors.names) == set(expected) and len(tensors) == len(expected)
    for name, array in expected.items():
        assert tensors.shape(name) == array.shape and tensors.dtype(name) == array.dtype and name in tensors
        read = tensors.read(name)
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def hostile(path, header, data=b"", length=None):
    """Writes a file with this header, a dict, str or bytes."""
    header = json.dumps(header) if isinstance(header, dict) else header
    header = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


# Equal to the library


def test_what_the_library_writes_is_read(tmp_path):
    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays().items()}
    safetensors.numpy.save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt", "note": "any"})
    assert_holds(open_tensors(tmp_path), whole)
    assert_holds(open_tensors(tmp_path / "model.safetensors"), whole)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 700, 1])
def test_what_is_written_the_library_reads(tmp_path, max_shard_bytes):
    write_tensors(tmp_path / "new", arrays().items(), max_shard_bytes=max_shard_bytes)
    assert_holds(open_tensors(tmp_path / "new"), arrays())
    read, shards = {}, sorted((tmp_path / "new").glob("*.safetensors"))
    for shard in shards:
        sizes = [array.nbytes for array in safetensors.numpy.load_file(shard).values() if array.size]
        assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
        read.update(safetensors.numpy.load_file(shard))
        with safetensors.safe_open(shard, "np") as file:
            assert file.metadata()["format"] == "pt"
        for one in open_tensors(shard)._entries.values():
            assert one.entry.begin % max(one.dtype.itemsize, 1) == 0
    for name, array in arrays().items():
        np.testing.assert_array_equal(read[name], array)
    assert len(read) == len(arrays())
    assert (len(shards) > 1) == (max_shard_bytes < 10**9)
    if len(shards) > 1:
        index = json.loads((tmp_path / "new" / files.INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays().values())
        assert set(index["weight_map"].values()) == {shard.name for shard in shards}


@pytest.mark.parametrize("name", ["bert", "bert_fp16", "llama_bf16_sharded", "t5"])
def test_checkpoints_of_transformers_are_read_as_the_library_reads_them(name):
    expected = {}
    for shard in checkpoint(name).glob("*.safetensors"):
        expected.update(safetensors.numpy.load_file(shard))
    assert_holds(open_tensors(checkpoint(name)), expected)


# One at a time


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    size = 2**20
    tracemalloc.start()
    try:
        tensors = ((f"t{i}", np.full(size, i, "uint8")) for i in range(16))
        write_tensors(tmp_path, tensors, max_shard_bytes=5 * size)
        assert tracemalloc.get_traced_memory()[1] < 8 * size  # the copy into the file goes by pieces of a shard
        tensors = open_tensors(tmp_path)
        tracemalloc.reset_peak()
        assert sum(int(tensors.read(name)[-1]) for name in tensors) == 120
        assert tracemalloc.get_traced_memory()[1] < 2.2 * size  # the one before lives until the next is there
    finally:
        tracemalloc.stop()


def test_writing_replaces_a_checkpoint_and_leaves_other_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.fp16.safetensors").write_text("another")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("of transformers")
    others = {"tokenizer.json", "model.fp16.safetensors"}
    for max_shard_bytes, count in ((1, 4), (10**6, 1), (12, 3)):
        tensors = {f"t{i}": np.full(i + 1, max_shard_bytes, "int32") for i in range(3)}
        write_tensors(tmp_path, tensors.items(), max_shard_bytes=max_shard_bytes)
        assert_holds(open_tensors(tmp_path), tensors)
        assert len({entry.name for entry in tmp_path.iterdir()} - others) == count


def test_writing_that_fails_changes_nothing(tmp_path):
    write_tensors(tmp_path, [("a", np.arange(5))])
    before = (tmp_path / "model.safetensors").read_bytes()

    def failing():
        yield "a", np.zeros(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_tensors(tmp_path, failing(), max_shard_bytes=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ([], {}, "`tensors` must have a pair .* Received: none"),
        ([("", np.ones(2))], {}, "names of `tensors` must be strings, each once. Received: ''"),
        ([("a", np.ones(2)), ("a", np.ones(2))], {}, "each once. Received: 'a'"),
        ([("__metadata__", np.ones(2))], {}, "each once. Received: '__metadata__'"),
        ([(3, np.ones(2))], {}, "must be strings, each once. Received: 3"),
        ([("a", np.ones(2, "complex64"))], {}, "must have a dtype of .*'F64'.* Received: complex64 in 'a'"),
        ([("a", np.ones(2, ">f4"))], {}, "must have a dtype of .* Received: >f4 in 'a'"),
        (
            [("a", np.ones(2))],
            {"max_shard_bytes": 0},
            "`max_shard_bytes` must be a positive integer.* max_shard_bytes=0",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, tensors, options, message):
    with pytest.raises(ValueError, match=message):
        write_tensors(tmp_path, tensors, **options)
    assert not list(tmp_path.iterdir())


# Hostile headers


def test_a_length_of_terabytes_reads_nothing(tmp_path):
    path = hostile(tmp_path / "model.safetensors", {"a": entry()}, bytes(8), length=2**42)
    with pytest.raises(ValueError, match=r"must begin with the length .* Received: length 4398046511104, \d+ bytes"):
        open_tensors(tmp_path)
    os.truncate(path, 2**43)  # a file of holes, which takes no space
    with pytest.raises(ValueError, match="at most 100000000 and inside the file. Received: length 4398046511104"):
        open_tensors(tmp_path)
    hostile(path, {"a": entry("U8", [2**41], [0, 2**41])}, bytes(8))
    with pytest.raises(ValueError, match=r"must end with its last tensor, at 21990232556\d\d. Received: \d+ bytes"):
        open_tensors(tmp_path)
    path.write_bytes(b"\1\2\3")
    with pytest.raises(ValueError, match="Received: length 197121, 3 bytes in the file"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe", "must be a JSON object in UTF-8. Received: 'utf-8' codec can't decode byte 0xff"),
        ("[1, 2]", r"must be a JSON object in UTF-8. Received: '\[1, 2\]'"),
        ("\n{}", r"must be a JSON object in UTF-8. Received: '\\n{}'"),
        ("  {}", "must be a JSON object in UTF-8. Received: '  {}'"),
        ("{", "must be a JSON object in UTF-8. Received: Expecting property name"),
        ("", "must be a JSON object in UTF-8. Received: Expecting value"),
        ('{"a":' * 100_000, "must be a JSON object in UTF-8. Received: values nested more than 100 levels deep"),
        ('{"a": [' + "[" * 99 + "]" * 99 + "]}", "Received: values nested more than 100 levels deep"),
        ('{"a": 1e999}', "must be a JSON object in UTF-8. Received: the number 1e999"),
        (f'{{"a": {"7" * 5000}}}', "must be a JSON object in UTF-8. Received: Exceeds the limit"),
        ('{"a": 1, "b": 2, "a": 3}', "must be a JSON object in UTF-8. Received: the key 'a' twice"),
        ('{"a": NaN}', "must be a JSON object in UTF-8. Received: the number NaN"),
        ('{"a\\ud800": 1}', "must be a JSON object in UTF-8. Received: 'utf-8' codec can't encode"),
        ({"__metadata__": {"a": 1}}, "`__metadata__` .* must be an object of strings. Received: {'a': 1}"),
        ({"__metadata__": []}, r"`__metadata__` .* must be an object of strings. Received: \[\]"),
        ({"a": 5}, r"'a' .* must be described by \['data_offsets', 'dtype', 'shape'\]. Received: 5"),
        ({"a": entry(more=1)}, "'a' .* must be described by .* Received: .*'more': 1"),
        ({"a": entry("F8_E4M3")}, "'a' .* must have a dtype of .* Received: 'F8_E4M3'"),
        ({"a": entry(["F32"])}, r"'a' .* must have a dtype of .* Received: \['F32'\]"),
        ({"a": entry(shape=[-2])}, r"'a' .* must have a shape of non-negative integers. Received: \[-2\]"),
        ({"a": entry(shape=[2.0])}, r"must have a shape of non-negative integers. Received: \[2.0\]"),
        ({"a": entry(shape=[True, 2])}, r"must have a shape of non-negative integers. Received: \[True, 2\]"),
        ({"a": entry(shape=2)}, "must have a shape of non-negative integers. Received: 2"),
        ({"a": entry(shape=[1] * 33)}, r"must have a shape of non-negative integers. Received: \[1, 1"),
        (
            {"a": entry(shape=[0, 2**70], offsets=[0, 0])},
            r"must have a shape .* Received: \[0, 1180591620717411303424\]",
        ),
        ({"a": entry(offsets=[0])}, r"'a' .* must have two `data_offsets`. Received: \[0\]"),
        ({"a": entry(offsets=[-8, 0])}, r"must have two `data_offsets`. Received: \[-8, 0\]"),
        ({"a": entry(offsets=["0", "8"])}, r"must have two `data_offsets`. Received: \['0', '8'\]"),
        ({"a": entry(offsets=[8, 0])}, r"as many bytes .*, 8. Received: data_offsets=\[8, 0\], shape=\[2\], dtype=F32"),
        ({"a": entry("F16")}, r"as many bytes .*, 4. Received: data_offsets=\[0, 8\], shape=\[2\], dtype=F16"),
        ({"a": entry(shape=[3])}, r"as many bytes .*, 12. Received: data_offsets=\[0, 8\], shape=\[3\]"),
        (
            {"a": entry(), "b": entry()},
            r"one directly after the other. Received: 'b' at byte \d+, the one before ends at \d+",
        ),
        (
            {"a": entry(offsets=[8, 16])},
            r"one directly after the other. Received: 'a' at byte \d+, the one before ends at \d+",
        ),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, r"one directly after the other. Received: 'b' at byte \d+"),
        ({"a": entry(), "b": entry(offsets=[8, 16])}, r"must end with its last tensor, at \d+. Received: \d+ bytes"),
        ({}, "must end with its last tensor, at 10. Received: 18 bytes"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path, header, message):
    hostile(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=message) as error:
        open_tensors(tmp_path)
    assert len(str(error.value)) < 700


def test_a_pointer_of_git_lfs_is_called_so(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    with pytest.raises(ValueError, match="fetch it by `git lfs pull`. Received: a Git LFS pointer"):
        open_tensors(tmp_path)


def flipped(data, generator, end, most):
    """`data` with up to `most` bits before the byte `end` turned over."""
    data = bytearray(data)
    for _ in range(generator.integers(1, most + 1)):
        data[generator.integers(end)] ^= 1 << int(generator.integers(8))
    return bytes(data)


@pytest.mark.parametrize("written_by", ["library", "us"])
def test_a_thousand_damaged_files_give_an_error_or_the_same_tensors(tmp_path, written_by):
    path, sizes = tmp_path / "model.safetensors", {"a": (3, 5), "b.weight": (7,), "c": (2, 3, 11)}
    whole = {name: np.random.default_rng(0).normal(size=size).astype("float32") for name, size in sizes.items()}
    if written_by == "us":
        write_tensors(tmp_path, whole.items())
    else:
        safetensors.numpy.save_file(whole, path, metadata={"format": "pt"})
    data, generator, refused = path.read_bytes(), np.random.default_rng(1), 0
    header = 8 + int.from_bytes(data[:8], "little")
    for number in range(1000):
        kind = number % 4
        if kind == 0:
            damaged = data[: generator.integers(len(data))]
        elif kind == 1:  # the length
            damaged = flipped(data, generator, 8, 3)
        elif kind == 2:
            damaged = data[:8] + flipped(data[8:], generator, header - 8, 1)
        elif written_by == "library":
            damaged = data[:8] + flipped(data[8:], generator, header - 8, 4)
        else:  # in the numbers, which only a checksum shows
            damaged = data[:header] + flipped(data[header:], generator, len(data) - header, 4)
        path.write_bytes(damaged)
        try:
            tensors = open_tensors(tmp_path)
            read = {name: tensors.read(name) for name in tensors}
        except ValueError as error:
            assert "Received: " in str(error)
            refused += 1
            continue
        if written_by == "us":
            assert list(read) == list(whole)
        # In a file of others a name may be damaged: the audit of the model finds that a tensor is missing.
        for array, expected in zip(read.values(), whole.values(), strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)
    assert refused > (950 if written_by == "us" else 800)


def test_damaged_numbers_are_seen_in_files_of_our_own(tmp_path):
    write_tensors(tmp_path, [("a", np.arange(5)), ("b", np.arange(7))])
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tensors = open_tensors(tmp_path)
    np.testing.assert_array_equal(tensors.read("a"), np.arange(5))
    with pytest.raises(ValueError, match="'b' .* must have the checksum .* Received: [0-9a-f]{8}; the file is damaged"):
        tensors.read("b")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="must not change while it is read. Received: 53 of 56 bytes of 'b'"):
        tensors.read("b")
    metadata = {headers.CHECKSUMS: json.dumps({"b": "01234567"})}
    hostile(path, {"__metadata__": metadata, "a": entry()}, bytes(8))
    with pytest.raises(ValueError, match="must name the tensors of the file. Received: 'a' in one"):
        open_tensors(tmp_path)


# Shards


@pytest.fixture
def sharded(tmp_path):
    """A directory with three shards; changes its index by a function."""
    write_tensors(tmp_path, [(name, np.full(2, ord(name))) for name in "abc"], max_shard_bytes=16)

    def change(edit):
        index = json.loads((tmp_path / files.INDEX).read_text())
        edit(index["weight_map"])
        (tmp_path / files.INDEX).write_text(json.dumps(index))
        return tmp_path

    return change


def shard_of(directory, name):
    """The shard that holds a tensor."""
    return directory / json.loads((directory / files.INDEX).read_text())["weight_map"][name]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m.update(a="../other.safetensors"),
            "must name .safetensors files in its own folder. Received: '../other.saf",
        ),
        (lambda m: m.update(a="/etc/x.safetensors"), "in its own folder. Received: '/etc/x.safetensors'"),
        (lambda m: m.update(a="..\\x.safetensors"), "in its own folder. Received: .*"),
        (lambda m: m.update(a="x.safetensors"), "in its own folder. Received: 'x.safetensors'"),
        (lambda m: m.update(a="tokenizer.json"), "in its own folder. Received: 'tokenizer.json'"),
        (lambda m: m.update(a=7), "in its own folder. Received: '7'"),
        (
            lambda m: m.update(d=m["b"]),
            "must list the tensors of .* Received: 'd', which the index has and the shard has not",
        ),
        (lambda m: m.update(a=m.pop("b")), "Received: 'a', which the index has and the shard has not"),
        (lambda m: m.update(b2=m.pop("b")), "Received: 'b', which the shard has and the index has not"),
        (lambda m: m.clear(), "must have a `weight_map`. Received: dict"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(sharded, edit, message):
    directory = sharded(edit)
    (directory / "other.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        open_tensors(directory)


def test_shards_are_found_missing_and_tensors_twice(sharded):
    directory = sharded(lambda m: None)
    assert open_tensors(directory).names == ("a", "b", "c")
    first, second = shard_of(directory, "a"), shard_of(directory, "b")
    kept = first.read_bytes()
    write_tensors(directory / "more", [("a", np.full(2, 97)), ("b", np.full(2, 98))])
    shutil.copy(directory / "more" / "model.safetensors", first)
    with pytest.raises(ValueError, match="Received: 'b', which the shard has and the index has not"):
        open_tensors(directory)
    first.write_bytes(kept)
    second.unlink()
    with pytest.raises(ValueError, match=f"in its own folder. Received: '{second.name}'"):
        open_tensors(directory)
    for content, message in (('{"weight_map": {"a": 1, "a": 2}}', "the key 'a' twice"), ("[]", r"'\[\]'")):
        (directory / files.INDEX).write_text(content)
        with pytest.raises(ValueError, match=f"The index .* must be a JSON object in UTF-8. Received: .*{message}"):
            open_tensors(directory)
    os.truncate(directory / files.INDEX, 2**30)
    with pytest.raises(ValueError, match="must have at most 100000000 bytes. Received: 1073741824 bytes"):
        open_tensors(directory)


# What is opened


def test_a_path_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must have one of .*tf_model.h5.*, a directory with \[\]"):
        open_tensors(tmp_path)
    with pytest.raises(ValueError, match="`path` must have one of .*/nowhere', no directory"):
        open_tensors(tmp_path / "nowhere")
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ValueError, match="`path` must end with .safetensors, .index.json or .h5. Received: .*x.txt"):
        open_tensors(tmp_path / "x.txt")
    os.mkfifo(tmp_path / "model.safetensors")  # reading it would wait for ever
    with pytest.raises(ValueError, match="`path` must have one of .*'model.safetensors', 'x.txt'"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-2.bin"])
def test_pickles_are_refused_with_the_line_that_converts_them(tmp_path, name):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="must have weights in safetensors: a pickle can run any code") as error:
            open_tensors(path)
        assert files.remedy(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["plain", 'it\'s "my" $HOME', "a b; rm -rf `pwd`"])
def test_the_line_that_converts_pickles_is_quoted_for_a_shell(name):
    python, option, code = shlex.split(files.remedy(name))
    compile(code, "remedy", "exec")
    values = {}
    exec(code.split("; ", 1)[1].rsplit("; c = ", 1)[0], values)
    assert (python, option, values["d"]) == ("python", "-c", name)

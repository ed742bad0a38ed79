"""Changed model.safetensors, shards and indices, and tf_model.h5."""

import json
import struct
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from benchmarks.attack.checkpoints import copied, loads_as_transformers
from benchmarks.attack.outcome import Case, Outcome
from tests.pretrained import tiny

NUMBERS = [-1, 0, 1, 3, 4, 2**31, 2**48, 2**63, 2**64, 10**30, 0.5, "8", None, True, [], [4], {}, float("nan")]
CODES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U32", "BOOL", "F8_E4M3", "f32", "", None, 4, []]


def safetensors(case: Case) -> Outcome:
    """A changed model.safetensors: its length, its header or its numbers."""
    name = tiny.NAMES[case.number % len(tiny.NAMES)]
    folder = copied(case, name)
    change_safetensors(case, folder / "model.safetensors")
    return loads_as_transformers(case, name, folder)


def shards(case: Case) -> Outcome:
    """A changed index, or a changed shard."""
    folder = copied(case, "llama_bf16_sharded")
    index = folder / "model.safetensors.index.json"
    if case.random.random() < 0.25:
        change_safetensors(case, case.choice(sorted(folder.glob("model-*.safetensors"))))
        return loads_as_transformers(case, "llama_bf16_sharded", folder)
    values = json.loads(index.read_text())
    places, files = values["weight_map"], sorted(set(values["weight_map"].values()))
    name = case.choice(places)
    names = [
        *("", ".", "..", "/", "/etc/passwd", "../model.safetensors", "config.json", "x.safetensors", "a/b.safetensors"),
        *("model.bin", files[0] + "\0", files[0].upper(), None, 4, [files[0]], {}, "x" * 5000, f"./{files[0]}", *files),
        str(folder / files[0]),
    ]

    def link() -> None:
        (folder / files[0]).rename(case.folder / "elsewhere.safetensors")
        (folder / files[0]).symlink_to(case.folder / "elsewhere.safetensors")

    changes = {
        "another file": lambda: places.update({name: case.choice([x for x in names if x != places[name]])}),
        "all in another file": lambda: places.update(dict.fromkeys(places, case.choice(names))),
        "a tensor less": lambda: places.pop(name),
        "a tensor more": lambda: places.update({case.choice(["", "x", name + ".x", "model."]): files[0]}),
        "no map": lambda: values.update(weight_map=case.choice([None, [], {}, "x", 4, [[name, files[0]]]])),
        "no key": lambda: values.pop("weight_map"),
        "metadata": lambda: values.update(metadata=case.choice([None, [], 4, {"total_size": -1}, {"total_size": "x"}])),
        "a file less": lambda: (folder / case.choice(files)).unlink(),
        "a folder as a file": lambda: [(folder / files[0]).unlink(), (folder / files[0]).mkdir()],
        "files exchanged": lambda: _exchange(folder / files[0], folder / files[-1]),
        "an empty file": lambda: (folder / case.choice(files)).write_bytes(b""),
        "a link": link,
    }
    what = case.choice(changes)
    changes[what]()
    index.write_text(json.dumps(values))
    if case.random.random() < 0.08:
        index.write_bytes(case.choice([b"", b"[]", b"{", index.read_bytes()[:-9], b'{"a":' * 100_000]))
        what += ", no JSON"
    case.changed += f", index: {what}, {name}: {str(places.get(name) if isinstance(places, dict) else places)[:60]}"
    ignored = "transformers reads the map alone" if what in ("metadata", "a link") else None
    return loads_as_transformers(case, "llama_bf16_sharded", folder, ignored=ignored)


def _exchange(first: Path, second: Path) -> None:
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])


def change_safetensors(case: Case, path: Path) -> None:
    """Changes one thing in a file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    name = case.choice(names)
    entry, text = header[name], None
    what = case.choice(["offsets", "dtype", "shape", "name", "entry", "metadata", "length", "bytes", "file", "numbers"])
    detail: Any = ""
    if what == "offsets":
        side = int(case.random.integers(2))
        near = [entry["data_offsets"][side] + x for x in (-4, -1, 1, 4, 128)] + [header[names[0]]["data_offsets"][side]]
        detail = entry["data_offsets"][side] = case.choice(near + NUMBERS)
    elif what == "dtype":
        detail = entry["dtype"] = case.choice([code for code in CODES if code != entry["dtype"]])
        if detail in ("F16", "BF16", "I16") and entry["shape"]:
            entry["shape"] = [*entry["shape"][:-1], 2 * entry["shape"][-1]]
    elif what == "shape":
        shape = entry["shape"]
        wild = [shape[::-1], [*shape, 1], [1, *shape], [], shape[:-1], [0], [-n for n in shape], "x", None, 4, [[4]]]
        wild += [[shape[0], number] for number in NUMBERS] + [[1] * 40 + shape, [2**32, 2**32], [0, 2**62]]
        detail = entry["shape"] = case.choice([one for one in wild if one != shape])
    elif what == "name":
        detail = case.choice(["", name.upper(), name + ".x", "x", name[1:], "\u0000", "x" * 70_000, "lm_head.weight"])
        header = {(detail if key == name else key): value for key, value in header.items()}
    elif what == "entry":
        detail = case.choice([None, [], 4, "x", {}, {**entry, "more": 1}, {"dtype": "F32"}, entry, REMOVED])
        if detail is REMOVED:
            del header[name]
        elif detail is entry:  # two names of the same bytes
            header["x"] = dict(entry)
        else:
            header[name] = detail
    elif what == "metadata":
        detail = case.choice([None, [], 4, {"a": 1}, {"format": "tf"}, {"keras_tx.crc32": "{}"}, {"a": "x" * 70_000}])
        header["__metadata__"] = detail
    if what == "bytes":
        text = bytearray(json.dumps(header).encode())
        detail = position, byte = int(case.random.integers(len(text))), int(case.random.integers(256))
        text[position] = byte
    body = bytes(text) if text is not None else json.dumps(header).encode()
    count = len(body)
    if what == "length":
        detail = count = case.choice([0, 1, count - 1, count + 1, count + 8, 2**31, 2**40, 2**63, 2**64 - 1, len(data)])
    data = struct.pack("<Q", count) + body + rest
    if what == "file":
        detail, data = case.choice(
            [
                ("empty", b""),
                ("short", data[: int(case.random.integers(len(data)))]),
                ("long", data + b"\0" * 9),
                ("LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"),
                ("pickle", b"\x80\x04\x95" + data),
                ("zip", b"PK\x03\x04" + data),
                ("deep", struct.pack("<Q", 600_000) + b'{"a":' * 120_000 + rest),
                ("twice", struct.pack("<Q", 2 * count - 1) + body[:-1] + b"," + body[1:] + rest),
                ("spaces", struct.pack("<Q", count + 1) + b" " + body + rest),
                ("spaces behind", struct.pack("<Q", count + 3) + body + b"   " + rest),
            ]
        )
    if what == "numbers":
        data, detail = _other_numbers(case, bytearray(data), 8 + count, entry)
    path.write_bytes(data)
    case.changed += f", {path.name}: {what} of {name}: {str(detail)[:80]}"


REMOVED: Any = object()


def _other_numbers(case: Case, data: bytearray, start: int, entry: dict[str, Any]) -> tuple[bytes, str]:
    """Numbers that are not finite, or a flipped bit."""
    begin, end = entry["data_offsets"]
    width = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8}[entry["dtype"]]
    place = start + begin + width * int(case.random.integers((end - begin) // width))
    if case.random.random() < 0.5 and width in (2, 4):
        bits, what = case.choice([(0x7FC00000, "NaN"), (0x7F800000, "inf"), (0xFF800000, "-inf"), (0x7F7FFFFF, "3e38")])
        data[place : place + width] = struct.pack("<I", bits)[-width:]  # bfloat16 is the upper half of float32
        return bytes(data), what
    place += int(case.random.integers(width))
    data[place] ^= 1 << int(case.random.integers(8))
    return bytes(data), "a bit"


# tf_model.h5


def hdf5(case: Case) -> Outcome:
    """A changed tf_model.h5. transformers 5 cannot read it; its outputs must be those of the unchanged file."""
    name = "distilbert_cls_tf_h5"
    folder = copied(case, name)
    path = folder / "tf_model.h5"
    if case.random.random() < 0.3:
        _change_bytes(case, path)
        return _unchanged_or_finite(case, name, folder)
    with h5py.File(path, "r+") as file:
        keys: list[str] = []
        file.visititems(lambda key, value: keys.append(key) if isinstance(value, h5py.Dataset) else None)
        key = case.choice(keys)
        array, group, last = file[key][()], file[key].parent, key.split("/")[-1]
        change = case.choice(H5_CHANGES)
        H5_CHANGES[change](case, file, group, last, array)
    case.changed += f", {path.name}: {change} at {key}"
    return loads_as_transformers(case, name, folder, compared=False)


def _unchanged_or_finite(case: Case, name: str, folder: Path) -> Outcome:
    outcome = loads_as_transformers(case, name, folder, compared=False)
    if outcome.told == "loads with other outputs":  # HDF5 has no checksums: a changed number is not seen
        return Outcome("right", "a changed number, which the format cannot show")
    return outcome


def _change_bytes(case: Case, path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = int(case.random.integers(len(data)))
    kind = case.choice(["short", "empty", "byte", "byte at the start", "zeros", "text"])
    if kind == "short":
        data = data[:middle]
    elif kind == "empty":
        data = bytearray()
    elif kind == "byte":
        data[middle] ^= 1 + int(case.random.integers(255))
    elif kind == "byte at the start":
        data[middle % 2048] ^= 1 + int(case.random.integers(255))
    elif kind == "zeros":
        data[middle : middle + 512] = bytes(len(data[middle : middle + 512]))
    else:
        data = bytearray(b"version https://git-lfs.github.com/spec/v1\n")
    path.write_bytes(data)
    case.changed += f", {path.name}: {kind} at {middle}"


def _replaced(group: Any, last: str, **options: Any) -> None:
    del group[last]
    group.create_dataset(last, **options)


def _soft(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    del group[last]
    group[last] = h5py.SoftLink("/")


def _external(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    del group[last]
    group[last] = h5py.ExternalLink("/etc/passwd", "/")


def _again(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    group["again"] = group[last]


def _loop(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    group["loop"] = file["/"]


def _virtual(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    layout = h5py.VirtualLayout(shape=array.shape, dtype=array.dtype)
    layout[...] = h5py.VirtualSource("elsewhere.h5", "x", shape=array.shape)
    del group[last]
    group.create_virtual_dataset(last, layout)


def _unwritten(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    _replaced(group, last, shape=array.shape, dtype="float32", chunks=True)


def _huge(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    _replaced(group, last, shape=(10**6, 10**6), dtype="float32", chunks=(1000, 1000))


def _bomb(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    _replaced(group, last, shape=(10**5, 10**4), dtype="float32", chunks=(1000, 1000), compression="gzip")
    group[last][:1000, :1000] = 0


def _compressed(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    chunks = array.shape
    _replaced(group, last, data=array, compression="gzip", chunks=chunks)


def _outside(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
    _replaced(group, last, shape=array.shape, dtype="float32", external=[("/etc/passwd", 0, array.nbytes)])


def _of(dtype: Any):
    return lambda case, file, group, last, array: _replaced(group, last, data=array.astype(dtype))


def _filled(number: float):
    def change(case: Case, file: Any, group: Any, last: str, array: np.ndarray) -> None:
        array.flat[int(case.random.integers(array.size))] = number
        group[last][...] = array

    return change


H5_CHANGES = {
    "a soft link": _soft,
    "an external link": _external,
    "a second name": _again,
    "a loop": _loop,
    "a virtual array": _virtual,
    "nothing written": _unwritten,
    "a huge shape": _huge,
    "a compressed bomb": _bomb,
    "a compressed array": _compressed,
    "bytes of another file": _outside,
    "float64": _of("float64"),
    "float16": _of("float16"),
    "int32": _of("int32"),
    "bool": _of("bool"),
    "complex": _of("complex64"),
    "strings": lambda case, file, group, last, array: _replaced(group, last, data=["x"] * 3),
    "a structure": _of([("a", "f4"), ("b", "i4")]),
    "big-endian": _of(">f4"),
    "NaN": _filled(np.nan),
    "infinity": _filled(np.inf),
    "no array": lambda case, file, group, last, array: group.pop(last),
    "a group": lambda case, file, group, last, array: [group.pop(last), group.create_group(last)],
    "another name": lambda case, file, group, last, array: group.move(last, "x:0"),
    "another shape": lambda case, file, group, last, array: _replaced(group, last, data=array.reshape(-1)),
    "more axes": lambda case, file, group, last, array: _replaced(group, last, data=array.reshape(1, 1, *array.shape)),
    "a scalar": lambda case, file, group, last, array: _replaced(group, last, data=1.0),
    "no shape": lambda case, file, group, last, array: _replaced(group, last, data=h5py.Empty("f4")),
    "an empty array": lambda case, file, group, last, array: _replaced(group, last, data=array[:0]),
    "one more": lambda case, file, group, last, array: group.create_dataset("more", data=array),
}

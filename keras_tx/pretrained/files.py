"""Reads and writes files of weights, one tensor at a time.

Readable are `model.safetensors`, whole or in shards, and `tf_model.h5`; pickles are never loaded. Files are read with
`seek` and `read` instead of being mapped into memory, so that at most one tensor is in memory. The header is checked
completely before the first tensor is read (headers.py).

The safetensors format has no checksums, so damaged values in files of other programs go unnoticed. Files written here
store a checksum for each tensor, over its name, dtype, shape and values, which is verified when the tensor is read.
"""

import hashlib
import io
import json
import math
import re
import shlex
import zlib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import checks, json_text
from keras_tx.pretrained import h5, headers
from keras_tx.pretrained.snapshot import OpenFile, Snapshot, consistent
from keras_tx.replace import replacing

SINGLE, INDEX, TENSORFLOW = "model.safetensors", "model.safetensors.index.json", "tf_model.h5"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OURS = re.compile(r"model(-[0-9a-f]{8})?(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_CHUNK = 2**24


class Tensors:
    """Tensors in files, by name. `read`, `read_block` and `pieces` read; the other methods only use the headers.

    Dtypes are NumPy's and `ml_dtypes.bfloat16`. An unknown name raises KeyError. The files are open until `close`, or
    until the object is deleted, so that saving into their folder does not change what is read.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries: dict[str, _Tensor | h5.Dataset] = dict(entries)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._entries[name].dtype

    def read(self, name: str) -> np.ndarray:
        return self._entries[name].read()

    def read_block(self, name: str, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """Reads a part of a tensor: (begin, end) for each axis. Other bytes of safetensors files are not read.

        A checksum in the file is not verified, because it is that of the whole tensor.
        """
        return self._entries[name].read_block(ranges)

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yields the bytes of a tensor, a piece of bounded size at a time from safetensors files."""
        return self._entries[name].pieces()

    def check_unchanged(self) -> None:
        """Raises ValueError if another program wrote into a file since it was opened."""
        for file in self._files():
            file.check_unchanged()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files():
            file.close()

    def _files(self) -> list[OpenFile]:
        return list({id(entry.file): entry.file for entry in self._entries.values()}.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def open_tensors(path: str | Path) -> Tensors:
    """The tensors of a checkpoint.

    Args:
        path: a file of weights; or a directory with `model.safetensors`, or `model.safetensors.index.json` and its
            shards, or `tf_model.h5`, tried in this order.

    Raises:
        ValueError: the path has no weights, or only pickled ones; a file is damaged or its header is wrong; or an index
            names files that are missing or in other folders, or does not match the tensors of its shards.
        OSError: the files change during each of several attempts to open them.
    """
    path = Path(path)
    if path.is_file():
        return consistent(path.parent, lambda snapshot: _open(snapshot, path.name))
    return consistent(path, tensors_in)


def tensors_in(snapshot: Snapshot) -> Tensors:
    """`open_tensors` for the files of a snapshot of a directory."""
    for name in (SINGLE, INDEX, TENSORFLOW):
        if name in snapshot:
            return _open(snapshot, name)
    path = snapshot.folder
    held = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    for name in held:
        if name.startswith("pytorch_model") and (name.endswith(PICKLES) or name.endswith(".index.json")):
            return _open(snapshot, name)
    listed = f"a directory with {held}" if path.is_dir() else "no directory"
    raise ValueError(f"`path` must have one of {[SINGLE, INDEX, TENSORFLOW]}. Received: path={str(path)!r}, {listed}")


def _open(snapshot: Snapshot, name: str) -> Tensors:
    path = snapshot.folder / name
    if name.endswith(PICKLES) or name.startswith("pytorch_model"):
        raise pickled(path.parent, path)
    if path.suffix == ".h5":
        return Tensors(h5.datasets(snapshot.open(name)))
    if path.suffix == ".json":
        return Tensors(_shards(snapshot, name))
    if path.suffix == ".safetensors":
        return Tensors(_tensors(snapshot.open(name)))
    raise ValueError(f"`path` must end with .safetensors, .index.json or .h5. Received: path={str(path)!r}")


def pickled(directory: str | Path, file: str | Path) -> ValueError:
    """The error for a checkpoint (a directory, or a model id of the hub) whose weights are pickled."""
    return ValueError(
        "`path` must have weights in safetensors: a pickle can run any code while it is loaded. If you trust it, "
        f"convert it once with transformers and torch: {remedy(directory)}. Received: path={str(file)!r}"
    )


def remedy(directory: str | Path) -> str:
    """The command that converts a checkpoint with pickled weights to `model.safetensors`."""
    code = "c = t.AutoConfig.from_pretrained(d); getattr(t, c.architectures[0]).from_pretrained(d).save_pretrained(d)"
    path = json.dumps(str(directory), ensure_ascii=False)  # in double quotes, as the shell's are single ones
    return shlex.join(["python", "-c", f"import transformers as t; d = {path}; {code}"])


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a safetensors file."""

    file: OpenFile
    name: str
    entry: headers.Entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def dtype(self) -> np.dtype:
        return self.entry.dtype

    def read(self) -> np.ndarray:
        data = aligned(self.entry.size)
        self._fill(data, self.file.stream(), 0)
        array = data.view(self.dtype).reshape(self.shape)
        self._verify(_checksum(self.name, array))
        return array

    def read_block(self, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        sizes = [end - begin for begin, end in ranges]
        data, stream = aligned(self.dtype.itemsize * math.prod(sizes)), self.file.stream()
        if data.size:
            starts, size = _runs(self.shape, ranges)
            size *= self.dtype.itemsize
            for number, start in enumerate(starts.tolist()):
                self._fill(data[number * size : (number + 1) * size], stream, start * self.dtype.itemsize)
        return data.view(self.dtype).reshape(sizes)

    def pieces(self) -> Iterator[np.ndarray]:
        stream, found = self.file.stream(), _checksum_of_kind(self.name, self.dtype, self.shape)
        for begin in range(0, self.entry.size, _CHUNK):
            data = aligned(min(_CHUNK, self.entry.size - begin))
            self._fill(data, stream, begin)
            found = zlib.crc32(data.data, found)
            yield data
        self._verify(f"{found:08x}")

    def _fill(self, data: np.ndarray, stream: io.FileIO, begin: int) -> None:
        """Reads the bytes of the tensor from the byte `begin` of it on."""
        buffer, count = memoryview(data.data), 0
        stream.seek(self.entry.begin + begin)
        while count < data.size and (more := stream.readinto(buffer[count:])):
            count += more
        if count < data.size:
            raise ValueError(
                f"{self.file.path} must not change while it is read. Received: {count} of {data.size} bytes of "
                f"{self.name!r}"
            )

    def _verify(self, found: str) -> None:
        if self.entry.checksum is not None and found != self.entry.checksum:
            raise ValueError(
                f"The tensor {self.name!r} of {self.file.path} must have the checksum that the file gives, "
                f"{self.entry.checksum}. Received: {found}; the file is damaged"
            )


def _runs(shape: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, int]:
    """The first numbers of the longest runs that a block of a tensor consists of, and the length of each run."""
    last = max((axis for axis, size in enumerate(shape) if ranges[axis] != (0, size)), default=-1)  # all after it whole
    run = math.prod(end - begin for begin, end in ranges[max(last, 0) :])
    starts = np.zeros(1, "int64")
    for axis in range(last + 1):
        begin, end = ranges[axis]
        steps = np.arange(begin, begin + 1 if axis == last else end) * math.prod(shape[axis + 1 :])
        starts = (starts[:, None] + steps).reshape(-1)
    return starts, run


def aligned(size: int) -> np.ndarray:
    """Uninitialized bytes at an address that is a multiple of 64. TensorFlow and JAX need not copy such an array."""
    data = np.empty(size + 63, "uint8")
    begin = -data.ctypes.data % 64
    return data[begin : begin + size]


def _tensors(file: OpenFile) -> dict[str, Any]:
    entries = headers.parse(file.path, file.size, io.BufferedReader(file.stream()).read)
    return {name: _Tensor(file, name, entry) for name, entry in entries.items()}


def _shards(snapshot: Snapshot, name: str) -> dict[str, Any]:
    """The tensors of all shards that an index names."""
    index = snapshot.folder / name
    weight_map = headers.read_object(f"The index {index}", snapshot.open(name)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"The index {index} must have a `weight_map`. Received: {type(weight_map).__name__}")
    found = {}
    for shard in dict.fromkeys(map(str, weight_map.values())):
        if not re.fullmatch(r"[\w.-]+\.safetensors", shard) or shard not in snapshot:
            raise ValueError(
                f"The index {index} must name .safetensors files in its own folder. Received: {shard!r:.200}"
            )
        held = _tensors(snapshot.open(shard))
        named = {name for name, file in weight_map.items() if file == shard}
        if held.keys() != named:
            name = sorted(held.keys() ^ named)[0]
            has, lacks = ("index", "shard") if name in named else ("shard", "index")
            raise ValueError(
                f"The index {index} must list the tensors of {shard!r}. Received: {name!r:.200}, which the {has} has "
                f"and the {lacks} has not"
            )
        found.update(held)
    return {name: found[name] for name in weight_map}


def write_tensors(
    directory: str | Path, tensors: Iterable[tuple[str, np.ndarray]], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Writes `model.safetensors`, or shards and `model.safetensors.index.json`, and replaces such files.

    If `tensors` is a generator, at most one tensor is in memory. Existing files are replaced only after everything has
    been written, all at one moment; if a tensor is not valid, no file is changed.

    Args:
        directory: the directory, which is created if needed.
        tensors: pairs of a name and an array. The memory order of the arrays does not matter.
        max_shard_bytes: the largest number of bytes of tensors in one file; a larger tensor gets its own file.

    Raises:
        ValueError: there are no tensors; a name is empty, duplicated or not a string; the format does not have a dtype;
            or `max_shard_bytes` is not positive.
    """
    checks.positive_int("max_shard_bytes", max_shard_bytes)
    with replacing(checks.local_path("directory", directory), is_of_weights) as folder:
        write_into(folder, tensors, max_shard_bytes)


def is_of_weights(name: str, new: Collection[str] = ()) -> bool:
    """Whether a file has the name of weights that `write_tensors` or transformers wrote."""
    return _OURS.fullmatch(name) is not None


def write_into(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], max_shard_bytes: int) -> None:
    """Writes the files of `write_tensors` into an empty folder.

    The names of shards contain a checksum of all of them: whoever has read the index of a checkpoint that is replaced
    does not find the shards of the next one under the same names.
    """
    shards, total = [_Shard(folder / "0")], 0
    weight_map: dict[str, int] = {}  # name: number of its shard, from 1
    for name, array in tensors:
        array = _checked(name, array, weight_map)
        if shards[-1].size and shards[-1].size + array.nbytes > max_shard_bytes:
            shards[-1].finish()
            shards.append(_Shard(folder / str(len(shards))))
        shards[-1].add(name, array)
        weight_map[name] = len(shards)
        total += array.nbytes
    if not weight_map:
        raise ValueError("`tensors` must have a pair of a name and an array. Received: none")
    shards[-1].finish()
    count, names = len(shards), [SINGLE]
    if count > 1:
        digest = hashlib.blake2b(b"".join(shard.header for shard in shards), digest_size=4).hexdigest()
        names = [f"model-{digest}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        places = {name: names[shard - 1] for name, shard in sorted(weight_map.items())}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json_text.of_file(index), encoding="utf-8")
    for name, shard in zip(names, shards, strict=True):
        shard.path.rename(folder / name)


def _checked(name: Any, array: Any, taken: Container[str]) -> np.ndarray:
    """Returns the array in C order, or raises."""
    if not isinstance(name, str) or name in ("", "__metadata__") or name in taken:
        raise ValueError(f"The names of `tensors` must be strings, each once. Received: {name!r}")
    found: np.ndarray = np.asarray(array, order="C")  # a transposed array is stored by its own axes
    if found.dtype not in headers.CODES:
        raise ValueError(f"`tensors` must have a dtype of {list(headers.DTYPES)}. Received: {found.dtype} in {name!r}")
    return found


class _Shard:
    """A file that is being written: first the tensors, then, when all are known, the header in front of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.header = path, 0, b""
        self._data = path.with_suffix(".data")
        self._tensors: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}  # (dtype, shape, first byte)
        self._checksums: dict[str, str] = {}

    def add(self, name: str, array: np.ndarray) -> None:
        self._tensors[name] = (array.dtype, array.shape, self.size)
        self._checksums[name] = _checksum(name, array)
        with open(self._data, "ab") as file:
            file.write(_bytes(array))
        self.size += array.nbytes

    def finish(self) -> None:
        # Wide dtypes first, so that the address of every number is a multiple of its size, as readers expect.
        order = sorted(self._tensors, key=lambda name: -self._tensors[name][0].itemsize)
        arrays = {name: self._tensors[name][:2] for name in order}
        self.header = headers.make(arrays, {name: self._checksums[name] for name in order})
        with open(self.path, "wb") as file, open(self._data, "rb") as data:
            file.write(self.header)
            for name in order:
                dtype, shape, begin = self._tensors[name]
                data.seek(begin)
                left = headers.Entry(dtype, shape, begin).size
                while left:
                    left -= file.write(data.read(min(left, _CHUNK)))
        self._data.unlink()


def _checksum(name: str, array: np.ndarray) -> str:
    return f"{zlib.crc32(_bytes(array), _checksum_of_kind(name, array.dtype, array.shape)):08x}"


def _checksum_of_kind(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return zlib.crc32(f"{name} {headers.CODES[dtype]} {list(shape)}".encode())


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view("uint8").data

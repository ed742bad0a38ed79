"""Reads and writes the header of a safetensors file: names, dtypes, shapes and offsets, all of them checked.

A file consists of the length of the header (8 bytes, little endian), the header (JSON), and the tensors, one directly
after the other. Headers are untrusted input, so everything in them is checked:
github.com/huggingface/safetensors#format.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from keras_tx import json_text
from keras_tx.pretrained.snapshot import OpenFile

DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LONGEST = 100_000_000  # bytes of a header, the limit of the safetensors library, or of a JSON file
CHECKSUMS = "keras_tx.crc32"  # the metadata key under which `write_tensors` stores checksums
_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}
_MOST_AXES = 32


@dataclass(frozen=True)
class Entry:
    """The header's description of one tensor. `begin` is the offset of its first byte in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    checksum: str | None = None

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


def parse(path: str | Path, size: int, read: Callable[[int], bytes]) -> dict[str, Entry]:
    """Reads the header of the file `path` of `size` bytes: {name: Entry}. `read(n)` returns the next n bytes.

    Raises:
        ValueError: the header is longer than the file or than 100 MB, is not a JSON object in UTF-8, names a tensor
            twice, has an impossible dtype, shape or offset, or assigns bytes of the file to no tensor or to two.
    """
    start = read(8)
    if start.startswith(b"version "):
        raise ValueError(
            f"The file {path} must be safetensors, fetch it by `git lfs pull`. Received: a Git LFS pointer"
        )
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, LONGEST):
        raise ValueError(
            f"The file {path} must begin with the length of its header, at most {LONGEST} and inside the file. "
            f"Received: length {length}, {size} bytes in the file"
        )
    data = read(length)
    header = json_object(f"The header of {path}", data)
    if not data.startswith(b"{"):  # the format allows no space before it
        raise ValueError(f"The header of {path} must be a JSON object in UTF-8. Received: {_short(data.decode())}")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"`{_METADATA}` of {path} must be an object of strings. Received: {_short(metadata)}")
    checksums = _checksums(path, metadata, header)
    entries = {}
    for name, values in header.items():
        entry = _entry(path, name, values, 8 + length)
        entries[name] = entry if checksums is None else Entry(entry.dtype, entry.shape, entry.begin, checksums[name])
    _check_covers(path, entries, 8 + length, size)
    return entries


def make(arrays: dict[str, tuple[np.dtype, tuple[int, ...]]], checksums: dict[str, str]) -> bytes:
    """Returns the first bytes of a file: the length of the header, and the header.

    Args:
        arrays: {name: (dtype, shape)}, in the order in which they are stored.
        checksums: {name: str}.
    """
    metadata = {
        "format": "pt",
        CHECKSUMS: json.dumps(checksums, ensure_ascii=False),
    }  # older versions of transformers require "pt"
    header: dict[str, dict[str, Any]] = {_METADATA: metadata}
    end = 0
    for name, (dtype, shape) in arrays.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    data = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # aligns the tensors
    return len(data).to_bytes(8, "little") + data


def read_object(what: str, file: OpenFile) -> dict[str, Any]:
    """Reads a file with a JSON object. `what` is the beginning of the error message.

    Raises:
        ValueError: the file has more than 100 MB, or `json_object` cannot parse it.
    """
    if file.size > LONGEST:
        raise ValueError(f"{what} must have at most {LONGEST} bytes. Received: {file.size} bytes")
    return json_object(what, file.stream().readall())


def json_object(what: str, data: bytes) -> dict[str, Any]:
    """Parses bytes as a JSON object. `what` is the beginning of the error message.

    Raises:
        ValueError: the bytes are not a JSON object in UTF-8, a key appears twice, a number is not finite, or values are
            nested too deep.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counted = dict(pairs)
        if len(counted) < len(pairs):
            twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ValueError(f"the key {twice!r:.200} twice")
        return counted

    try:
        text = data.decode("utf-8")
        value = json_text.parse(text, object_pairs_hook=unique, finite=True)
        if "\\u" in text:  # Python accepts half a surrogate pair as a string; UTF-8 cannot encode it
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"{what} must be a JSON object in UTF-8. Received: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object in UTF-8. Received: {_short(text)}")
    return value


def _checksums(path: str | Path, metadata: dict[str, str], header: dict[str, Any]) -> dict[str, str] | None:
    """The checksums that `write_tensors` stored, {name: str}; None in files written by other programs."""
    if CHECKSUMS not in metadata:
        return None
    checksums = json_object(f"`{CHECKSUMS}` of {path}", metadata[CHECKSUMS].encode())
    if checksums.keys() != header.keys():
        different = sorted(checksums.keys() ^ header.keys())[0]
        raise ValueError(
            f"`{CHECKSUMS}` of {path} must name the tensors of the file. Received: {different!r:.200} in one"
        )
    return checksums


def _entry(path: str | Path, name: str, values: Any, start: int) -> Entry:
    what = f"The tensor {name!r:.200} of {path}"
    if not isinstance(values, dict) or values.keys() != _KEYS:
        raise ValueError(f"{what} must be described by {sorted(_KEYS)}. Received: {_short(values)}")
    code, shape, offsets = values["dtype"], values["shape"], values["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{what} must have a dtype of {list(DTYPES)}. Received: {_short(code)}")
    # Sizes that NumPy cannot represent are refused even if another axis is 0.
    fits = _are_sizes(shape) and len(shape) <= _MOST_AXES and math.prod(max(n, 1) for n in shape) < 2**48
    if not fits:
        raise ValueError(f"{what} must have a shape of non-negative integers. Received: {_short(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{what} must have two `data_offsets`. Received: {_short(offsets)}")
    entry = Entry(DTYPES[code], tuple(shape), start + offsets[0])
    if offsets[1] - offsets[0] != entry.size:
        raise ValueError(
            f"{what} must have as many bytes as its shape and dtype ask for, {entry.size}. Received: "
            f"data_offsets={offsets}, shape={shape}, dtype={code}"
        )
    return entry


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_covers(path: str | Path, entries: dict[str, Entry], start: int, size: int) -> None:
    """Raises unless the tensors follow each other without gaps from `start` to the end of the file."""
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].size)):
        if entry.begin != end:
            raise ValueError(
                f"The tensors of {path} must lie one directly after the other. Received: {name!r} at byte "
                f"{entry.begin}, the one before ends at {end}"
            )
        end += entry.size
    if end != size:
        raise ValueError(f"The file {path} must end with its last tensor, at {end}. Received: {size} bytes")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."

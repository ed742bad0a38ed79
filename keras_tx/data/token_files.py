"""The folder of token ids that `write_tokens` writes and `read_tokens` reads.

    index.json                          what was written; it is there when all of it was
    blocks.bin                          a row of integers for each block: where it is and how many tokens it has
    shard-00000-of-00016.tfrecord ...   TFRecords of blocks; each is a `tf.train.Example` of some hundred documents
    unfinished.json                     instead of index.json: how far a write has come

In the Example of a block, the bytes "token_ids" are the ids of all its documents one after the other (unsigned
integers, 2 bytes if the vocabulary allows, else 4), and "token_ids/lengths" the number of tokens in each (4 bytes). Of
sentence pairs there are "source_ids" and "target_ids"; "labels" are the labels of texts (4 bytes).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import json_text
from keras_tx.text.base import Tokenizer

FORMAT = "keras_tx.data.write_tokens 1"
INDEX, UNFINISHED, BLOCKS = "index.json", "unfinished.json", "blocks.bin"
# The columns of a row of `BLOCKS`, before the number of tokens of each feature.
SHARD, OFFSET, SIZE, FINGERPRINT, DOCUMENTS, TOKENS = range(6)
# The keys of the JSON files that are read, with the types of their values.
KEYS: dict[str, type] = {"kind": str, "texts": str, "sizes": list}
KEYS |= dict.fromkeys(("features", "tokenizers", "padding_ids", "tokens", "longest"), dict)
KEYS |= dict.fromkeys(("num_shards", "rows", "documents", "left_out", "count", "blocks"), int)
FEATURES = {"text": ("token_ids",), "labels": ("token_ids",), "pairs": ("source_ids", "target_ids")}  # by kind


def shard_name(shard: int, num_shards: int) -> str:
    """The file of a shard."""
    return f"shard-{shard:05d}-of-{num_shards:05d}.tfrecord"


def fingerprint(tokenizer: Tokenizer) -> str:
    """A checksum of all that decides which ids a tokenizer gives."""
    config = json.dumps([type(tokenizer).__name__, tokenizer.get_config()], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(config.encode()).hexdigest()


def tokenizers_of(tokenizer: Any, features: tuple[str, ...]) -> dict[str, Tokenizer]:
    """The tokenizer of each feature: of targets the second of two, or the attribute `target`, as Marian's has it."""
    both = tokenizer if isinstance(tokenizer, (tuple, list)) else (tokenizer, getattr(tokenizer, "target", tokenizer))
    if len(both) != 2 or not all(isinstance(one, Tokenizer) for one in both):
        raise TypeError(
            f"`tokenizer` must be a keras_tx.text.Tokenizer, or two of them for pairs. Received: {tokenizer!r:.200}"
        )
    if len(features) == 1 and isinstance(tokenizer, (tuple, list)):
        raise ValueError(f"`tokenizer` must be one tokenizer unless the texts are pairs. Received: {len(both)}")
    return dict(zip(features, both, strict=False))


def read_index(directory: Any) -> dict[str, Any]:
    """The content of index.json, after a check that all files are there and whole.

    Raises:
        FileNotFoundError: there is no such folder. ValueError: it holds something else, an unfinished write, or shards
            that are not those of the index.
    """
    folder = Path(directory)
    received = f"Received: directory={str(directory)!r}"
    if not folder.is_dir():
        raise FileNotFoundError(f"`directory` must be a folder that `write_tokens` wrote. {received}")
    if not (folder / INDEX).is_file():
        if (folder / UNFINISHED).is_file():
            raise ValueError(
                "`directory` must hold a finished write. Call `write_tokens` with the same arguments again: it goes on "
                f"where it was. {received}, which has {UNFINISHED}"
            )
        names = sorted(path.name for path in folder.iterdir())[:9]
        raise ValueError(f"`directory` must contain {INDEX}, as `write_tokens` writes it. {received} with {names}")
    index = read_json(folder / INDEX)
    sizes = index["sizes"]
    expected = {shard_name(shard, len(sizes)): size for shard, size in enumerate(sizes)} | {BLOCKS: index["blocks"]}
    there = {path.name: path.stat().st_size for path in folder.iterdir() if path.name.startswith("shard-")}
    if set(there) != set(expected) - {BLOCKS}:
        wrong = sorted(set(there) ^ (set(expected) - {BLOCKS}))[:3]
        raise ValueError(
            f"`directory` must contain the {len(sizes)} shards of its index and no others. {received} with "
            f"{len(there)} shards; missing or too many: {wrong}"
        )
    there[BLOCKS] = (folder / BLOCKS).stat().st_size if (folder / BLOCKS).is_file() else 0
    for name, size in expected.items():
        if there[name] != size:
            raise ValueError(
                f"Every file in `directory` must be whole; write the tokens again. {received}, {name} with "
                f"{there[name]:,} bytes instead of {size:,}"
            )
    return index


def read_json(path: Path) -> dict[str, Any]:
    """The content of one of the two JSON files."""
    try:
        found = json_text.parse(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"`format` is not {FORMAT!r}")
        for name, kind in (KEYS | ({"blocks_sha256": str} if path.name == INDEX else {})).items():
            if not isinstance(found.get(name), kind):
                raise ValueError(f"`{name}` is missing or of another type")
        if "index_sha256" in found and found["index_sha256"] != checksum(found):  # earlier versions wrote none
            raise ValueError("its checksum differs")
        return found
    except ValueError as error:
        raise ValueError(
            f"The file must be one that `write_tokens` wrote. Received: {str(path)!r} ({error})"
        ) from error


def checksum(index: dict[str, Any]) -> str:
    """The checksum of an index, itself left out."""
    content = {name: value for name, value in index.items() if name != "index_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_blocks(folder: Path, index: dict[str, Any]) -> np.ndarray:
    """The rows of blocks.bin, (blocks, columns)."""
    content = (folder / BLOCKS).read_bytes()
    if hashlib.sha256(content).hexdigest() != index["blocks_sha256"]:
        raise ValueError(
            f"Every file in `directory` must be as it was written; write the tokens again. Received: {BLOCKS} in "
            f"{str(folder)!r}, whose checksum differs"
        )
    return np.frombuffer(content, "<i8").reshape(-1, TOKENS + len(index["features"]))


def dtype_of(vocabulary_size: int) -> str:
    """The dtype of ids in the files."""
    return "uint16" if vocabulary_size <= 2**16 else "int32"

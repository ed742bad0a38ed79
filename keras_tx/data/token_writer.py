"""Tokenizes texts once, in several threads, and writes the ids to sharded TFRecords."""

import collections
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from keras_tx import checks, disk, progress
from keras_tx.data import token_files
from keras_tx.data.token_encoder import FRAMING, Encoder, Record, encode_block
from keras_tx.data.token_files import BLOCKS, INDEX, UNFINISHED
from keras_tx.data.token_rows import Block, Row, chained, rows_of
from keras_tx.data.token_rows import blocks as blocks_of

SECONDS = 5.0  # between two records of how far the write has come


def write_tokens(
    dataset: Any,
    tokenizer: Any,
    directory: str | os.PathLike[str],
    *,
    num_shards: int = 16,
    max_length: int | None = None,
    special_tokens: bool = True,
    num_threads: int | None = None,
    verbose: int = 1,
) -> dict[str, Any]:
    """Converts texts to token ids once, and writes them to files from which `read_tokens` reads batches.

    If it is interrupted at any moment, the same call goes on where it was, and the files are the same as without the
    interruption. For that the dataset must give the same texts in the same order, which is checked. A call for a folder
    that is finished reads the texts once, checks that they are those of the folder, and writes nothing.

    The memory does not grow with the size of the dataset: it must hold the longest single text, and 256 kB of text for
    each of at most 64 files.

    Args:
        dataset: a `tf.data.Dataset`, or an iterable, of texts, of pairs `(text, label)` with integer labels, or of
            pairs `(source, target)` of texts; for example those of `load_text`, `load_dataset` and
            `load_translation` with `in_memory=False`. Not batched.
        tokenizer: a `keras_tx.text.Tokenizer` with a padding token. For pairs of texts also two of them; a tokenizer
            with an attribute `target`, as `MarianTokenizer` has it, uses that for targets.
        directory: the folder to write. It must be empty, not exist, or hold what a call with the same arguments has
            written.
        num_shards: the number of files; a multiple of the number of workers that will read them. No file is empty if
            there are at least as many texts as files, with one exception: if there are more than 64 files, and more
            than about 16 MB of text or 500,000 texts, some can be empty.
        max_length: the largest number of tokens of a text, special tokens included, of which there must be fewer;
            longer texts are truncated at the end. None: no limit, also if the tokenizer has one.
        special_tokens: whether to put the special tokens of the tokenizer around every text, as `tokenizer(text)` does.
        num_threads: how many threads tokenize. None: as many as there are CPU cores.
        verbose: 1 shows a progress bar, 0 does not.

    Returns:
        What index.json says: "documents", "left_out" (texts without any token; only of a dataset of texts alone),
        "tokens" and "longest" by feature, and more.

    Raises:
        TypeError: `dataset` or `tokenizer` has another type, or an element of `dataset`.
        ValueError: an argument is not valid, `directory` holds something else, or the texts are not those of the
            earlier call.
        BlockingIOError: another process or thread writes to `directory`.

    Examples:
        >>> tokenizer = keras_tx.text.BytePairTokenizer.train(["a hot dog", "hot dogs"], 270)
        >>> texts = ["a hot dog", "", "hot dogs", "a dog"]
        >>> index = keras_tx.data.write_tokens(texts, tokenizer, "tokens", num_shards=2, verbose=0)
        >>> index["documents"], index["left_out"], index["tokens"]
        (3, 1, {'token_ids': 15})
        >>> for features, labels in keras_tx.data.read_tokens("tokens", batch_size=2, length=8, shuffle=False):
        ...     print(tokenizer.decode(features["token_ids"], skip_special_tokens=False))
        ['<s>a hot dog</s><s>hot', ' dogs</s><s>a dog</s><pad>']
    """
    num_shards = checks.positive_int("num_shards", num_shards, most=99_999)
    threads = checks.positive_int("num_threads", num_threads, none=True) or _cores()
    checks.boolean("special_tokens", special_tokens)
    progress.check_verbose(verbose)
    rows, kind = rows_of(dataset)
    encoders = {
        name: Encoder(one, special_tokens, max_length)
        for name, one in token_files.tokenizers_of(tokenizer, token_files.FEATURES[kind]).items()
    }
    settings = {
        "format": token_files.FORMAT,
        "kind": kind,
        "features": {name: encoder.dtype for name, encoder in encoders.items()},
        "tokenizers": {name: token_files.fingerprint(encoder.tokenizer) for name, encoder in encoders.items()},
        "padding_ids": {name: int(encoder.tokenizer.pad_id) for name, encoder in encoders.items()},
        "num_shards": num_shards,
        "max_length": checks.positive_int("max_length", max_length, none=True),
        "special_tokens": special_tokens,
    }
    folder = checks.local_path("directory", directory)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with disk.alone(folder):
            return _write(rows, encoders, folder, settings, threads, verbose)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno, f"`directory` must not be written by anyone else. Received: directory={str(directory)!r}"
        ) from error


def _write(
    rows: Iterator[Row],
    encoders: dict[str, Encoder],
    folder: Path,
    settings: dict[str, Any],
    threads: int,
    verbose: int,
) -> dict[str, Any]:
    state = _begin(folder, settings, list(encoders))
    parts = state.get("parts", 1)  # earlier versions, which do not say, never divided few texts
    blocks, bar = blocks_of(rows, parts), progress.bar("text", verbose)
    seen, texts = 0, ""
    while seen < state["rows"]:  # what an earlier call wrote
        block = next(blocks, None)
        if block is None:
            break
        seen, texts = seen + len(block.rows), chained(texts, block)
        bar.update(seen)
    if (seen, texts) != (state["rows"], state["texts"]) or (state["finished"] and next(blocks, None)):
        raise ValueError(
            "`dataset` must give the texts of the earlier call in the same order; other texts need another "
            f"`directory`. Received: other texts than the {state['rows']} that {str(folder)!r} holds"
        )
    if state["finished"]:
        bar.update(seen, finalize=True)
        return token_files.read_index(folder)
    with _Files(folder, state) as written, ThreadPoolExecutor(threads, "write_tokens") as pool:

        def start(block: Block) -> tuple[Block, Future[Record]]:
            return block, pool.submit(encode_block, block.rows, encoders, settings["kind"], folder)

        waiting: collections.deque[tuple[Block, Future[Record]]] = collections.deque()
        try:
            for block in chain(blocks, [None] * 2 * threads):
                waiting.extend([start(block)] if block else [])
                if waiting and (len(waiting) > 2 * threads or block is None):
                    done, record = waiting.popleft()
                    written.add(done, record.result())
                    bar.update(state["rows"])
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        written.commit()
    bar.update(state["rows"], finalize=True)
    return _finish(folder, settings, state)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(folder: Path, settings: dict[str, Any], features: list[str]) -> dict[str, Any]:
    """The state of an earlier call with the same settings, or that of a new one, which is written."""
    finished = (folder / INDEX).is_file()
    if finished or (folder / UNFINISHED).is_file():
        state = token_files.read_index(folder) if finished else token_files.read_json(folder / UNFINISHED)
        if finished:
            (folder / UNFINISHED).unlink(missing_ok=True)
        for name, value in settings.items():
            if state.get(name) != value:
                raise ValueError(
                    "`directory` must be empty, or hold what a call with the same arguments has written. "
                    f"Received: directory={str(folder)!r}, written with another {name.removesuffix('s')}: "
                    f"{state.get(name)!r:.150} instead of {value!r:.150}"
                )
        return state | {"finished": finished}
    for part in folder.glob("*.part"):
        part.unlink()
    names = sorted(path.name for path in folder.iterdir())
    if names:
        raise ValueError(f"`directory` must be empty or not exist. Received: {str(folder)!r} with {names[:9]}")
    zeros = dict.fromkeys(features, 0)
    state = {"rows": 0, "texts": "", "documents": 0, "left_out": 0, "tokens": zeros, "longest": dict(zeros)}
    state |= {"count": 0, "blocks": 0, "sizes": [0] * settings["num_shards"], "parts": settings["num_shards"]}
    disk.replace(folder / UNFINISHED, json.dumps(settings | state).encode())
    return settings | state | {"finished": False}


def _finish(folder: Path, settings: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    if not state["documents"]:
        raise ValueError("`dataset` must hold at least one text with a token. Received: none of " + str(state["rows"]))
    state["blocks_sha256"] = hashlib.sha256((folder / BLOCKS).read_bytes()).hexdigest()
    index = {name: value for name, value in (settings | state).items() if name != "finished"}
    index["index_sha256"] = token_files.checksum(index)
    disk.replace(folder / INDEX, json.dumps(index, indent=1).encode())
    (folder / UNFINISHED).unlink()
    return index


class _Files:
    """The shards and `BLOCKS`, to which records are appended."""

    def __init__(self, folder: Path, state: dict[str, Any]):
        self.folder, self.state, self.committed = folder, state, monotonic()
        for part in folder.glob("*.part"):
            part.unlink()
        names = [token_files.shard_name(shard, len(state["sizes"])) for shard in range(len(state["sizes"]))]
        for name, size in zip((*names, BLOCKS), (*state["sizes"], state["blocks"]), strict=True):
            path = folder / name
            if size and (not path.is_file() or path.stat().st_size < size):
                raise ValueError(
                    "Every file of an unfinished write must be whole; delete the folder. Received: "
                    f"{str(path)!r}, missing or shorter than {size:,} bytes"
                )
        self.shards = [self._open(name, size) for name, size in zip(names, state["sizes"], strict=True)]
        self.blocks = self._open(BLOCKS, state["blocks"])

    def _open(self, name: str, size: int) -> Any:
        """Opens a file at the size that was recorded; what a killed process wrote after it goes."""
        path = self.folder / name
        file = open(path, "r+b" if path.exists() else "w+b")
        file.truncate(size)
        file.seek(size)
        return file

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: Any) -> None:
        for file in (*self.shards, self.blocks):
            file.close()

    def add(self, block: Block, record: Record) -> None:
        state = self.state
        if record.framed:
            shard = state["count"] % len(self.shards)
            offset = state["sizes"][shard] + FRAMING[0]
            self.shards[shard].write(record.framed)
            place = [shard, offset, len(record.framed) - sum(FRAMING)]
            self.blocks.write(np.array(place + record.numbers, "<i8").tobytes())
            state["sizes"][shard] += len(record.framed)
            state["blocks"] += 8 * (len(place) + len(record.numbers))
            state["count"] += 1
            _, documents, *tokens = record.numbers
            state["documents"] += documents
            for name, count, longest in zip(state["tokens"], tokens, record.longest, strict=True):
                state["tokens"][name] += count
                state["longest"][name] = max(state["longest"][name], longest)
        state["left_out"] += record.left_out
        state["rows"] += len(block.rows)
        state["texts"] = chained(state["texts"], block)
        if monotonic() - self.committed > SECONDS:
            self.commit()

    def commit(self) -> None:
        """Records how far the write has come; the files hold all of it, after a loss of power too."""
        for file in (*self.shards, self.blocks):
            file.flush()
            os.fsync(file.fileno())
        state = {name: value for name, value in self.state.items() if name != "finished"}
        disk.replace(self.folder / UNFINISHED, json.dumps(state).encode())
        self.committed = monotonic()

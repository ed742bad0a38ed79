"""The texts of a dataset in blocks, each with a checksum: what `write_tokens` tokenizes and counts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

BLOCK_BYTES, BLOCK_ROWS = 2**18, 2**13  # a block ends when its texts reach one of these
HELD = 64  # blocks that wait for the end of few texts; another number would divide some texts differently
BATCH = 64  # texts that come from tf.data at a time

Row = tuple[Any, ...]


class Block(NamedTuple):
    """Texts that become one record, and a checksum of them."""

    rows: list[Row]
    checksum: bytes


def blocks(rows: Iterable[Row], parts: int) -> Iterator[Block]:
    """Blocks of texts; few texts are cut into `parts` of equal numbers, so that each file and worker gets its share.

    Few are those that would fill no more than `parts` blocks, and no more than `HELD`, since the threads wait for them.
    With more texts, where a block ends depends only on the texts since the last one.
    """
    full = _full_blocks(rows)
    most = min(parts, HELD)
    first = list(islice(full, most + 1))
    if len(first) <= most:
        texts = list(chain.from_iterable(first))
        count = min(parts, len(texts))
        first = [texts[len(texts) * i // count : len(texts) * (i + 1) // count] for i in range(count)]
    yield from map(_checked, first)
    first.clear()  # frees these texts while the generator goes on
    yield from map(_checked, full)


def _full_blocks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    block: list[Row] = []
    size = 0
    for row in rows:
        block.append(row)
        size += sum(len(text) for text in row if isinstance(text, bytes))
        if size >= BLOCK_BYTES or len(block) == BLOCK_ROWS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _checked(rows: list[Row]) -> Block:
    checksum = hashlib.sha256()
    for column in zip(*rows, strict=True):
        is_text = isinstance(column[0], bytes)
        checksum.update(np.array([len(text) for text in column] if is_text else column, "<i8").tobytes())
        checksum.update(b"".join(column) if is_text else b"")
    return Block(rows, checksum.digest())


def rows_of(dataset: Any) -> tuple[Iterator[Row], str]:
    """The texts, as bytes, and labels of a dataset; and what they are, one of `token_files.FEATURES`."""
    if isinstance(dataset, (str, bytes, dict)) or not isinstance(dataset, Iterable):
        raise TypeError(
            "`dataset` must be a tf.data.Dataset or an iterable of texts, of (text, label) or of (source, target). "
            f"Received: dataset={dataset!r:.200}"
        )
    items = _of_tensorflow(dataset) if isinstance(dataset, tf.data.Dataset) else iter(dataset)
    first = list(islice(items, 1))
    if not first:
        raise ValueError("`dataset` must hold at least one text with a token. Received: an empty dataset")
    to_row, kind = _reader(first[0])
    return (to_row(item) for item in chain(first, items)), kind


def _of_tensorflow(dataset: Any) -> Iterator[Any]:
    spec = dataset.element_spec
    for part in spec if isinstance(spec, tuple) else (spec,):
        if getattr(part, "shape", None) is None or part.shape.rank != 0:
            raise ValueError(f"`dataset` must have scalars as elements, unbatched. Received: {spec}")
    for batch in dataset.batch(BATCH).as_numpy_iterator():
        columns = [column.tolist() for column in (batch if isinstance(spec, tuple) else (batch,))]
        yield from zip(*columns, strict=True) if isinstance(spec, tuple) else columns[0]


def _reader(first: Any) -> tuple[Callable[[Any], Row], str]:
    """A function from an element to a row, and the kind of all elements."""
    kinds = tuple("text" if isinstance(x, (str, bytes)) else "label" for x in _parts(first))
    kind = {("text",): "text", ("text", "label"): "labels", ("text", "text"): "pairs"}.get(kinds, "")

    def to_row(item: Any) -> Row:
        parts = _parts(item)
        if not kind or len(parts) != len(kinds):
            raise TypeError(
                "`dataset` must have elements of one kind: texts, (text, label) or (source, target). Received: "
                f"{item!r:.200}"
            )
        return tuple(_text(x) if wanted == "text" else _label(x) for wanted, x in zip(kinds, parts, strict=True))

    to_row(first)
    return to_row, kind


def _parts(item: Any) -> tuple[Any, ...]:
    return tuple(item) if isinstance(item, (tuple, list)) else (item,)


def _text(text: Any) -> bytes:
    try:
        return text if isinstance(text, bytes) else str.encode(text)
    except (TypeError, UnicodeEncodeError) as error:
        raise TypeError(f"`dataset` must hold texts that UTF-8 can encode. Received: {text!r:.200}") from error


def _label(label: Any) -> int:
    if isinstance(label, bool) or not isinstance(label, Integral) or not -(2**31) <= int(label) < 2**31:
        raise TypeError(f"A label must be an integer. Received: {label!r:.200}")
    return int(label)


def chained(texts: str, block: Block) -> str:
    """A checksum of all texts so far."""
    return hashlib.sha256(texts.encode() + block.checksum).hexdigest()

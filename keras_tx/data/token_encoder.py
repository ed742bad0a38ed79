"""Blocks of texts -> TFRecords of token ids: what the threads of `write_tokens` do."""

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_tx import checks
from keras_tx.data import token_files
from keras_tx.data.token_rows import Row
from keras_tx.optional import Lazy
from keras_tx.text.base import Tokenizer
from keras_tx.text.json_tokenizer import PROBES
from keras_tx.text.library_tokenizer import LibraryTokenizer

tf = Lazy("tensorflow")

FRAMING = 12, 4  # bytes before and after the data of a TFRecord
UNLIMITED = 2**30  # tokens


class Record(NamedTuple):
    """A record, as it stands in the file, and its row in `BLOCKS` without the place in the file."""

    framed: bytes
    numbers: list[int]
    longest: list[int]
    left_out: int


class Encoder:
    """Texts -> ids with special tokens, truncated."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: bool, max_length: int | None):
        if tokenizer.pad_id is None:
            raise ValueError(
                "`tokenizer` must have a padding token, with which rows are filled up: its argument `pad_token`. "
                f"Received: special tokens {tokenizer.special_tokens}"
            )
        self.tokenizer = tokenizer
        self.dtype = token_files.dtype_of(tokenizer.vocabulary_size)
        frame = _frame(tokenizer)  # in this thread, so that what the tokenizer builds at its first call is built once
        self.before, self.after = frame if special_tokens else (np.zeros(0, "int32"),) * 2
        around = len(self.before) + len(self.after)
        self.most = checks.positive_int("max_length", max_length, none=True)
        if self.most is not None and self.most <= around:
            raise ValueError(
                f"`max_length` must be larger than the number of special tokens, {around}. Received: "
                f"max_length={max_length}"
            )

    def __call__(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Texts (N,) -> the ids of all, their numbers (N,), and how many of these are no special tokens (N,)."""
        values, lengths = _flat(self.tokenizer.tokenize(texts)) if texts else (np.zeros(0, "int32"),) * 2
        around = len(self.before) + len(self.after)
        kept = lengths if self.most is None else np.minimum(lengths, self.most - around)
        if kept.sum() < len(values):
            position = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            values = values[position < np.repeat(kept, lengths)]
        return _surrounded(values, kept, self.before, self.after), kept + around, kept


def _surrounded(values: Any, lengths: Any, before: Any, after: Any) -> Any:
    """Puts `before` and `after` around every row of `values`."""
    starts = np.cumsum(lengths + len(before) + len(after)) - lengths - len(after)  # of the texts
    out = np.empty(len(values) + len(lengths) * (len(before) + len(after)), values.dtype)
    is_text = np.ones(len(out), bool)
    stops = starts + lengths
    for places, tokens in ((starts - len(before), before), (stops, after)):
        for i, token in enumerate(tokens):
            out[places + i] = token
            is_text[places + i] = False
    out[is_text] = values
    return out


def _frame(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The special tokens that a tokenizer puts before and after a text."""
    for probe in PROBES:
        whole = np.asarray(tokenizer(probe, max_length=UNLIMITED)["token_ids"])
        text = np.asarray(tokenizer.tokenize(probe))
        if isinstance(tokenizer, LibraryTokenizer):  # a text of unknown tokens may look like its special tokens
            before, after = (np.array(part, "int32") for part in (tokenizer.template.before, tokenizer.template.after))
            if np.array_equal(whole, np.concatenate([before, text, after])):
                return before, after
            continue
        starts = range(len(whole) - len(text) + 1) if len(text) else ()
        found = [start for start in starts if np.array_equal(whole[start : start + len(text)], text)]
        if len(found) == 1:
            return whole[: found[0]], whole[found[0] + len(text) :]
    raise ValueError(
        "`special_tokens` must be False for a tokenizer whose rows do not contain what `tokenize` returns, once. "
        f"Received: {type(tokenizer).__name__} with {whole.tolist()} for {text.tolist()}"
    )


def _flat(rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ragged ids as (all ids, numbers of ids)."""
    if hasattr(rows, "flat_values"):
        return rows.flat_values.numpy(), rows.row_lengths().numpy()
    lengths = np.fromiter(map(len, rows), "int64", len(rows))
    return np.fromiter(chain.from_iterable(rows), "int32", int(lengths.sum())), lengths


def encode_block(rows: list[Row], encoders: dict[str, Encoder], kind: str, folder: Path) -> Record:
    """Tokenizes a block."""
    columns = list(zip(*rows, strict=True))
    features: dict[str, bytes] = {}
    tokens, longest, left_out = [], [], 0
    for (name, encode), texts in zip(encoders.items(), columns, strict=False):
        values, lengths, kept = encode(list(texts))
        if kind == "text" and not kept.all():
            values, lengths = values[np.repeat(kept > 0, lengths)], lengths[kept > 0]
            left_out = int(np.sum(kept == 0))
        features[name] = values.astype(f"<{np.dtype(encode.dtype).str[1:]}").tobytes()
        features[f"{name}/lengths"] = lengths.astype("<i4").tobytes()
        tokens.append(int(lengths.sum()))
        longest.append(int(lengths.max(initial=0)))
    documents = len(rows) - left_out
    if not documents:
        return Record(b"", [], [], left_out)
    if kind == "labels":
        features["labels"] = np.array(columns[1], "<i4").tobytes()
    feature = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[x])) for name, x in features.items()}
    data = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(deterministic=True)
    checksum = int(tf.fingerprint([data]).numpy().view("<i8")[0, 0])
    return Record(_framed(data, folder), [checksum, documents, *tokens], longest, left_out)


def _framed(data: bytes, folder: Path) -> bytes:
    """The bytes of a TFRecord; TensorFlow writes them only to files, and from the beginning."""
    path = folder / f"record-{id(data)}.part"
    try:
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(data)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)

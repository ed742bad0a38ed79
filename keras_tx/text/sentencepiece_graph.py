"""SentencePiece in TensorFlow ops: (B,) strings -> ragged (B, None) ids -> (B,) strings.

The op of tensorflow-text runs the C++ library. Its model is an attribute of the op in the graph: there is no resource
to track and no file beside an exported model. Kudo and Richardson 2018, arXiv:1808.06226.
"""

import hashlib
import json
from typing import Any

import numpy as np

from keras_tx.keras_internals import sentencepiece_tokenize
from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import (
    SPACES,
    STAND_IN,
    AddedTokens,
    StringIndex,
    begins,
    interleave,
    rows_of,
    segments_of,
)
from keras_tx.text.sentencepiece_model import BYTE_PIECES, SPACE, bpe_model, spacing, unigram_model

tf = Lazy("tensorflow")


class PieceGraph:
    """The graph form of a definition for which `unsupported_parts` is None.

    Args:
        parts: the content of a tokenizer.json.
        vocabulary: tokens in the order of their ids.
        normalizer: of the `tokenizers` library, or None.
        decode: rows of ids -> texts, by the same library.
    """

    def __init__(self, parts: dict[str, Any], vocabulary: list[str], normalizer: Any, decode: Any):
        self._unigram = parts["model"]["type"] == "Unigram"
        self._prefix, charsmap = spacing(parts) or ("", b"")  # there is one: `unsupported_parts` is None
        self._exact = AddedTokens([token for token in parts["added_tokens"] if not token["normalized"]])
        self._normal = AddedTokens([token for token in parts["added_tokens"] if token["normalized"]])
        if self._unigram:
            self._model = unigram_model(parts, charsmap)
            splits = "WhitespaceSplit" in json.dumps(parts["pre_tokenizer"])
            self._white = _white_space(normalizer) if splits else ""
        else:
            self._model, self._white = bpe_model(parts), ""
            self._zero = AddedTokens([{"content": STAND_IN, "id": parts["model"]["vocab"]["<0x00>"]}])
        self._first, self._next = _pieces(vocabulary, decode)
        self._raw = [bytes([BYTE_PIECES[token]]) if token in BYTE_PIECES else b"" for token in vocabulary]

    def encode(self, texts):
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._normal.split(*self._exact.split(*segments_of(texts)))
        if self._white:
            parts = tf.strings.regex_replace(parts, self._white, " ")
        if not self._unigram:
            parts, ids, owner = self._zero.split(self._spaced(parts, begins(owner)), ids, owner)
        values, owner = tokenize(self._model, parts, ids, owner)
        return rows_of(values, owner, tf.size(texts))

    def decode(self, ids):
        """Ragged ids (B, None) -> string tensor (B,)."""
        row = ids.value_rowids()
        first, rest = (tf.gather(tf.constant(pieces), ids.values) for pieces in (self._first, self._next))
        pieces = tf.where(begins(row), first, rest)
        if any(self._raw):
            # Bytes in a row are UTF-8 together, or each of them reads as U+FFFD.
            raw = tf.gather(tf.constant(self._raw), ids.values)
            is_byte = raw != ""
            run = tf.cumsum(tf.cast(begins(row) | begins(is_byte), "int32"))
            joined = tf.strings.unsorted_segment_join(raw, run, tf.size(run) + 1)
            good = tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace") == joined
            pieces = tf.where(is_byte & ~tf.gather(good, run), "\ufffd", pieces)
        return tf.strings.reduce_join(ids.with_values(pieces), axis=-1)

    def _spaced(self, texts, at_start):
        """What `Metaspace` and `Prepend` do: spaces become U+2581, and one stands before a text."""
        bare = texts != ""
        if self._prefix.startswith("metaspace"):
            bare &= ~tf.strings.regex_full_match(texts, f"(?s)[ {SPACE}].*")
        if self._prefix.endswith("first"):
            bare &= at_start
        texts = tf.strings.regex_replace(texts, " ", SPACE)
        return texts if self._prefix.endswith("never") else tf.where(bare, tf.strings.join([SPACE, texts]), texts)


class MarianGraph:
    """The graph form of Marian's tokenizer.

    Args:
        model: a SentencePiece model.
        vocabulary: tokens in the order of their ids.
        special_ids: of the tokens that text never splits.
        unknown_id: stands for pieces that are not in the vocabulary.
        decode: pieces -> text, by the `sentencepiece` library.
    """

    def __init__(self, model: bytes, vocabulary: list[str], special_ids: set[int], unknown_id: int, decode: Any):
        self._added = AddedTokens([{"content": vocabulary[i], "id": i} for i in special_ids])
        self._index = StringIndex({token: i for i, token in enumerate(vocabulary)})
        self._model, self._unknown_id = model, unknown_id
        anchor = len(decode(["a"]))
        first = [decode([token]).replace(SPACE, " ") for token in vocabulary]
        rest = [decode(["a", token])[anchor:].replace(SPACE, " ") for token in vocabulary]
        self._is_special = np.array([i in special_ids for i in range(len(vocabulary))])
        names = [f"{token} " if i in special_ids else None for i, token in enumerate(vocabulary)]
        self._first = [name or piece for name, piece in zip(names, first, strict=True)]
        self._next = [name or piece for name, piece in zip(names, rest, strict=True)]

    def encode(self, texts):
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._added.split(*segments_of(texts))
        # A part may begin with the code of a language, which is a token of its own.
        code = tf.strings.regex_full_match(parts, r"(?s)>>.*?<<.*") & (ids < 0)
        rest = tf.where(code, tf.strings.regex_replace(parts, r"(?s)\A>>.*?<<", ""), parts)
        code = tf.where(code, tf.strings.regex_replace(parts, r"(?s)\A(>>.*?<<).*\z", r"\1"), "")
        parts = tf.reshape(tf.stack([code, rest], axis=1), [-1])
        ids = tf.reshape(tf.stack([tf.where(code != "", self._find(code), -1), ids], axis=1), [-1])
        values, owner = tokenize(self._model, parts, ids, tf.repeat(owner, 2), self._find)
        return rows_of(values, owner, tf.size(texts))

    def decode(self, ids):
        """Ragged ids (B, None) -> string tensor (B,)."""
        first, row = tf.gather(tf.constant(self._first), ids.values), ids.value_rowids()
        special = tf.gather(self._is_special, ids.values)
        group = tf.cumsum(tf.cast(special | begins(row), "int32"))
        solid = tf.cumsum(tf.cast(~special & (first != ""), "int32"), exclusive=True)
        before = tf.math.unsorted_segment_min(solid, group, tf.size(row) + 1)
        at_start = solid == tf.gather(before, group)  # nothing but a space since the row or a special token began
        pieces = tf.where(at_start, first, tf.gather(tf.constant(self._next), ids.values))
        texts = tf.strings.reduce_join(ids.with_values(pieces), axis=-1)
        return tf.strings.regex_replace(texts, rf"\A[{SPACES}\x1C-\x1F]+|[{SPACES}\x1C-\x1F]+\z", "")

    def _find(self, pieces):
        found = self._index.find(pieces)
        return tf.where(found >= 0, found, self._unknown_id)


def tokenize(model: bytes, texts, ids, owner, find: Any = None):
    """The op over segments.

    Args:
        model: of SentencePiece.
        texts: string tensor (S,).
        ids: int32 (S,), the id of a special token, or -1 for text.
        owner: int64 (S,).
        find: pieces -> ids; None if the model's are the right ones.

    Returns:
        Ids (N,) and their owners.
    """
    kind = tf.int32 if find is None else tf.string
    # Named by its content, for ops of one name share one model, in a loaded SavedModel those of all functions.
    name = hashlib.sha256(model).hexdigest()
    values, splits = sentencepiece_tokenize(model, name, tf.where(ids >= 0, "", texts), kind)
    lengths = tf.cast(splits[1:] - splits[:-1], "int64")
    return interleave(ids, owner, values if find is None else find(values), lengths)


def _pieces(vocabulary: list[str], decode: Any) -> tuple[list[bytes], list[bytes]]:
    """What a token is at the beginning of a text, and what it adds after another."""
    size = range(len(vocabulary))
    anchor = next(i for i in size if vocabulary[i].removeprefix(SPACE).isalpha())
    start = decode([[anchor]])[0]
    first = [text.encode("utf-8") for text in decode([[i] for i in size])]
    rest = [text.removeprefix(start).encode("utf-8") for text in decode([[anchor, i] for i in size])]
    for i, token in enumerate(vocabulary):
        if token in BYTE_PIECES and BYTE_PIECES[token] > 127 and "\ufffd".encode() in rest[i]:
            first[i] = rest[i] = bytes([BYTE_PIECES[token]])
    return first, rest


def _white_space(normalizer: Any) -> str:
    """A pattern for the white space that the normalizer leaves, where texts are split as at spaces; "" for none."""
    white = [c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f"]
    kept = [c for c in white if normalizer.normalize_str(c) == c]
    return "[" + "".join(rf"\x{{{ord(c):X}}}" for c in kept) + "]" if kept else ""

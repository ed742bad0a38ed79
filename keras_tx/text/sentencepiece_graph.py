"""SentencePiece in TensorFlow ops: (B,) strings -> ragged (B, None) ids -> (B,) strings.

The op of tensorflow-text runs the C++ library. Its model is an attribute of the op in the graph, so there is no
resource to track and an exported model needs no other file. See `graph_ops` for segments and owners. Kudo and
Richardson 2018, arXiv:1808.06226.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_tx.internals.tensorflow_graphs import sentencepiece_tokenize
from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import (
    SPACES,
    AddedTokens,
    StringIndex,
    as_ragged_rows,
    as_segments,
    insert_added_ids,
    is_start,
)
from keras_tx.text.sentencepiece_model import BYTE_PIECES, SPACE, build_bpe_model, build_unigram_model, space_rule
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

DecodeRows = Callable[[list[list[int]]], list[str]]


class SentencePieceGraph:
    """Encodes and decodes in a graph. The definition must be one for which `unsupported_parts` returns None.

    Args:
        parts: the content of a tokenizer.json.
        added: those of its added tokens that are found in texts.
        vocabulary: the tokens in the order of their ids.
        normalizer: the normalizer of the `tokenizers` library, or None.
        decode: the same library's function from rows of ids to texts.
    """

    def __init__(
        self,
        parts: dict[str, Any],
        added: list[dict[str, Any]],
        vocabulary: list[str],
        normalizer: Any,
        decode: DecodeRows,
    ) -> None:
        self._unigram = parts["model"]["type"] == "Unigram"
        self._space_rule, charsmap = space_rule(parts) or ("", b"")  # it is not None: `unsupported_parts` checks it
        self._added = AddedTokens([token for token in added if not token["normalized"]])
        self._normalized_added = AddedTokens([token for token in added if token["normalized"]])
        if self._unigram:
            self._model = build_unigram_model(parts, charsmap)
            splits = "WhitespaceSplit" in json.dumps(parts["pre_tokenizer"])
            self._white_space = _white_space(normalizer) if splits else ""
        else:
            self._model, self._white_space = build_bpe_model(parts), ""
            self._zero_byte = AddedTokens([{"content": "\0", "id": parts["model"]["vocab"]["<0x00>"]}])
        self._first, self._next = _first_and_next_pieces(vocabulary, decode)
        self._raw = [bytes([BYTE_PIECES[token]]) if token in BYTE_PIECES else b"" for token in vocabulary]

    def encode(self, texts: Tensor) -> Tensor:
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._normalized_added.split(*self._added.split(*as_segments(texts)))
        if self._white_space:
            parts = tf.strings.regex_replace(parts, self._white_space, " ")
        if not self._unigram:
            parts, ids, owner = self._zero_byte.split(self._mark_spaces(parts, is_start(owner)), ids, owner)
        values, owner = tokenize(self._model, parts, ids, owner)
        return as_ragged_rows(values, owner, tf.size(texts))

    def decode(self, ids: Tensor) -> Tensor:
        """Ragged ids (B, None) -> string tensor (B,)."""
        row = ids.value_rowids()
        first, rest = (tf.gather(tf.constant(pieces), ids.values) for pieces in (self._first, self._next))
        pieces = tf.where(is_start(row), first, rest)
        if any(self._raw):
            # Consecutive bytes are decoded together. If they are not UTF-8, each of them becomes U+FFFD.
            raw = tf.gather(tf.constant(self._raw), ids.values)
            is_byte = raw != ""
            run = tf.cumsum(tf.cast(is_start(row) | is_start(is_byte), "int32"))
            joined = tf.strings.unsorted_segment_join(raw, run, tf.size(run) + 1)
            good = tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace") == joined
            pieces = tf.where(is_byte & ~tf.gather(good, run), "\ufffd", pieces)
        return tf.strings.reduce_join(ids.with_values(pieces), axis=-1)

    def _mark_spaces(self, texts: Tensor, at_start: Tensor) -> Tensor:
        """Replaces spaces by U+2581 and puts one before a text, as `Metaspace` and `Prepend` of `tokenizers` do."""
        if self._space_rule == "as they are":
            return texts
        needs_space = texts != ""
        if self._space_rule.startswith("metaspace"):
            needs_space &= ~tf.strings.regex_full_match(texts, f"(?s)[ {SPACE}].*")
        if self._space_rule.endswith("first"):
            needs_space &= at_start
        texts = tf.strings.regex_replace(texts, " ", SPACE)
        if self._space_rule.endswith("never"):
            return texts
        return tf.where(needs_space, tf.strings.join([SPACE, texts]), texts)


class MarianGraph:
    """Encodes and decodes as Marian's tokenizer does, in a graph.

    Args:
        model: the bytes of a SentencePiece model.
        vocabulary: the tokens in the order of their ids.
        special_ids: the ids of the special tokens, which are never split in texts.
        unknown_id: the id of pieces that are not in the vocabulary.
        decode: the function of the `sentencepiece` library from pieces to a text.
    """

    def __init__(
        self,
        model: bytes,
        vocabulary: list[str],
        special_ids: set[int],
        unknown_id: int,
        decode: Callable[[list[str]], str],
    ) -> None:
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

    def encode(self, texts: Tensor) -> Tensor:
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._added.split(*as_segments(texts))
        # A segment may begin with the code of a language, which is one token.
        code = tf.strings.regex_full_match(parts, r"(?s)>>.*?<<.*") & (ids < 0)
        rest = tf.where(code, tf.strings.regex_replace(parts, r"(?s)\A>>.*?<<", ""), parts)
        code = tf.where(code, tf.strings.regex_replace(parts, r"(?s)\A(>>.*?<<).*\z", r"\1"), "")
        parts = tf.reshape(tf.stack([code, rest], axis=1), [-1])
        ids = tf.reshape(tf.stack([tf.where(code != "", self._find(code), -1), ids], axis=1), [-1])
        values, owner = tokenize(self._model, parts, ids, tf.repeat(owner, 2), self._find)
        return as_ragged_rows(values, owner, tf.size(texts))

    def decode(self, ids: Tensor) -> Tensor:
        """Ragged ids (B, None) -> string tensor (B,)."""
        first, row = tf.gather(tf.constant(self._first), ids.values), ids.value_rowids()
        special = tf.gather(self._is_special, ids.values)
        group = tf.cumsum(tf.cast(special | is_start(row), "int32"))
        not_space = tf.cumsum(tf.cast(~special & (first != ""), "int32"), exclusive=True)
        before = tf.math.unsorted_segment_min(not_space, group, tf.size(row) + 1)
        at_start = not_space == tf.gather(before, group)  # only spaces since the start of the row or a special token
        pieces = tf.where(at_start, first, tf.gather(tf.constant(self._next), ids.values))
        texts = tf.strings.reduce_join(ids.with_values(pieces), axis=-1)
        return tf.strings.regex_replace(texts, rf"\A[{SPACES}\x1C-\x1F]+|[{SPACES}\x1C-\x1F]+\z", "")

    def _find(self, pieces: Tensor) -> Tensor:
        found = self._index.find(pieces)
        return tf.where(found >= 0, found, self._unknown_id)


def tokenize(
    model: bytes, texts: Tensor, ids: Tensor, owner: Tensor, find: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Runs the op over segments.

    Args:
        model: the bytes of a SentencePiece model.
        texts: string tensor (S,).
        ids: int32 (S,), the id of an added token, or -1 for text.
        owner: int64 (S,).
        find: a function from pieces to ids; None if the ids of the model are the right ones.

    Returns:
        Ids (N,) and the numbers of their texts.
    """
    kind = tf.int32 if find is None else tf.string
    # Ops with the same name share a model, in a loaded SavedModel across all functions: so the name is a hash of it.
    name = hashlib.sha256(model).hexdigest()
    values, splits = sentencepiece_tokenize(model, name, tf.where(ids >= 0, "", texts), kind)
    lengths = tf.cast(splits[1:] - splits[:-1], "int64")
    return insert_added_ids(ids, owner, values if find is None else find(values), lengths)


def _first_and_next_pieces(vocabulary: list[str], decode: DecodeRows) -> tuple[list[bytes], list[bytes]]:
    """The text of each token at the beginning of a text, and after another token."""
    size = range(len(vocabulary))
    first = [text.encode("utf-8") for text in decode([[i] for i in size])]
    rest = _next_pieces(vocabulary, decode)
    for i, token in enumerate(vocabulary):
        if token in BYTE_PIECES and BYTE_PIECES[token] > 127 and "\ufffd".encode() in rest[i]:
            first[i] = rest[i] = bytes([BYTE_PIECES[token]])
    return first, rest


def _next_pieces(vocabulary: list[str], decode: DecodeRows) -> list[bytes]:
    """The text of each token after another one, whose own text is the same before all of them."""
    # A word if there is one; last a byte, as several bytes may be one character.
    order = [(token in BYTE_PIECES, not token.removeprefix(SPACE).isalpha()) for token in vocabulary]
    for before in sorted(range(len(vocabulary)), key=order.__getitem__):
        start = decode([[before]])[0]
        if not start or start != start.strip():
            continue
        texts = decode([[before, i] for i in range(len(vocabulary))])
        if all(text.startswith(start) for text in texts):
            return [text.removeprefix(start).encode("utf-8") for text in texts]
    raise ValueError(
        f"`definition` must have a token that is no white space to run in a graph. Received: {len(vocabulary)} tokens, "
        f"{vocabulary[:5]!r:.200} and others"
    )


def _white_space(normalizer: Any) -> str:
    """A pattern for the white space that the normalizer keeps, which splits texts as spaces do; "" for none."""
    white = [c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f"]
    kept = [c for c in white if normalizer.normalize_str(c) == c]
    return "[" + "".join(rf"\x{{{ord(c):X}}}" for c in kept) + "]" if kept else ""

"""Functions for tokenizers in a TensorFlow graph: strings -> ids without lookup tables, and added tokens.

B texts, S segments of all texts. A segment is either an added token, which is never split, or the text between two of
them. The `owner` of a segment is the number of its text, and the owner of an id the number of its segment or text.
Regular expressions are RE2's.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_tx.keras_internals import regex_split
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# The white space of Unicode 16, for use within [...].
SPACES = r"\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
# The ops of tensorflow-text stop at a zero byte, so this noncharacter replaces it.
ZERO, ZERO_STAND_IN = "\0", "\U0001fffe"
MAX_INT64 = int(np.iinfo("int64").max)


class StringIndex:
    """Maps n strings to ids by a 63-bit hash; an unknown string collides with one of them with probability n / 2^63.

    Args:
        ids: maps strings or bytes to ids.
    """

    def __init__(self, ids: Mapping[Any, int]) -> None:
        with tf.init_scope():
            hashes = _hashes(tf.constant(list(ids), tf.string)).numpy()
        order = np.argsort(hashes)
        self._hashes, self._ids = hashes[order], np.fromiter(ids.values(), "int32", len(ids))[order]

    def find(self, strings: Tensor) -> Tensor:
        """String tensor (N,) -> int32 (N,); -1 for a string that the index does not have."""
        hashes = _hashes(strings)
        place = tf.minimum(tf.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return tf.where(tf.gather(self._hashes, place) == hashes, tf.gather(self._ids, place), -1)


class AddedTokens:
    """Splits texts at their added tokens as `tokenizers` does: at the leftmost match, and of these at the longest.

    Args:
        tokens: dictionaries as in the "added_tokens" of a tokenizer.json.
    """

    def __init__(self, tokens: list[dict[str, Any]]) -> None:
        self._pattern = "|".join(_pattern(token) for token in sorted(tokens, key=lambda t: -len(t["content"])))
        self._index = StringIndex({token["content"]: token["id"] for token in tokens}) if tokens else None
        self._takes_spaces = any(token.get("lstrip") or token.get("rstrip") for token in tokens)

    def split(self, texts: Tensor, ids: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the segments that are text.

        Args:
            texts: string tensor (S,).
            ids: int32 (S,), the id of an added token, or -1 for text.
            owner: int64 (S,).

        Returns:
            The same three of the new segments.
        """
        if self._index is None:
            return texts, ids, owner
        parts, row = split_by_pattern(texts, self._pattern)
        old = tf.gather(ids, row)
        found = self._index.find(parts)
        if self._takes_spaces:
            stripped = tf.strings.regex_replace(parts, rf"\A[{SPACES}]+|[{SPACES}]+\z", "")
            found = tf.where(found >= 0, found, self._index.find(stripped))
        kept = is_start(row) | (old < 0)  # an added token stays one segment, whatever it contains
        ids = tf.where(old >= 0, old, found)
        return tf.boolean_mask(parts, kept), tf.boolean_mask(ids, kept), tf.boolean_mask(tf.gather(owner, row), kept)


def as_segments(texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes one segment of each text: string tensor (B,) of any bytes -> UTF-8 texts, ids and owners, each (B,).

    Bytes that are not UTF-8 become U+FFFD.
    """
    texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
    count = tf.size(texts, out_type=tf.int64)
    return tf.strings.regex_replace(texts, ZERO, ZERO_STAND_IN), tf.fill([count], -1), tf.range(count)


def split_by_pattern(texts: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """Splits texts (S,) at the matches of a pattern; returns the matches and the texts between, (N,), and their owners.

    Calls the op itself, because `tensorflow_text.regex_split` adds a hundred nodes to the graph that check its result.
    """
    parts, splits = regex_split(texts, f"({pattern})")
    return parts, owners_from_ends(splits[1:], parts)


def owners_from_ends(ends: Tensor, values: Tensor) -> Tensor:
    """The owners of values, int64 (N,), from the ends of the values of each owner, (S,) ascending.

    `tf.repeat` would need memory for S times the largest number of values of any owner.
    """
    return tf.searchsorted(ends, tf.range(tf.size(values, out_type=tf.int64)), side="right", out_type=tf.int64)


def is_start(row: Tensor) -> Tensor:
    """Whether a value is the first or differs from the one before it: (N,) -> boolean (N,)."""
    return tf.concat([tf.fill([tf.minimum(tf.size(row), 1)], True), row[1:] != row[:-1]], 0)


def as_ragged_rows(values: Tensor, owner: Tensor, count: Tensor) -> Tensor:
    """Ids (N,) and the numbers of their texts, ascending -> ragged int32 (B, None)."""
    return tf.RaggedTensor.from_value_rowids(values, owner, nrows=tf.cast(count, owner.dtype), validate=False)


def insert_added_ids(ids: Tensor, owner: Tensor, found: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Puts the ids of added tokens between the ids of the segments that are text.

    Args:
        ids: int32 (S,), the id of an added token, or -1 for text.
        owner: int64 (S,).
        found: int32 (N,), the ids of the segments that are text, one segment after the other.
        lengths: int64 (S,), how many of `found` each segment has; 0 for an added token.

    Returns:
        All ids, and the numbers of their texts.
    """
    added = ids >= 0
    before = tf.cumsum(tf.cast(added, "int64"), exclusive=True)
    segment = owners_from_ends(tf.cumsum(lengths), found)
    place = tf.range(tf.size(found, out_type=tf.int64)) + tf.gather(before, segment)
    added_place = tf.boolean_mask(before + tf.cumsum(lengths, exclusive=True), added)
    places = [tf.cast(place, "int32"), tf.cast(added_place, "int32")]
    values = tf.dynamic_stitch(places, [found, tf.boolean_mask(ids, added)])
    ends = tf.cumsum(tf.where(added, tf.ones_like(lengths), lengths))
    return values, tf.gather(owner, owners_from_ends(ends, values))


def unsupported_added_tokens(tokens: list[dict[str, Any]]) -> str | None:
    """The reason why added tokens cannot be found in a graph, or None."""
    for token in tokens:
        if token["single_word"]:
            return f"{token['content']!r} is found only between words"
        if (token["lstrip"] or token["rstrip"]) and token["content"] != token["content"].strip():
            return f"{token['content']!r} has spaces at its ends"
    return None


def _pattern(token: dict[str, Any]) -> str:
    before = f"[{SPACES}]*" if token.get("lstrip") else ""
    behind = f"[{SPACES}]*" if token.get("rstrip") else ""
    return before + re.sub(r"[^\w]", lambda found: rf"\x{{{ord(found.group()):X}}}", token["content"]) + behind


def _hashes(strings: Tensor) -> Tensor:
    return tf.strings.to_hash_bucket_fast(strings, MAX_INT64)

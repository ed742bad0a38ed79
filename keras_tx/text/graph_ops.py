"""What tokenizers share in the TensorFlow graph: strings -> ids without lookup tables, tokens that text never splits.

B texts, S segments of all texts: special tokens, and the text between them. Each segment has the number of
its text, `owner`. Regular expressions are RE2's.
"""

import re
from typing import Any

import numpy as np

from keras_tx.keras_internals import regex_split
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

# What Unicode 16 calls white space, for the inside of [...].
SPACES = r"\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
# The ops of tensorflow-text read no further than a zero byte, so this noncharacter stands for it.
ZERO, STAND_IN = "\0", "\U0001fffe"
LAST = np.iinfo("int64").max


class StringIndex:
    """Strings -> ids, by 63 bits of a hash: a stranger is taken for one of n strings once in 2^63 / n times.

    Args:
        ids: string or bytes -> id.
    """

    def __init__(self, ids: dict[Any, int]):
        with tf.init_scope():
            hashes = _hashes(tf.constant(list(ids), tf.string)).numpy()
        order = np.argsort(hashes)
        self._hashes, self._ids = hashes[order], np.fromiter(ids.values(), "int32", len(ids))[order]

    def find(self, strings):
        """String tensor (N,) -> int32 (N,); -1 for a stranger."""
        hashes = _hashes(strings)
        place = tf.minimum(tf.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return tf.where(tf.gather(self._hashes, place) == hashes, tf.gather(self._ids, place), -1)


class AddedTokens:
    """Splits texts at the tokens that they never split, as `tokenizers` does: the leftmost, and there the longest.

    Args:
        tokens: dictionaries of a tokenizer.json's "added_tokens".
    """

    def __init__(self, tokens: list[dict[str, Any]]):
        self._pattern = "|".join(_pattern(token) for token in sorted(tokens, key=lambda t: -len(t["content"])))
        self._index = StringIndex({token["content"]: token["id"] for token in tokens}) if tokens else None
        self._stripped = any(token.get("lstrip") or token.get("rstrip") for token in tokens)

    def split(self, texts, ids, owner):
        """Splits those of the segments that are text.

        Args:
            texts: string tensor (S,).
            ids: int32 (S,), the id of a special token, or -1 for text.
            owner: int64 (S,).

        Returns:
            The same of the new segments.
        """
        if self._index is None:
            return texts, ids, owner
        parts, row = split_at(texts, self._pattern)
        old = tf.gather(ids, row)
        found = self._index.find(parts)
        if self._stripped:
            bare = tf.strings.regex_replace(parts, rf"\A[{SPACES}]+|[{SPACES}]+\z", "")
            found = tf.where(found >= 0, found, self._index.find(bare))
        kept = begins(row) | (old < 0)  # a special token stays one segment, whatever is in it
        ids = tf.where(old >= 0, old, found)
        return tf.boolean_mask(parts, kept), tf.boolean_mask(ids, kept), tf.boolean_mask(tf.gather(owner, row), kept)


def segments_of(texts):
    """String tensor (B,) of any bytes -> texts, ids and owners of B segments of UTF-8. No UTF-8 reads as U+FFFD."""
    texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
    count = tf.size(texts, out_type=tf.int64)
    return tf.strings.regex_replace(texts, ZERO, STAND_IN), tf.fill([count], -1), tf.range(count)


def split_at(texts, pattern: str):
    """String tensor (S,) -> the parts that match, and those between them: strings (N,), and int64 (N,) whose they are.

    The op itself, for `tensorflow_text.regex_split` checks its answer in a hundred nodes of the graph.
    """
    parts, splits = regex_split(texts, f"({pattern})")
    return parts, owners(splits[1:], parts)


def owners(ends, values):
    """Whose the values (N,) are: int64 (N,), from where the values of each owner end, (S,) ascending.

    Not by `tf.repeat`, which takes room for the longest of them for each.
    """
    return tf.searchsorted(ends, tf.range(tf.size(values, out_type=tf.int64)), side="right", out_type=tf.int64)


def begins(row):
    """Whether a value differs from the one before it: (N,) -> boolean (N,); the first does."""
    return tf.concat([tf.fill([tf.minimum(tf.size(row), 1)], True), row[1:] != row[:-1]], 0)


def rows_of(values, owner, count):
    """Ids (N,) and their texts' numbers, ascending -> ragged int32 (B, None)."""
    return tf.RaggedTensor.from_value_rowids(values, owner, nrows=tf.cast(count, owner.dtype), validate=False)


def interleave(ids, owner, found, lengths):
    """The ids of special segments among those of the others.

    Args:
        ids: int32 (S,), the id of a special token, or -1 for text.
        owner: int64 (S,).
        found: int32 (N,), the ids of the segments that are text, one after the other.
        lengths: int64 (S,), how many of them each segment has; 0 for a special token.

    Returns:
        All ids, and their owners.
    """
    special = ids >= 0
    before = tf.cumsum(tf.cast(special, "int64"), exclusive=True)
    segment = owners(tf.cumsum(lengths), found)
    place = tf.range(tf.size(found, out_type=tf.int64)) + tf.gather(before, segment)
    special_place = tf.boolean_mask(before + tf.cumsum(lengths, exclusive=True), special)
    places = [tf.cast(place, "int32"), tf.cast(special_place, "int32")]
    values = tf.dynamic_stitch(places, [found, tf.boolean_mask(ids, special)])
    ends = tf.cumsum(tf.where(special, tf.ones_like(lengths), lengths))
    return values, tf.gather(owner, owners(ends, values))


def unsupported(tokens: list[dict[str, Any]]) -> str | None:
    """Why tokens that text never splits cannot be found in a graph, or None."""
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


def _hashes(strings):
    return tf.strings.to_hash_bucket_fast(strings, LAST)

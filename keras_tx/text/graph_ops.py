"""Functions for tokenizers in a TensorFlow graph: strings -> ids without lookup tables, and added tokens.

B texts, S segments of all texts. A segment is either an added token, which is never split, or the text between two of
them. The `owner` of a segment is the number of its text, and the owner of an id the number of its segment or text.
Regular expressions are RE2's.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
tf_text = Lazy("tensorflow_text", extra="text")

# The white space of Unicode 16, for use within [...].
SPACES = r"\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
# The characters that normalization changes, reorders or composes according to ICU, but not according to `tokenizers`,
# whose tables are older: all are of Unicode 10 to 16.
NEWER = (
    r"\x{7FD}\x{897}-\x{89F}\x{8CA}-\x{8D3}\x{9FE}\x{C3C}\x{D3B}\x{D3C}\x{EBA}\x{1715}\x{1ABF}-\x{1ACE}"
    r"\x{1DF6}-\x{1DFA}\x{32FF}\x{A7F2}-\x{A7F4}\x{A82C}\x{AB69}\x{105C9}\x{105D2}\x{105DA}\x{105E4}"
    r"\x{10781}-\x{10785}\x{10787}-\x{107B0}\x{107B2}-\x{107BA}\x{10D24}-\x{10D27}\x{10D69}-\x{10D6D}\x{10EAB}"
    r"\x{10EAC}\x{10EFD}-\x{10EFF}\x{10F46}-\x{10F50}\x{10F82}-\x{10F85}\x{11070}\x{1133B}\x{11382}-\x{11385}"
    r"\x{1138B}\x{1138E}\x{11390}\x{11391}\x{113C2}\x{113C5}\x{113C7}\x{113C8}\x{113CE}-\x{113D0}\x{1145E}"
    r"\x{11839}\x{1183A}\x{11935}\x{11938}\x{1193D}\x{1193E}\x{11943}\x{119E0}\x{11A34}\x{11A47}\x{11A99}"
    r"\x{11D42}\x{11D44}\x{11D45}\x{11D97}\x{11F41}\x{11F42}\x{1611E}\x{16121}-\x{16129}\x{1612F}\x{16D63}"
    r"\x{16D67}-\x{16D6A}\x{16FF0}\x{16FF1}\x{1CCD6}-\x{1CCF9}\x{1E030}-\x{1E06D}\x{1E08F}\x{1E130}-\x{1E136}"
    r"\x{1E2AE}\x{1E2EC}-\x{1E2EF}\x{1E4EC}-\x{1E4EF}\x{1E5EE}\x{1E5EF}\x{1F16C}\x{1FBF0}-\x{1FBF9}"
)
SEPARATOR = b"\xff"  # a byte that UTF-8 does not have
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
    return texts, tf.fill([count], -1), tf.range(count)


def split_by_pattern(texts: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """Splits texts (S,) at the matches of a pattern; returns the matches and the texts between, (N,), and their owners.

    `tensorflow_text.regex_split` is not used because it ignores the rest of a text after a zero byte.
    """
    marked = tf.strings.regex_replace(texts, pattern, SEPARATOR + rb"\0" + SEPARATOR)
    split = tf.raw_ops.StringSplitV2(input=marked, sep=SEPARATOR)
    kept = split.values != ""
    return tf.boolean_mask(split.values, kept), tf.boolean_mask(split.indices[:, 0], kept)


def normalize_unicode(texts: Tensor, form: str) -> Tensor:
    """Normalizes texts (S,) to "NFC", "NFD", "NFKC" or "NFKD" as `tokenizers` does."""
    parts, row = split_by_pattern(texts, f"[{NEWER}]")
    newer = tf.strings.regex_full_match(parts, f"[{NEWER}]")
    parts = tf.where(newer, parts, tf_text.normalize_utf8(parts, form))
    return tf.strings.unsorted_segment_join(parts, row, tf.size(texts))


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
        content = token["content"]
        if token["single_word"]:
            return f"{content!r} is found only between words"
        if not (token["lstrip"] or token["rstrip"]):
            continue
        if content != content.strip():
            return f"{content!r} has spaces at its ends"
        # Of those that are looked for together, a graph would find the one whose spaces begin first.
        for other in (one["content"] for one in tokens if one["normalized"] == token["normalized"]):
            if other != other.strip() or (other != content and other.startswith(content)):
                return f"{content!r} takes the spaces beside it, and {other!r} may begin there"
    return None


def _pattern(token: dict[str, Any]) -> str:
    before = f"[{SPACES}]*" if token.get("lstrip") else ""
    behind = f"[{SPACES}]*" if token.get("rstrip") else ""
    return before + re.sub(r"[^\w]", lambda found: rf"\x{{{ord(found.group()):X}}}", token["content"]) + behind


def _hashes(strings: Tensor) -> Tensor:
    return tf.strings.to_hash_bucket_fast(strings, MAX_INT64)

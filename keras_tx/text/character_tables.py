"""What the `tokenizers` library does with each Unicode character, as tables for the TensorFlow graph.

The tables are made by asking the library itself, once in a process, so they are those of its version of Unicode.
C code points, R runs of them, K the largest number of characters that one becomes.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
tokenizers = Lazy("tokenizers", extra="text")

SPACE, SURROGATES, END = 0x20, range(0xD800, 0xE000), 0x110000
BLOCK = 256
# The kinds of characters, each with a pre-tokenizer of the library that tells it from the others, and whether the
# pre-tokenizer leaves a character of the kind in one piece with an "a" before it.
KINDS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "space": ("WhitespaceSplit", {}, False),
    "word": ("Whitespace", {}, True),
    "punctuation": ("Punctuation", {"behavior": "contiguous"}, False),
    "digit": ("Digits", {"individual_digits": False}, False),
}

Change = tuple[tuple[bool, int], ...]  # each character that one becomes: whether relative to it, and the number


class CharacterMap:
    """Replaces each character by others as `normalize` does: string tensor (S,) -> (S,).

    Args:
        normalize: a function of the library from text to text that treats each character alone.
    """

    def __init__(self, normalize: Callable[[str], str]) -> None:
        runs = list(_runs(normalize))
        width = max(len(change) for _, change in runs)
        self._starts = np.array([start for start, _ in runs], "int32")  # (R,)
        self._counts = np.array([len(change) for _, change in runs], "int32")
        padded = [[*change, *[(False, 0)] * (width - len(change))] for _, change in runs]
        table = np.array(padded, "int32").reshape(len(runs), width, 2)
        self._relative, self._numbers = table[..., 0], table[..., 1]  # (R, K)

    def __call__(self, texts: Tensor) -> Tensor:
        codes = tf.strings.unicode_decode(texts, "UTF-8")
        run = tf.searchsorted(self._starts, codes.values, side="right") - 1  # (C,)
        new = tf.gather(self._numbers, run) + tf.gather(self._relative, run) * codes.values[:, None]  # (C, K)
        kept = tf.sequence_mask(tf.gather(self._counts, run), self._numbers.shape[1])
        row = tf.broadcast_to(codes.value_rowids()[:, None], tf.shape(new, tf.int64))
        values, owner = tf.boolean_mask(new, kept), tf.boolean_mask(row, kept)
        ragged = tf.RaggedTensor.from_value_rowids(values, owner, nrows=codes.nrows(), validate=False)
        return tf.strings.unicode_encode(ragged, "UTF-8")


@cache
def boundaries(kind: str) -> np.ndarray:
    """The ascending code points, int32, at which the characters of a kind begin and end in turn.

    Unassigned and private planes are asked for their first character only.

    Args:
        kind: one of `KINDS`.
    """
    name, options, together = KINDS[kind]
    split = getattr(tokenizers.pre_tokenizers, name)(**options).pre_tokenize_str
    asked = [*range(0x40000), *range(0x40000, 0xE0000, 0x10000), *range(0xE0000, 0xE1000), 0xF0000, 0x100000]
    points = [point for point in asked if point not in SURROGATES]
    pieces = split("".join(map(chr, points)))
    edges = sorted({0, *(edge for _, ends in pieces for edge in ends)} - {len(points)})
    # Between two edges all characters are of the kind or none.
    inside = [(split("a" + chr(points[i]))[0][0] == "a" + chr(points[i])) == together for i in edges]
    changes = [points[i] for i, now, before in zip(edges, inside, [False, *inside], strict=False) if now != before]
    return np.array(changes, "int32")


def is_inside(codes: Tensor, ends: np.ndarray) -> Tensor:
    """Whether code points, int32 (C,), lie in the ranges that `boundaries` gives: boolean (C,)."""
    return tf.searchsorted(ends, codes, side="right") % 2 == 1


@cache
def library_map(name: str, **options: bool) -> CharacterMap:
    """The map of a normalizer of the library that treats each character alone, such as Lowercase."""
    return CharacterMap(getattr(tokenizers.normalizers, name)(**options).normalize_str)


@cache
def without_marks() -> CharacterMap:
    """The map that deletes nonspacing marks, as BertNormalizer does after NFD."""
    options = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": True, "lowercase": False}
    strip = tokenizers.normalizers.BertNormalizer(**options).normalize_str

    def normalize(text: str) -> str:
        return text if strip(text) == text else "".join(character for character in text if strip(character))

    return CharacterMap(normalize)


def _runs(normalize: Callable[[str], str]) -> Iterator[tuple[int, Change]]:
    """Runs of characters with the same change: their first code point and the change."""
    last = None
    for start, change in _changes(normalize):
        if change != last:
            yield start, change
        last = change


def _changes(normalize: Callable[[str], str]) -> Iterator[tuple[int, Change]]:
    """The change of each character, or of the first of a block that stays as it is or is deleted as a whole."""
    for start in range(0, END, BLOCK):
        if start in SURROGATES:
            continue
        text = "".join(map(chr, range(start, start + BLOCK)))
        found = normalize(text)
        if found == text or not found:
            yield start, ((True, 0),) if found else ()
            continue
        for character in text:
            new, old = map(ord, normalize(character)), ord(character)
            yield old, tuple((False, SPACE) if code == SPACE else (True, code - old) for code in new)

"""Words or characters as tokens, in TensorFlow ops: (B,) strings -> ragged (B, None) ids -> (B,) strings.

Every step is that of the `tokenizers` library: normalizers, which change texts, then pre-tokenizers, which split them,
then one id for each piece. C characters, W words; see `graph_ops` for segments and owners.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.text.character_tables import boundaries, is_inside, library_map, without_marks
from keras_tx.text.graph_ops import (
    SPACES,
    AddedTokens,
    StringIndex,
    as_ragged_rows,
    as_segments,
    insert_added_ids,
    is_start,
    normalize_unicode,
    unsupported_added_tokens,
)
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

UNICODE_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
CHARACTER_MAPS = {"Lowercase", "StripAccents", "Nmt"}
NORMALIZERS = UNICODE_FORMS | CHARACTER_MAPS | {"BertNormalizer", "Strip", "Replace"}
EACH_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
SEPARATORS = {None: " ", "Fuse": ""}  # what a decoder puts between tokens

Change = Callable[[Tensor], Tensor]
Rule = tuple[np.ndarray, str]  # the ranges of the characters at which texts are split, and the behavior


class WordLevelGraph:
    """Encodes and decodes in a graph. The definition must be one for which `unsupported_parts` returns None.

    Args:
        parts: the content of a tokenizer.json.
        added: those of its added tokens that are found in texts, each as in the library's normalized text.
        decoded: the tokens in the order of their ids, added ones likewise.
    """

    def __init__(self, parts: dict[str, Any], added: list[dict[str, Any]], decoded: list[str]) -> None:
        self._changes = [change for step in steps(parts["normalizer"], "normalizers") for change in _changes(step)]
        self._rules = split_rules(parts["pre_tokenizer"])
        self._added = AddedTokens([token for token in added if not token["normalized"]])
        self._normalized_added = AddedTokens([token for token in added if token["normalized"]])
        self._separator = SEPARATORS[(parts["decoder"] or {}).get("type")]
        self._pieces = [token.encode("utf-8") for token in decoded]
        id_of, self._unknown_id = parts["model"]["vocab"], parts["model"]["vocab"][parts["model"]["unk_token"]]
        if self._rules is None:
            ids = {ord(token): i for token, i in id_of.items() if len(token) == 1}
            self._codes = np.array(sorted(ids), "int32")
            self._ids_of_codes = np.array([ids[code] for code in sorted(ids)], "int32")
        else:
            self._index = StringIndex(id_of)

    def encode(self, texts: Tensor) -> Tensor:
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._added.split(*as_segments(texts))
        for change in self._changes:
            parts = tf.where(ids < 0, change(parts), parts)
        parts, ids, owner = self._normalized_added.split(parts, ids, owner)
        codes = tf.strings.unicode_decode(tf.where(ids < 0, parts, ""), "UTF-8")
        if self._rules is None:
            found, segment = self._find_characters(codes.values), codes.value_rowids()
        else:
            words, segment = split_words(codes.values, codes.value_rowids(), self._rules)
            found = self._index.find(words)
        found = tf.where(found >= 0, found, self._unknown_id)
        lengths = tf.math.unsorted_segment_sum(tf.ones_like(segment), segment, tf.size(ids))
        values, owner = insert_added_ids(ids, owner, found, lengths)
        return as_ragged_rows(values, owner, tf.size(texts))

    def decode(self, ids: Tensor) -> Tensor:
        """Ragged ids (B, None) -> string tensor (B,)."""
        return tf.strings.reduce_join(tf.gather(tf.constant(self._pieces), ids), axis=-1, separator=self._separator)

    def _find_characters(self, codes: Tensor) -> Tensor:
        """Code points (C,) -> ids (C,), or -1."""
        place = tf.minimum(tf.searchsorted(self._codes, codes), len(self._codes) - 1)
        return tf.where(tf.gather(self._codes, place) == codes, tf.gather(self._ids_of_codes, place), -1)


def split_words(codes: Tensor, segment: Tensor, rules: list[Rule]) -> tuple[Tensor, Tensor]:
    """Splits the characters of all segments into words.

    Args:
        codes: int32 (C,), code points.
        segment: int64 (C,), the number of the segment of each.
        rules: what `split_rules` returns.

    Returns:
        String tensor (W,), and the number of the segment of each word, int64 (W,).
    """
    start = is_start(segment)  # whether a word begins at a character
    for ranges, behavior in rules:
        inside = is_inside(codes, ranges)
        before = tf.concat([inside[:1] & False, inside[:-1]], 0)
        if behavior == "Isolated":
            start |= inside | before
        elif behavior == "Contiguous":
            start |= inside != before
        elif behavior == "MergedWithNext":
            start |= inside
        else:
            start |= before
        if behavior == "Removed":
            codes, segment, start = (tf.boolean_mask(values, ~inside) for values in (codes, segment, start))
    word = tf.cumsum(tf.cast(start, "int64")) - 1
    first = tf.boolean_mask(segment, start)
    ragged = tf.RaggedTensor.from_value_rowids(codes, word, nrows=tf.size(first, tf.int64), validate=False)
    return tf.strings.unicode_encode(ragged, "UTF-8"), first


def unsupported_parts(parts: dict[str, Any], added: list[dict[str, Any]]) -> str | None:
    """The reason why a definition cannot run in a graph, or None. The arguments are those of `WordLevelGraph`."""
    for step in steps(parts["normalizer"], "normalizers"):
        if step["type"] not in NORMALIZERS:
            return f"its normalizer is {step['type']}"
        if step["type"] == "Replace" and not step["pattern"].get("String"):
            return f"its normalizer is Replace with the pattern {step['pattern']}"
    for step in steps(parts["pre_tokenizer"], "pretokenizers"):
        if parts["pre_tokenizer"] != EACH_CHARACTER and _rules_of(step) is None:
            return f"its pre-tokenizer is {step}"
    decoder = (parts["decoder"] or {}).get("type")
    if decoder not in SEPARATORS:
        return f"its decoder is {decoder}"
    if len({token["content"] for token in added} | {""}) <= len(added):
        return "two of its added tokens are equal, or one is empty, when they are normalized"
    return unsupported_added_tokens(added)


def steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a Sequence with other Sequences in it."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for one in step[key] for inner in steps(one, key)]
    return [step]


def split_rules(pre_tokenizer: dict[str, Any] | None) -> list[Rule] | None:
    """The rules of a pre-tokenizer, one after the other; None if every character is a word."""
    if pre_tokenizer == EACH_CHARACTER:
        return None
    rules: list[Rule] = []
    for step in steps(pre_tokenizer, "pretokenizers"):
        found = _rules_of(step) or []
        rules += [(boundaries(at) if isinstance(at, str) else at, behavior) for at, behavior in found]
    return rules


def _rules_of(step: dict[str, Any]) -> list[tuple[str | np.ndarray, str]] | None:
    """The rules of one step, each with the kind of characters or their ranges; None if the graph has no form of it."""
    match step:
        case {"type": "Whitespace"}:
            return [("space", "Removed"), ("word", "Contiguous")]
        case {"type": "WhitespaceSplit"}:
            return [("space", "Removed")]
        case {"type": "BertPreTokenizer"}:
            return [("space", "Removed"), ("punctuation", "Isolated")]
        case {"type": "Punctuation", "behavior": behavior}:
            return [("punctuation", behavior)]
        case {"type": "Digits", "individual_digits": alone}:
            return [("digit", "Isolated" if alone else "Contiguous")]
        case {"type": "CharDelimiterSplit", "delimiter": character}:
            return [(_range(character), "Removed")]
        case {"type": "Split", "pattern": {"String": character}, "behavior": behavior, "invert": False}:
            return [(_range(character), behavior)] if len(character) == 1 else None
    return None


def _range(character: str) -> np.ndarray:
    return np.array([ord(character), ord(character) + 1], "int32")


def _changes(step: dict[str, Any]) -> list[Change]:
    """What a normalizer does, as functions from texts (S,) to texts (S,)."""
    kind = step["type"]
    if kind in UNICODE_FORMS:
        return [partial(normalize_unicode, form=kind)]
    if kind in CHARACTER_MAPS:
        return [library_map(kind)]
    if kind == "BertNormalizer":
        clean = {name: step[name] for name in ("clean_text", "handle_chinese_chars")}
        changes: list[Change] = [library_map(kind, **clean, strip_accents=False, lowercase=False)]
        if step["lowercase"] if step["strip_accents"] is None else step["strip_accents"]:
            changes += [partial(normalize_unicode, form="NFD"), without_marks()]
        return [*changes, library_map("Lowercase")] if step["lowercase"] else changes
    if kind == "Replace":
        old = "".join(rf"\x{{{ord(character):X}}}" for character in step["pattern"]["String"])
        new = step["content"].replace("\\", r"\\")
        return [partial(tf.strings.regex_replace, pattern=old, rewrite=new)]
    left: list[Change] = [partial(tf.strings.regex_replace, pattern=rf"\A[{SPACES}]+", rewrite="")]
    right: list[Change] = [partial(tf.strings.regex_replace, pattern=rf"[{SPACES}]+\z", rewrite="")]
    return (left if step["strip_left"] else []) + (right if step["strip_right"] else [])


def is_word_level(parts: dict[str, Any]) -> bool:
    """Whether the content of a tokenizer.json has one id for each word, or for each character."""
    return bool(parts["model"].get("type") == "WordLevel")


def is_character_level(parts: dict[str, Any]) -> bool:
    """Whether the content of a tokenizer.json has one id for each character and keeps texts as they are."""
    plain = (parts.get("normalizer"), parts.get("pre_tokenizer"), parts.get("decoder"))
    return is_word_level(parts) and plain == (None, EACH_CHARACTER, {"type": "Fuse"})

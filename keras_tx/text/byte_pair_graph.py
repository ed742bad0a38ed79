"""Byte-level byte-pair encoding in TensorFlow ops: (B,) strings -> ragged (B, None) ids -> (B,) strings.

W words, N bytes or tokens of all words. See `graph_ops` for segments and owners. Sennrich et al.
2016, arXiv:1508.07909.
"""

from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.text.definition import decoders
from keras_tx.text.graph_ops import (
    MAX_INT64,
    SPACES,
    AddedTokens,
    StringIndex,
    as_ragged_rows,
    as_segments,
    is_start,
    normalize_unicode,
    owners_from_ends,
    split_by_pattern,
    unsupported_added_tokens,
)
from keras_tx.text.tokenizer_json import QWEN
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# Letters and numbers, for use within [...]: those that RE2 knows, and those of Unicode 16 and 17 that it does not.
LETTERS = (
    r"\p{L}\x{1C89}\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D4A}-\x{10D65}\x{10D6F}-\x{10D85}"
    r"\x{10EC2}-\x{10EC4}\x{11380}-\x{11389}\x{1138B}\x{1138E}\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}"
    r"\x{11BC0}-\x{11BE0}\x{13460}-\x{143FA}\x{16100}-\x{1611D}\x{16D40}-\x{16D6C}\x{18CFF}\x{1E5D0}-\x{1E5ED}\x{1E5F0}"
    r"\x{2EBF0}-\x{2EE5D}"
)
NUMBERS = r"\p{N}\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{16130}-\x{16139}\x{16D70}-\x{16D79}"
NUMBERS += r"\x{1CCF0}-\x{1CCF9}\x{1E5F1}-\x{1E5FA}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SUPPORTED_PATTERNS = (GPT2, QWEN, LLAMA3)
UNICODE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
SUPPORTED_NORMALIZERS = {*UNICODE_NORMALIZERS, "Prepend"}
WITHOUT_FIRST_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # a step after decoding bytes


class BytePairGraph:
    """Encodes and decodes in a graph. The definition must be one for which `unsupported_parts` returns None.

    Args:
        parts: the content of a tokenizer.json.
        added: those of its added tokens that are found in texts, each as in the library's normalized text.
        decoded: the tokens in the order of their ids, added ones likewise.
    """

    def __init__(self, parts: dict[str, Any], added: list[dict[str, Any]], decoded: list[str]) -> None:
        model = parts["model"]
        self._normalizer = (parts["normalizer"] or {}).get("type")
        self._prefix = parts["normalizer"]["prepend"] if self._normalizer == "Prepend" else ""
        self._strips_first_space = len(decoders(parts)) > 1
        pattern, self._begins_with_space = _pattern_and_prefix(parts["pre_tokenizer"])
        self._line_breaks = r"[\r\n]" in pattern  # line breaks that end a run of spaces are a word of their own
        self._pattern = _re2_pattern(pattern)
        self._added = AddedTokens([token for token in added if not token["normalized"]])
        self._normalized_added = AddedTokens([token for token in added if token["normalized"]])
        id_of = model["vocab"]
        self._byte_ids = np.array([id_of[character] for character in BYTES], "int32")
        self._whole_words = (
            StringIndex({_bytes(token): i for token, i in id_of.items()}) if model.get("ignore_merges") else None
        )
        self._merges = Merges(id_of, model["merges"], len(decoded))
        self._pieces = [_bytes(token) for token in decoded]

    def encode(self, texts: Tensor) -> Tensor:
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._added.split(*as_segments(texts))
        if self._normalizer in UNICODE_NORMALIZERS:
            parts = normalize_unicode(parts, self._normalizer)
        if self._prefix:
            parts = tf.where((ids < 0) & (parts != ""), tf.strings.join([self._prefix, parts]), parts)
        parts, ids, owner = self._normalized_added.split(parts, ids, owner)
        if self._begins_with_space:
            needs_space = (ids < 0) & tf.strings.regex_full_match(parts, r"(?s)[^ ].*")
            parts = tf.where(needs_space, tf.strings.join([" ", parts]), parts)
        words, ids, owner = _split_words(parts, ids, owner, self._pattern, self._line_breaks)
        # Each distinct word is encoded once. Added tokens get a first byte that no word has, to distinguish them.
        words = tf.where(ids >= 0, tf.strings.join([b"\xff", tf.strings.as_string(ids)]), words)
        words, place = tf.unique(words, out_idx=tf.int64)
        known = tf.math.unsorted_segment_max(ids, place, tf.size(words))
        found = tf.gather(self._encode_words(words, known), place)
        owner = tf.gather(owner, owners_from_ends(found.row_splits[1:], found.values))
        return as_ragged_rows(found.values, owner, tf.size(texts))

    def decode(self, ids: Tensor) -> Tensor:
        """Ragged ids (B, None) -> string tensor (B,)."""
        texts = tf.strings.reduce_join(tf.gather(tf.constant(self._pieces), ids), axis=-1)
        if self._strips_first_space:
            texts = tf.strings.regex_replace(texts, r"\A ", "")
        return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")

    def _encode_words(self, words: Tensor, known: Tensor) -> Tensor:
        """Words (W,), and int32 (W,) with the ids that are already known, or -1 -> ragged int32 (W, None)."""
        if self._whole_words is not None:
            known = tf.where(known >= 0, known, self._whole_words.find(words))
        spelled = tf.where(known >= 0, ".", words)  # one byte, which becomes the one known id
        data = tf.io.decode_raw(tf.strings.reduce_join(spelled), tf.uint8)  # (N,)
        count = tf.size(words, out_type=tf.int64)
        word = owners_from_ends(tf.cumsum(tf.cast(tf.strings.length(spelled), "int64")), data)
        own = tf.gather(known, word)
        ids = tf.where(own >= 0, own, tf.gather(self._byte_ids, tf.cast(data, "int32")))
        values, owner = self._merges.apply(ids, word, count)
        return as_ragged_rows(values, owner, count)


class Merges:
    """Applies merges to the tokens of words: in each word always the earliest merge of the list that matches.

    Args:
        id_of: maps tokens to ids.
        merges: pairs of tokens, each as two strings or as one string with a space.
        vocabulary_size: larger than every id.
    """

    def __init__(self, id_of: dict[str, int], merges: list[Any], vocabulary_size: int) -> None:
        rank_of: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, merge in enumerate(merges):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            rank_of[id_of[left], id_of[right]] = (rank, id_of[left + right])
        pairs = np.array(list(rank_of), "int64").reshape(-1, 2)
        ranks, merged = np.array(list(rank_of.values()), "int64").reshape(-1, 2).T
        first_use = np.full(vocabulary_size, MAX_INT64)  # the rank of the earliest merge that uses a token
        np.minimum.at(first_use, pairs.ravel(), np.repeat(ranks, 2))
        keys = pairs[:, 0] * vocabulary_size + pairs[:, 1]
        order = np.argsort(keys)
        self._keys, self._size = keys[order], vocabulary_size
        self._ranks, self._merged, self._uses = ranks[order], merged[order].astype("int32"), first_use[merged][order]

    def apply(self, ids: Tensor, word: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Merges the tokens of all words.

        Args:
            ids: int32 (N,), the tokens of one word after the other.
            word: int64 (N,), the number of each token's word.
            count: the number of words.

        Returns:
            `ids` and `word` of the merged tokens.
        """
        if not len(self._keys):
            return ids, word

        def step(ids: Tensor, word: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            own, place, rank, use = self._pairs(ids, word)
            best, soonest_use = (tf.gather(tf.math.unsorted_segment_min(x, own, count), own) for x in (rank, use))
            # In one step a word may merge its best pair, and also all pairs that come before every merge that this
            # step can make possible, unless a neighboring pair comes earlier.
            chosen = (rank < MAX_INT64) & ((rank < soonest_use) | (rank == best))
            chosen &= rank <= tf.concat([rank[1:], [MAX_INT64]], 0)
            # "aaa" merges its first two letters: of a run of equal pairs every other one is merged, if the first may.
            position, run = tf.range(tf.size(own, out_type=tf.int64)), tf.cumsum(tf.cast(is_start(rank), "int64"))
            start = tf.gather(tf.math.unsorted_segment_min(position, run, tf.size(own) + 1), run)
            chosen &= (position - start) % 2 == 0
            chosen &= rank < tf.gather(tf.concat([[MAX_INT64], rank[:-1]], 0), start)
            # If the token that the best pair makes has an earlier merge, only the first of these pairs is merged now.
            first = tf.math.unsorted_segment_min(tf.where(chosen, position, MAX_INT64), own, count)
            chosen &= (rank < use) | (position == tf.gather(first, own))
            ids = tf.where(tf.concat([chosen, [False]], 0), tf.concat([tf.gather(self._merged, place), [0]], 0), ids)
            kept = tf.concat([[True], ~chosen], 0)
            return tf.boolean_mask(ids, kept), tf.boolean_mask(word, kept), tf.reduce_any(chosen)

        any_length = tf.TensorShape([None])
        shapes = (any_length, any_length, tf.TensorShape([]))
        ids, word, _ = tf.while_loop(lambda *state: state[2], step, (ids, word, tf.size(ids) > 1), shapes)
        return ids, word

    def _pairs(self, ids: Tensor, word: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Looks up the pairs of each token but the last with the one after it.

        Returns:
            The number of the word; the index of the pair among the keys; its rank in the list of merges; and the rank
            of the earliest merge that uses the merged token. The ranks are `MAX_INT64` for a pair that is not in the
            list.
        """
        keys = tf.cast(ids[:-1], "int64") * self._size + tf.cast(ids[1:], "int64")
        place = tf.minimum(tf.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = (tf.gather(self._keys, place) == keys) & (word[:-1] == word[1:])
        rank, use = (tf.where(known, tf.gather(values, place), MAX_INT64) for values in (self._ranks, self._uses))
        return word[:-1], place, rank, use


def unsupported_parts(parts: dict[str, Any], added: list[dict[str, Any]]) -> str | None:
    """The reason why a definition cannot run in a graph, or None. The arguments are those of `BytePairGraph`."""
    model, normalizer = parts["model"], parts["normalizer"]
    if normalizer is not None and normalizer["type"] not in SUPPORTED_NORMALIZERS:
        return f"its normalizer is {normalizer['type']}"
    if decoders(parts)[1:] not in ([], [WITHOUT_FIRST_SPACE]):
        return f"its decoder is {parts['decoder']}"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its model has a dropout, a prefix or a suffix"
    if not set(BYTES) <= set(model["vocab"]):
        return "its vocabulary lacks bytes"
    if _pattern_and_prefix(parts["pre_tokenizer"])[0] not in SUPPORTED_PATTERNS:
        return f"its pre-tokenizer is {parts['pre_tokenizer']}"
    return unsupported_added_tokens(added)


def _pattern_and_prefix(pre_tokenizer: dict[str, Any] | None) -> tuple[str, bool]:
    """The pattern of a pre-tokenizer, or "" if it is not supported; and whether it puts a space before a text."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    if steps[-1].get("type") != "ByteLevel":
        return "", False
    if len(steps) == 1:
        return (GPT2 if steps[0].get("use_regex", True) else ""), steps[0].get("add_prefix_space", True)
    split = steps[0]
    plain = split.get("behavior") == "Isolated" and not split.get("invert") and len(steps) == 2
    if split.get("type") != "Split" or not plain or steps[1].get("use_regex", True) or steps[1]["add_prefix_space"]:
        return "", False
    return split["pattern"].get("Regex", ""), False


def _re2_pattern(pattern: str) -> str:
    """Rewrites a pattern of `tokenizers` for RE2, which has no lookahead; `_split_words` replaces that."""
    pattern = pattern.replace(r"|\s+(?!\S)|\s+", f"|[{SPACES}]+").replace(r"\s*[\r\n]+", rf"[{SPACES}]*[\r\n]+")
    pattern = pattern.replace(r"[^\s\p{L}\p{N}]", f"[^{SPACES}{LETTERS}{NUMBERS}]")
    pattern = pattern.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", rf"[^\r\n{LETTERS}{NUMBERS}]?[{LETTERS}]+")
    return (
        pattern.replace(r" ?\p{L}+", f" ?[{LETTERS}]+")
        .replace(r"\p{N}|", f"[{NUMBERS}]|")
        .replace(r"\p{N}{1,3}", f"[{NUMBERS}]{{1,3}}")
        .replace(r"\p{N}+", f"[{NUMBERS}]+")
    )


def _split_words(
    texts: Tensor, ids: Tensor, owner: Tensor, pattern: str, line_breaks: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Splits segments (S,) into words, with their ids and owners; added tokens stay as they are.

    RE2 cannot look ahead. So texts are first cut before the last of several spaces that another character follows,
    which `\s+(?!\S)` leaves to the next word. With `line_breaks` they are not cut before "\r" and "\n", which
    `\s*[\r\n]+` matches.
    """
    several = f"[{SPACES}]{{2,}}"
    part, row = split_by_pattern(tf.where(ids >= 0, ".", texts), several)  # an added token is one word
    starts = is_start(row)
    cut = tf.concat([~starts[1:], starts[:1] & False], 0) & tf.strings.regex_full_match(part, several)
    if line_breaks:
        cut &= ~tf.strings.regex_full_match(part, r"(?s).*[\r\n]")
    head = tf.where(cut, tf.strings.regex_replace(part, rf"[{SPACES}]\z", ""), part)
    tail = tf.where(cut, tf.strings.regex_replace(part, rf"(?s)\A.*([{SPACES}])\z", r"\1"), "")
    run = tf.cumsum(tf.cast(starts | tf.concat([starts[:1], cut[:-1]], 0), "int64")) - 1
    # Heads and tails are joined again to parts; `run` is the number of the part that each of them belongs to.
    run = tf.reshape(tf.stack([run, run + tf.cast(cut, "int64")], axis=1), [-1])
    count = tf.reduce_max(tf.concat([run, [-1]], 0)) + 1
    runs = tf.strings.unsorted_segment_join(tf.reshape(tf.stack([head, tail], axis=1), [-1]), run, count)
    run_row = tf.math.unsorted_segment_max(tf.repeat(row, 2), run, count)
    words, run = split_by_pattern(runs, pattern)
    row = tf.gather(run_row, run)
    return words, tf.gather(ids, row), tf.gather(owner, row)


def _byte_characters() -> list[str]:
    """The 256 characters that represent bytes in a vocabulary: printable ones themselves, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


BYTES = _byte_characters()
BYTE_OF = {character: byte for byte, character in enumerate(BYTES)}


def _bytes(token: str) -> bytes:
    """The bytes of a token. An added token with other characters represents its own UTF-8 bytes."""
    known = BYTE_OF.keys() >= set(token)
    return bytes(BYTE_OF[character] for character in token) if known else token.encode("utf-8")

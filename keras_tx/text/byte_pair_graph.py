"""Byte-level byte pairs in TensorFlow ops: (B,) strings -> ragged (B, None) ids -> (B,) strings.

W words, N bytes or tokens of all words. Sennrich et al. 2016, arXiv:1508.07909.
"""

from typing import Any

import numpy as np

from keras_tx.optional import Lazy
from keras_tx.text.graph_ops import (
    LAST,
    SPACES,
    STAND_IN,
    ZERO,
    AddedTokens,
    StringIndex,
    begins,
    owners,
    rows_of,
    segments_of,
    split_at,
    unsupported,
)
from keras_tx.text.tokenizer_json import QWEN

tf = Lazy("tensorflow")
tf_text = Lazy("tensorflow_text", extra="text")

# Letters and numbers for the inside of [...]: RE2's, and those of Unicode 16 and 17 that its tables lack.
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
KNOWN = (GPT2, QWEN, LLAMA3)
NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}


class BytePairGraph:
    """The graph form of a definition for which `unsupported_parts` is None.

    Args:
        parts: the content of a tokenizer.json.
        vocabulary: tokens in the order of their ids.
    """

    def __init__(self, parts: dict[str, Any], vocabulary: list[str]):
        model = parts["model"]
        self._normalizer = (parts["normalizer"] or {}).get("type")
        pattern, self._prefix = _splitting(parts["pre_tokenizer"])
        self._line_breaks = r"[\r\n]" in pattern  # those that end a run of spaces are a token of their own
        self._pattern = _for_re2(pattern)
        added = parts["added_tokens"]
        self._exact = AddedTokens([token for token in added if not token["normalized"]])
        self._normal = AddedTokens([token for token in added if token["normalized"]])
        id_of = model["vocab"]
        self._byte_ids = np.array([id_of[character] for character in BYTES], "int32")
        self._words = (
            StringIndex({_bytes(token): i for token, i in id_of.items()}) if model.get("ignore_merges") else None
        )
        self._merges = Merges(id_of, model["merges"], len(vocabulary))
        self._pieces = [_bytes(token) for token in vocabulary]

    def encode(self, texts):
        """String tensor (B,) -> ragged int32 (B, None)."""
        parts, ids, owner = self._exact.split(*segments_of(texts))
        if self._normalizer:
            parts = tf_text.normalize_utf8(parts, self._normalizer)
        parts, ids, owner = self._normal.split(parts, ids, owner)
        if self._prefix:
            bare = (ids < 0) & tf.strings.regex_full_match(parts, r"(?s)[^ ].*")
            parts = tf.where(bare, tf.strings.join([" ", parts]), parts)
        words, ids, owner = _split_words(parts, ids, owner, self._pattern, self._line_breaks)
        # Every different word once; a byte that no word has begins the special tokens.
        words = tf.strings.regex_replace(words, STAND_IN, ZERO)
        words = tf.where(ids >= 0, tf.strings.join([b"\xff", tf.strings.as_string(ids)]), words)
        words, place = tf.unique(words, out_idx=tf.int64)
        known = tf.math.unsorted_segment_max(ids, place, tf.size(words))
        found = tf.gather(self._encode_words(words, known), place)
        return rows_of(found.values, tf.gather(owner, owners(found.row_splits[1:], found.values)), tf.size(texts))

    def decode(self, ids):
        """Ragged ids (B, None) -> string tensor (B,)."""
        texts = tf.strings.reduce_join(tf.gather(tf.constant(self._pieces), ids), axis=-1)
        return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")

    def _encode_words(self, words, known):
        """String tensor (W,), and int32 (W,) with the ids that are known or -1 -> ragged int32 (W, None)."""
        if self._words is not None:
            known = tf.where(known >= 0, known, self._words.find(words))
        spelled = tf.where(known >= 0, ".", words)  # one token for one byte
        data = tf.io.decode_raw(tf.strings.reduce_join(spelled), tf.uint8)  # (N,)
        count = tf.size(words, out_type=tf.int64)
        word = owners(tf.cumsum(tf.cast(tf.strings.length(spelled), "int64")), data)
        own = tf.gather(known, word)
        ids = tf.where(own >= 0, own, tf.gather(self._byte_ids, tf.cast(data, "int32")))
        values, owner = self._merges.apply(ids, word, count)
        return rows_of(values, owner, count)


class Merges:
    """Merges tokens, in every word the pair first that stands first in the list, until no pair stands there.

    Args:
        id_of: token -> id.
        merges: pairs of tokens, as two strings or as one with a space.
        vocabulary_size: more than the largest id.
    """

    def __init__(self, id_of: dict[str, int], merges: list, vocabulary_size: int):
        rank_of: dict[tuple[int, int], tuple[int, int]] = {}
        for rank, merge in enumerate(merges):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            rank_of[id_of[left], id_of[right]] = (rank, id_of[left + right])
        pairs = np.array(list(rank_of), "int64").reshape(-1, 2)
        ranks, merged = np.array(list(rank_of.values()), "int64").reshape(-1, 2).T
        first_use = np.full(vocabulary_size, LAST)  # the rank of the first merge that takes a token
        np.minimum.at(first_use, pairs.ravel(), np.repeat(ranks, 2))
        keys = pairs[:, 0] * vocabulary_size + pairs[:, 1]
        order = np.argsort(keys)
        self._keys, self._size = keys[order], vocabulary_size
        self._ranks, self._merged, self._uses = ranks[order], merged[order].astype("int32"), first_use[merged][order]

    def apply(self, ids, word, count):
        """Merges the tokens of all words.

        Args:
            ids: int32 (N,), the words one after the other.
            word: int64 (N,), the number of each token's word.
            count: how many words there are.

        Returns:
            `ids` and `word` of what is left.
        """
        if not len(self._keys):
            return ids, word

        def step(ids, word, _):
            own, place, rank, use = self._pairs(ids, word)
            best, soon = (tf.gather(tf.math.unsorted_segment_min(x, own, count), own) for x in (rank, use))
            # Beside the first pair of a word, those that stand before all that its merges can bring about, where no
            # neighbour goes before them. If the first pair's own token stands earlier, only the first of it.
            chosen = (rank < LAST) & ((rank < soon) | (rank == best)) & (rank <= tf.concat([rank[1:], [LAST]], 0))
            # Of "aaa" the first two: of equal neighbours every other, if the first of them may.
            position, run = tf.range(tf.size(own, out_type=tf.int64)), tf.cumsum(tf.cast(begins(rank), "int64"))
            start = tf.gather(tf.math.unsorted_segment_min(position, run, tf.size(own) + 1), run)
            chosen &= (position - start) % 2 == 0
            chosen &= rank < tf.gather(tf.concat([[LAST], rank[:-1]], 0), start)
            first = tf.math.unsorted_segment_min(tf.where(chosen, position, LAST), own, count)
            chosen &= (rank < use) | (position == tf.gather(first, own))
            ids = tf.where(tf.concat([chosen, [False]], 0), tf.concat([tf.gather(self._merged, place), [0]], 0), ids)
            kept = tf.concat([[True], ~chosen], 0)
            return tf.boolean_mask(ids, kept), tf.boolean_mask(word, kept), tf.reduce_any(chosen)

        free = tf.TensorShape([None])
        more = tf.size(ids) > 1
        shapes = (free, free, tf.TensorShape([]))
        ids, word, _ = tf.while_loop(lambda *state: state[2], step, (ids, word, more), shapes)
        return ids, word

    def _pairs(self, ids, word):
        """For each token but the last: its word, the place of its pair among the keys, its rank, and the rank of the
        first merge that takes what it makes; `LAST` for the ranks of a pair that is not in the list."""
        keys = tf.cast(ids[:-1], "int64") * self._size + tf.cast(ids[1:], "int64")
        place = tf.minimum(tf.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = (tf.gather(self._keys, place) == keys) & (word[:-1] == word[1:])
        ranks = (tf.where(known, tf.gather(values, place), LAST) for values in (self._ranks, self._uses))
        return word[:-1], place, *ranks


def unsupported_parts(parts: dict[str, Any]) -> str | None:
    """Why a definition cannot run in a graph, or None."""
    model, normalizer = parts["model"], parts["normalizer"]
    if normalizer is not None and normalizer["type"] not in NORMALIZERS:
        return f"its normalizer is {normalizer['type']}"
    if model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its model has a dropout, a prefix or a suffix"
    if not set(BYTES) <= set(model["vocab"]):
        return "its vocabulary lacks bytes"
    if _splitting(parts["pre_tokenizer"])[0] not in KNOWN:
        return f"its pre-tokenizer is {parts['pre_tokenizer']}"
    return unsupported(parts["added_tokens"])


def _splitting(pre_tokenizer: dict[str, Any] | None) -> tuple[str, bool]:
    """The pattern of a pre-tokenizer, "" if it has another form; and whether texts begin with a space."""
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


def _for_re2(pattern: str) -> str:
    """A pattern of `tokenizers` in RE2's words. RE2 cannot look ahead; `_cut_spaces` has done that."""
    pattern = pattern.replace(r"|\s+(?!\S)|\s+", f"|[{SPACES}]+").replace(r"\s*[\r\n]+", rf"[{SPACES}]*[\r\n]+")
    pattern = pattern.replace(r"[^\s\p{L}\p{N}]", f"[^{SPACES}{LETTERS}{NUMBERS}]")
    pattern = pattern.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+", rf"[^\r\n{LETTERS}{NUMBERS}]?[{LETTERS}]+")
    return (
        pattern.replace(r" ?\p{L}+", f" ?[{LETTERS}]+")
        .replace(r"\p{N}|", f"[{NUMBERS}]|")
        .replace(r"\p{N}{1,3}", f"[{NUMBERS}]{{1,3}}")
        .replace(r"\p{N}+", f"[{NUMBERS}]+")
    )


def _split_words(texts, ids, owner, pattern: str, line_breaks: bool):
    r"""Segments -> words, with their ids and owners; special tokens stay as they are.

    RE2 cannot look ahead, so texts are cut first before the last of several spaces that another character follows: that
    is what `\s+(?!\S)` leaves to the next word. With `line_breaks` not before "\r" and "\n", which `\s*[\r\n]+` takes.
    """
    several = f"[{SPACES}]{{2,}}"
    part, row = split_at(tf.where(ids >= 0, ".", texts), several)  # a special token is one word
    begin = begins(row)
    cut = tf.concat([~begin[1:], begin[:1] & False], 0) & tf.strings.regex_full_match(part, several)
    if line_breaks:
        cut &= ~tf.strings.regex_full_match(part, r"(?s).*[\r\n]")
    head = tf.where(cut, tf.strings.regex_replace(part, rf"[{SPACES}]\z", ""), part)
    tail = tf.where(cut, tf.strings.regex_replace(part, rf"(?s)\A.*([{SPACES}])\z", r"\1"), "")
    run = tf.cumsum(tf.cast(begin | tf.concat([begin[:1], cut[:-1]], 0), "int64")) - 1
    run = tf.reshape(tf.stack([run, run + tf.cast(cut, "int64")], axis=1), [-1])  # of each head and tail
    count = tf.reduce_max(tf.concat([run, [-1]], 0)) + 1
    runs = tf.strings.unsorted_segment_join(tf.reshape(tf.stack([head, tail], axis=1), [-1]), run, count)
    run_row = tf.math.unsorted_segment_max(tf.repeat(row, 2), run, count)
    words, run = split_at(runs, pattern)
    row = tf.gather(run_row, run)
    return words, tf.gather(ids, row), tf.gather(owner, row)


def _byte_characters() -> list[str]:
    """The characters that stand for the bytes in a vocabulary: printable ones for themselves, then from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


BYTES = _byte_characters()
BYTE_OF = {character: byte for byte, character in enumerate(BYTES)}


def _bytes(token: str) -> bytes:
    """The bytes of a token; an added token that has other characters stands for itself."""
    known = BYTE_OF.keys() >= set(token)
    return bytes(BYTE_OF[character] for character in token) if known else token.encode("utf-8")

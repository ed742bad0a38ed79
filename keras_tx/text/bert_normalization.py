r"""BERT's text normalization in TensorFlow ops: (B,) strings -> (B,) strings -> (B, words) strings.

It does what `BertNormalizer` and `BertPreTokenizer` of the `tokenizers` library do. FastBertTokenizer of
tensorflow-text differs from them in ß, ligatures, control characters and special tokens. Devlin et al. 2018,
arXiv:1810.04805.
"""

import re
from collections.abc import Callable
from itertools import islice

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
tf_text = Lazy("tensorflow_text", extra="text")

# Placeholders for the special tokens while a text is normalized: Unicode's noncharacters and, for a vocabulary that has
# these, characters of a plane in which none is assigned.
PLACEHOLDERS = [*range(0xFDD0, 0xFDF0), *range(0x40000, 0x4FFFE)]

# The characters that BERT deletes: control, format and private-use characters and U+FFFD, as of Unicode 8.0, but not
# tab and line breaks.
DELETED = (
    r"\x00-\x08\x0B\x0C\x0E-\x1F\x7F-\x9F\x{AD}\x{600}-\x{605}\x{61C}\x{6DD}\x{70F}\x{180E}\x{200B}-\x{200F}"
    r"\x{202A}-\x{202E}\x{2060}-\x{2064}\x{2066}-\x{206F}\x{E000}-\x{F8FF}\x{FEFF}\x{FFF9}-\x{FFFB}\x{FFFD}\x{110BD}"
    r"\x{1BCA0}-\x{1BCA3}\x{1D173}-\x{1D17A}\x{E0001}\x{E0020}-\x{E007F}\x{F0000}-\x{FFFFD}\x{100000}-\x{10FFFD}"
)
SPACE = r"\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"  # beyond ASCII
LOWER = {"İ": "i\u0307", "Σ": "σ"}  # for these ICU's result depends on the locale or on the neighbors
SURROGATES = r"\x{D800}-\x{DFFF}"  # RE2 accepts them as characters, UTF-8 does not
PUNCTUATION = r"!-/:-@\[-`{-~\p{P}\x{166D}\x{111C9}"
CHINESE = (
    r"\x{3400}-\x{4DBF}\x{4E00}-\x{9FFF}\x{F900}-\x{FAFF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B81F}"
    r"\x{2B920}-\x{2CEAF}\x{2F800}-\x{2FA1F}"
)


def unused_characters(vocabulary: list[str], count: int) -> list[str]:
    """So many of the `PLACEHOLDERS` that no token contains."""
    used = set("".join(vocabulary))
    return list(islice((character for character in map(chr, PLACEHOLDERS) if character not in used), count))


def normalize(texts: Tensor, stand_ins: dict[str, str], foreign: str, lowercase: bool, strip_accents: bool) -> Tensor:
    """Deletes control characters, strips accents, lowercases, and replaces special tokens by their placeholders.

    Args:
        texts: string tensor (B,), any bytes. What is not UTF-8 becomes U+FFFD, which is deleted.
        stand_ins: maps a special token to its placeholder, a character that no token contains.
        foreign: another such character, which replaces the placeholders that a text itself contains: a word with either
            is unknown.
        lowercase: whether to lowercase, character by character, so that neither a final sigma nor a Turkish locale
            changes the result.
        strip_accents: whether to decompose characters (NFD) and delete the nonspacing marks.

    Returns:
        String tensor (B,), valid UTF-8.
    """
    reserved = "".join(stand_ins.values())
    starts = "".join(sorted({re.escape(token[0]) for token in stand_ins}))

    def clean(texts: Tensor) -> Tensor:
        texts = tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8", errors="replace")
        texts = tf.strings.regex_replace(texts, f"[{reserved}]", foreign)
        for token, stand_in in sorted(stand_ins.items(), key=lambda pair: -len(pair[0])):
            texts = tf.strings.regex_replace(texts, re.escape(token), stand_in)
        texts = tf.strings.regex_replace(texts, f"[{DELETED}]+", "")
        texts = tf.strings.regex_replace(texts, f"[{SPACE}]+", " ")
        for upper, lower in LOWER.items() if lowercase else ():
            texts = tf.strings.regex_replace(texts, upper, lower)
        return texts

    def fold(texts: Tensor) -> Tensor:
        if strip_accents:
            texts = tf.strings.regex_replace(tf_text.normalize_utf8(texts, "NFD"), r"\p{Mn}+", "")
        if lowercase:
            texts = tf.strings.lower(tf.strings.lower(texts), encoding="utf-8")
        return texts

    rare = f"{starts}{reserved}{DELETED}{SPACE}{SURROGATES}{''.join(LOWER)}"
    texts = _change_where(~tf.strings.regex_full_match(texts, f"[^{rare}]*"), clean, texts)
    texts = tf.strings.lower(texts) if lowercase else texts  # ASCII only, so the locale does not matter
    return _change_where(~tf.strings.regex_full_match(texts, r"[\x00-\x7F]*"), fold, texts)


def split_words(texts: Tensor, stand_ins: dict[str, str], split_chinese: bool) -> Tensor:
    """Splits normalized strings (B,) at spaces into ragged (B, words).

    Each punctuation mark and placeholder is a word, and with `split_chinese` each Chinese character.
    """
    single = f"[{PUNCTUATION}{''.join(stand_ins.values())}{CHINESE if split_chinese else ''}]"
    return tf.strings.split(tf.strings.regex_replace(texts, single, r" \0 "))


def _change_where(rows: Tensor, function: Callable[[Tensor], Tensor], texts: Tensor) -> Tensor:
    """Applies `function` to the texts where `rows` is True, and only to these, to save time."""
    chosen = tf.where(rows)
    return tf.tensor_scatter_nd_update(texts, chosen, function(tf.gather_nd(texts, chosen)))

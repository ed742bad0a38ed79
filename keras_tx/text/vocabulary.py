"""Reads and trains WordPiece vocabularies: lists of tokens, in which the index of a token is its id.

Sennrich et al. 2016, arXiv:1508.07909 (merging frequent pairs); Devlin et al. 2018, arXiv:1810.04805 (WordPiece).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.text.python_inputs import is_encodable

tokenizers = Lazy("tokenizers", extra="text")

PREFIX = "##"  # marks a piece that continues a word
LONGEST = 256  # bytes of a token of WordPiece in TensorFlow Text, without the prefix
SPECIAL_TOKENS = {  # in the order of a trained vocabulary
    "pad_token": "[PAD]",
    "unknown_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def read_vocabulary(path: str | Path) -> list[str]:
    """Reads a vocab.txt: one token per line; the first line has the id 0. Empty lines at the end are ignored.

    Raises:
        ValueError: `path` is not a file.
    """
    if not Path(path).is_file():
        raise ValueError(f"`path` must be a vocabulary file, one token a line. Received: path={str(path)!r}")
    return Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n")


def check_vocabulary(vocabulary: Sequence[str], needed: dict[str, str], lines: bool = True) -> list[str]:
    """Checks a vocabulary and returns it as a list.

    Args:
        vocabulary: the tokens in the order of their ids.
        needed: maps an argument name to the special token that must be among them.
        lines: whether the tokens are those of a vocab.txt of WordPiece, each in one line.

    Raises:
        TypeError: the vocabulary is not a list of strings.
        ValueError: it is empty or lacks a special token; a token is repeated, empty or has a line break; or, with
            `lines`, TensorFlow Text cannot look it up.
    """
    if isinstance(vocabulary, (str, bytes)) or not isinstance(vocabulary, Iterable):
        raise TypeError(f"`vocabulary` must be a list of strings. Received: vocabulary={vocabulary!r:.200}")
    tokens = list(vocabulary)
    if not tokens:
        raise ValueError("`vocabulary` must not be empty. Received: vocabulary=[]")
    line_of: dict[str, int] = {}
    for line, token in enumerate(tokens, 1):
        if not isinstance(token, str):
            raise TypeError(f"`vocabulary` must be a list of strings. Received: line {line}={token!r:.200}")
        if not token or (lines and ("\n" in token or "\r" in token)):
            rule = "tokens of one line, not empty" if lines else "tokens that are not empty"
            raise ValueError(f"`vocabulary` must hold {rule}. Received: line {line}={token!r:.200}")
        if lines and ("\0" in token or len(token.removeprefix(PREFIX).encode("utf-8", "surrogatepass")) > LONGEST):
            raise ValueError(
                f"`vocabulary` must hold tokens of at most {LONGEST} bytes without the character '\\0', as TensorFlow "
                f"Text requires. Received: line {line}={token!r:.200}"
            )
        if token in line_of:
            raise ValueError(
                f"`vocabulary` must hold every token once. Received: {token!r:.99} in lines {line_of[token]} and {line}"
            )
        line_of[token] = line
    for argument, token in needed.items():
        if token not in line_of:
            raise ValueError(
                f"`vocabulary` must contain `{argument}`. Received: {argument}={token!r:.200}, "
                f"not among the {len(tokens)} tokens"
            )
    return tokens


def train_vocabulary(texts: Any, vocabulary_size: int, special_tokens: list[str], **normalizer: Any) -> list[str]:
    """Learns a vocabulary with the `tokenizers` library: special tokens, characters, then merges by frequency.

    The same texts give the same vocabulary in the same order. For that, every character gets its id beforehand: the
    library breaks ties by id, and would number the characters in the order of a randomly seeded hash map.

    Args:
        texts: iterable of str, or a `tf.data.Dataset` of strings, batched or not.
        vocabulary_size: the largest number of tokens; rare characters are left out if there are too many.
        special_tokens: the first tokens.
        normalizer: the options of `tokenizers.normalizers.BertNormalizer`.

    Raises:
        TypeError: a text is not a string.
        ValueError: there is no word in `texts`, or `vocabulary_size` is not larger than the number of special tokens.
    """
    vocabulary_size = checks.positive_int("vocabulary_size", vocabulary_size)
    if vocabulary_size <= len(special_tokens):
        raise ValueError(
            "`vocabulary_size` must be larger than the number of special tokens. "
            f"Received: vocabulary_size={vocabulary_size}, special tokens={special_tokens}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token=special_tokens[0]))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(clean_text=True, **normalizer)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for text in each_string(texts):
        normal = tokenizer.normalizer.normalize_str(text)
        words.update(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    if not words:
        raise ValueError(f"`texts` must hold at least one word. Received: texts={texts!r:.200}")
    alphabet, continued = _alphabet(words, vocabulary_size - len(special_tokens))
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=[*special_tokens, *alphabet, *(PREFIX + c for c in continued)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.normalizer = None  # the words are normalized already
    tokenizer.train_from_iterator(_repeated(words), trainer, length=words.total())
    id_of = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(id_of, key=id_of.__getitem__)


def _alphabet(words: Counter[str], room: int) -> tuple[list[str], list[str]]:
    """The most frequent characters, and those of them that continue a word; sorted, together at most `room`."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    continuing = {character for word in words for character in word[1:]}
    kept: list[str] = []
    for character, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        room -= 1 + (character in continuing)
        if room < 0:
            break
        kept.append(character)
    return sorted(kept), sorted(continuing.intersection(kept))


def each_string(texts: Any) -> Iterator[str]:
    """The strings of an iterable, or of a `tf.data.Dataset`, batched or not. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        TypeError: an item is not a string, or one that UTF-8 cannot encode.
    """
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise TypeError(f"`texts` must be an iterable of strings, not one string. Received: texts={texts!r:.200}")
    items = texts.as_numpy_iterator() if hasattr(texts, "as_numpy_iterator") else texts
    for item in items:
        for text in np.ravel(item) if isinstance(item, np.ndarray) else [item]:
            if not isinstance(text, (str, bytes)):
                raise TypeError(f"`texts` must hold strings. Received: {text!r:.200}")
            string = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            if not is_encodable(string):
                raise TypeError(f"`texts` must hold strings that UTF-8 can encode. Received: {text!r:.200}")
            yield string


def _repeated(words: Counter[str]) -> Iterator[str]:
    for word in sorted(words):
        yield from [word] * words[word]

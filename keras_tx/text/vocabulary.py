"""Reads and trains WordPiece vocabularies: lists of tokens, in which the index of a token is its id.

Sennrich et al. 2016, arXiv:1508.07909 (merging frequent pairs); Devlin et al. 2018, arXiv:1810.04805 (WordPiece).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import checks, progress
from keras_tx.optional import Lazy
from keras_tx.text.python_inputs import is_encodable

tokenizers = Lazy("tokenizers", extra="text")

MOST_PARTS = 2**20  # different parts of texts that are counted
REPEATED = 1000  # words in a string
BATCH = 256  # texts that come from tf.data at a time
PREFIX = "##"  # marks a piece that continues a word
MAX_CHARACTERS = 100  # longer words become the unknown token
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
        ValueError: `path` is not a file, or is not in UTF-8.
    """
    if not Path(path).is_file():
        raise ValueError(f"`path` must be a vocabulary file, one token a line. Received: path={str(path)!r}")
    try:
        return Path(path).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"`path` must be a vocabulary file in UTF-8. Received: path={str(path)!r}: {error}") from error


def check_vocabulary(vocabulary: Sequence[str], needed: dict[str, str], lines: bool = True) -> list[str]:
    """Checks a vocabulary and returns it as a list.

    Args:
        vocabulary: the tokens in the order of their ids.
        needed: maps an argument name to the special token that must be among them.
        lines: whether the tokens are those of a vocab.txt of WordPiece, each in one line.

    Raises:
        TypeError: the vocabulary is not a list of strings.
        ValueError: it is empty or lacks a special token; a token is repeated, empty, has a line break or is not valid
            Unicode; or, with `lines`, TensorFlow Text cannot look it up.
    """
    if isinstance(vocabulary, (str, bytes, Mapping, Set)) or not isinstance(vocabulary, Iterable):
        rule = "a list of strings"
        if isinstance(vocabulary, (Mapping, Set)):
            rule += " in the order of their ids"
        if isinstance(vocabulary, Mapping):
            rule += ", as `sorted(ids, key=ids.get)` is for a dict of ids"
        raise TypeError(f"`vocabulary` must be {rule}. Received: vocabulary={vocabulary!r:.200}")
    tokens = list(vocabulary)
    if not tokens:
        raise ValueError("`vocabulary` must not be empty. Received: vocabulary=[]")
    line_of: dict[str, int] = {}
    for line, token in enumerate(tokens, 1):
        if not isinstance(token, str):
            raise TypeError(f"`vocabulary` must be a list of strings. Received: line {line}={token!r:.200}")
        if not is_encodable(token):
            raise ValueError(f"`vocabulary` must hold strings that UTF-8 can encode. Received: line {line}={token!r}")
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


def train_vocabulary(
    texts: Any, vocabulary_size: int, special_tokens: list[str], verbose: Any = 0, **normalizer: Any
) -> list[str]:
    """Learns a vocabulary with the `tokenizers` library: special tokens, characters, then merges by frequency.

    The same texts give the same vocabulary in the same order. For that, every character gets its id beforehand: the
    library breaks ties by id, and would number the characters in the order of a randomly seeded hash map.

    Args:
        texts: iterable of str, or a `tf.data.Dataset` of strings, batched or not.
        vocabulary_size: the largest number of tokens; rare characters are left out if there are too many.
        special_tokens: the first tokens.
        verbose: whether to show the number of texts while they are read.
        normalizer: the options of `tokenizers.normalizers.BertNormalizer`.

    Raises:
        TypeError: a text is not a string.
        ValueError: `texts` have no word of at most 100 characters, or `vocabulary_size` is not larger than the number
            of special tokens.
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
    words = count_words(progress.shown(each_string(texts), "text", verbose), tokenizer)
    words = Counter({word: count for word, count in words.items() if len(word) <= MAX_CHARACTERS})
    if not words:
        raise ValueError(
            f"`texts` must hold at least one word of at most {MAX_CHARACTERS} characters. Received: "
            f"texts={texts!r:.200}"
        )
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
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # and they are words
    tokenizer.train_from_iterator(_repeated(_cut(words)), trainer)
    id_of = tokenizer.get_vocab(with_added_tokens=True)
    return sorted(id_of, key=id_of.__getitem__)


def count_words(texts: Iterable[str], tokenizer: Any) -> Counter[str]:
    """How often each word occurs that the normalizer and the pre-tokenizer of a `tokenizers.Tokenizer` find.

    No word of BERT spans a space and none depends on what is beyond one, so every string between spaces is normalized
    and split only once.
    """
    words: Counter[str] = Counter()
    for chunk, count in frequent_parts(text.split(" ") for text in texts).items():
        normal = tokenizer.normalizer.normalize_str(chunk)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal):
            words[word] += count
    return words


def frequent_parts(texts: Iterable[Iterable[str]], most: int = MOST_PARTS) -> Counter[str]:
    """How often each part occurs. With more than `most` different parts, the rarest so far are forgotten.

    Args:
        texts: the parts of each text.
        most: the number of different parts that are counted, which bounds the memory. Whenever there are more, as many
            of the rarest are forgotten that half of `most` remain; of those that are equally rare, the first ones.
    """
    counts: Counter[str] = Counter()
    for parts in texts:
        counts.update(parts)
        if len(counts) > most:
            values = np.fromiter(counts.values(), "int64", len(counts))
            limit = np.partition(values, -(most // 2) - 1)[-(most // 2) - 1]
            kept = {part: count for part, count in counts.items() if count > limit}
            ties = (part for part, count in counts.items() if count == limit)
            counts = Counter(kept | {part: int(limit) for part in islice(ties, most // 2 - len(kept))})
    return counts


def _cut(words: Counter[str]) -> Counter[str]:
    """The words, cut to at most `LONGEST` bytes, so that no token becomes longer."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        counts[word.encode()[:LONGEST].decode(errors="ignore")] += count
    return counts


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
    items: Any = texts
    if hasattr(texts, "as_numpy_iterator"):
        is_scalar = getattr(getattr(texts, "element_spec", None), "shape", None) == ()
        items = (items.batch(BATCH) if is_scalar else items).as_numpy_iterator()  # one by one takes ten times longer
    for item in items:
        for text in np.ravel(item) if isinstance(item, np.ndarray) else [item]:
            if not isinstance(text, (str, bytes)):
                raise TypeError(f"`texts` must hold strings. Received: {text!r:.200}")
            string = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            if not is_encodable(string):
                raise TypeError(f"`texts` must hold strings that UTF-8 can encode. Received: {text!r:.200}")
            yield string


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Each word as often as it occurs, many in one string, because the library takes long for each string."""
    for word in sorted(words):
        for start in range(0, words[word], REPEATED):
            yield " ".join([word] * min(REPEATED, words[word] - start))

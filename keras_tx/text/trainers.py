"""Learns vocabularies of words, characters, byte pairs and SentencePiece's pieces from texts.

Each function returns the content of a tokenizer.json; the same texts always give the same one. Sennrich et al. 2016,
arXiv:1508.07909; Kudo and Richardson 2018, arXiv:1808.06226.
"""

import io
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from keras_tx import checks, progress
from keras_tx.optional import Lazy
from keras_tx.text.byte_pair_graph import BYTES, WITHOUT_FIRST_SPACE
from keras_tx.text.definition import build_definition
from keras_tx.text.sentencepiece_model import BYTE_PIECES, SPACE, merges_of, read_model
from keras_tx.text.tokenizer_json import parse_tokenizer_json
from keras_tx.text.vocabulary import each_string, frequent_parts
from keras_tx.text.word_level_graph import EACH_CHARACTER

tokenizers = Lazy("tokenizers", extra="text")
sentencepiece = Lazy("sentencepiece", extra="text")

COVERAGE = 0.9995  # of the characters of all texts; the others are rare and become bytes
# SentencePiece trains line by line, reserves some characters, and stops a text at a zero byte.
CUTS = r"[\n\r\t\0▁▅]|(?<=<)(?=0x)"  # also within "<0x41>", which is the name of a byte
LONGEST_LINE = 2**30  # bytes


def train_words(
    texts: Any,
    vocabulary_size: int,
    min_frequency: int,
    special: dict[str, str],
    steps: dict[str, Any],
    split_special_tokens: bool,
    verbose: Any = 0,
) -> dict[str, Any]:
    """Learns the most frequent words; of equally frequent ones the first in the order of the code points.

    Args:
        texts: iterable of str, or a `tf.data.Dataset` of strings.
        vocabulary_size: the largest number of tokens.
        min_frequency: how often a word must occur.
        special: the special tokens, which come first.
        steps: the normalizer and the pre-tokenizer, in the form of a tokenizer.json.
        split_special_tokens: whether the special tokens in `texts` are split into words.
        verbose: whether to show the number of texts while they are read, in all these functions.
    """
    room = _room(vocabulary_size, special)
    frequency = checks.positive_int("min_frequency", min_frequency)
    empty = build_definition(_words_model(special, []), special, **steps)
    tokenizer = parse_tokenizer_json(json.dumps(empty), "normalizer and pre_tokenizer")
    tokenizer.encode_special_tokens = checks.boolean("split_special_tokens", split_special_tokens)
    trainer = tokenizers.trainers.WordLevelTrainer(
        vocab_size=vocabulary_size, min_frequency=frequency, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(progress.shown(each_string(texts), "text", verbose), trainer)
    id_of = tokenizer.get_vocab(with_added_tokens=False)
    words = [word for word in sorted(id_of, key=id_of.__getitem__) if word not in special.values()][:room]
    if not words:
        raise ValueError(_too_rare("a word", texts, frequency))
    return build_definition(_words_model(special, words), special, **steps)


def train_characters(
    texts: Any, vocabulary_size: int | None, min_frequency: int, special: dict[str, str], verbose: Any = 0
) -> dict[str, Any]:
    """Learns the most frequent characters; the arguments are those of `train_words`. No size: all characters."""
    room = None if vocabulary_size is None else _room(vocabulary_size, special)
    frequency = checks.positive_int("min_frequency", min_frequency)
    counts: Counter[str] = Counter()
    for text in progress.shown(each_string(texts), "text", verbose):
        counts.update(text)
    characters = [character for character in _by_frequency(counts) if counts[character] >= frequency][:room]
    if not characters:
        raise ValueError(_too_rare("a character", texts, frequency))
    return character_definition(_words_model(special, characters), special)


def character_definition(model: dict[str, Any], special: dict[str, str]) -> dict[str, Any]:
    """The content of a tokenizer.json with one id for each character."""
    return build_definition(model, special, pre_tokenizer=EACH_CHARACTER, decoder={"type": "Fuse"})


def train_byte_pairs(
    texts: Any,
    vocabulary_size: int,
    min_frequency: int,
    special: dict[str, str],
    verbose: Any = 0,
    add_prefix_space: bool = False,
) -> dict[str, Any]:
    """Learns merges of bytes, as for GPT-2; the vocabulary is the special tokens, the 256 bytes, then the merges.

    Args:
        texts: iterable of str, or a `tf.data.Dataset` of strings.
        vocabulary_size: the largest number of tokens.
        min_frequency: how often a pair must occur.
        special: the special tokens, which come first. Texts are split at them, so no merge gives one.
        verbose: 1 shows a progress bar, 0 does not.
        add_prefix_space: whether a space is put before every text, and taken off what is decoded.
    """
    _room(vocabulary_size, special, len(BYTES))
    frequency = checks.positive_int("min_frequency", min_frequency)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    # The argument of `ByteLevel` itself adds none to a text that begins with a space, which would not come back.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if checks.boolean("add_prefix_space", add_prefix_space):
        tokenizer.normalizer = tokenizers.normalizers.Prepend(" ")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=frequency,
        special_tokens=list(dict.fromkeys(special.values())),
        initial_alphabet=BYTES,
        show_progress=False,
    )
    lines = _parts_of(texts, special, verbose)
    tokenizer.train_from_iterator(lines, trainer)
    trained = json.loads(tokenizer.to_str())
    if len(trained["model"]["vocab"]) == len(BYTES) + len(set(special.values())):
        raise ValueError(_too_rare("two bytes together", texts, frequency))
    learned = {"".join(merge) for merge in trained["model"]["merges"]}
    for name, token in special.items():
        if token in learned:
            raise ValueError(
                f"`{name}` must not be spelled as a learned token is, with {BYTES[ord(' ')]!r} for a space. Received: "
                f"{name}={token!r}"
            )
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    if add_prefix_space:
        decoder = {"type": "Sequence", "decoders": [decoder, WITHOUT_FIRST_SPACE]}
    return build_definition(
        trained["model"],
        special,
        normalizer=trained["normalizer"],
        pre_tokenizer=trained["pre_tokenizer"],
        decoder=decoder,
    )


def train_pieces(texts: Any, vocabulary_size: int, special: dict[str, str], verbose: Any = 0) -> dict[str, Any]:
    """Learns merges of characters by SentencePiece; the vocabulary is the special tokens, 256 bytes, then the pieces.

    Spaces are characters of pieces like any other, and characters without a piece become bytes, so that every text
    comes back from its ids.

    Args:
        texts: iterable of str, or a `tf.data.Dataset` of strings.
        vocabulary_size: the largest number of tokens. Rare characters are left out if there are too many.
        special: the special tokens, which come first. Texts are split at them, so no merge gives one.
    """
    room = _room(vocabulary_size, special, len(BYTE_PIECES))
    words = frequent_parts(
        _words_with_spaces(part) for text in _parts_of(texts, special, verbose) for part in re.split(CUTS, text) if part
    )
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    kept, total = set[str](), 0
    for character in _by_frequency(counts)[:room]:
        if total >= COVERAGE * counts.total():
            break
        kept.add(character)
        total += counts[character]
    if not kept:
        raise ValueError(f"`texts` must hold at least one character. Received: texts={reprlib.repr(texts)}")
    rare = "".join(re.escape(character) for character in counts if character not in kept)
    if rare:
        whole, words = words, Counter()
        for word, count in whole.items():
            for part in filter(None, re.split(f"[{rare}]", word)):
                words[part] += count
    pieces = [piece for piece in _train_sentencepiece(words, room) if piece not in BYTE_PIECES]
    vocabulary = [*dict.fromkeys(special.values()), *BYTE_PIECES, *pieces]
    id_of = {token: i for i, token in enumerate(vocabulary)}
    merges = merges_of(id_of, {*special.values(), *BYTE_PIECES})
    model = {"type": "BPE", "vocab": id_of, "merges": merges, "byte_fallback": True}
    unknown = {"unk_token": special.get("unknown_token"), "fuse_unk": False, "ignore_merges": False}
    affixes = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    steps = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    return build_definition(model | unknown | affixes, special, decoder=steps)


def _words_with_spaces(line: str) -> list[str]:
    """Splits as SentencePiece does: every space begins a word."""
    first, *others = line.split(" ")
    return [*([first] if first else []), *(" " + other for other in others)]


def _train_sentencepiece(words: Counter[str], room: int) -> list[str]:
    """The pieces that SentencePiece learns, in the order of their ids, with spaces as they are; without "<unk>"."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{words[word]}" for word in sorted(words)),
        input_format="tsv",
        model_writer=file,
        model_type="bpe",
        vocab_size=1 + len(BYTE_PIECES) + room,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        max_sentence_length=LONGEST_LINE,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    proto = read_model(file.getvalue(), "texts")
    return [piece.piece.replace(SPACE, " ") for piece in proto.pieces[1:]]


def _room(vocabulary_size: int, special: dict[str, str], fixed: int = 0) -> int:
    """How many tokens a vocabulary has beside the special tokens and `fixed` others."""
    size: int = checks.positive_int("vocabulary_size", vocabulary_size)
    tokens = list(dict.fromkeys(special.values()))
    if size <= len(tokens) + fixed:
        others = f" and {fixed} bytes" if fixed else ""
        raise ValueError(
            f"`vocabulary_size` must be larger than {len(tokens) + fixed}, for the special tokens{others}. "
            f"Received: vocabulary_size={vocabulary_size}, special tokens={tokens}"
        )
    return size - len(tokens) - fixed


def _too_rare(what: str, texts: Any, frequency: int) -> str:
    received = f"texts={reprlib.repr(texts)}, min_frequency={frequency}"
    return f"`texts` must hold {what} at least `min_frequency` times. Received: {received}"


def _words_model(special: dict[str, str], words: list[str]) -> dict[str, Any]:
    id_of = {token: i for i, token in enumerate(dict.fromkeys([*special.values(), *words]))}
    return {"type": "WordLevel", "vocab": id_of, "unk_token": special["unknown_token"]}


def _by_frequency(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda character: (-counts[character], character))


def _parts_of(texts: Any, special: dict[str, str], verbose: Any) -> Iterator[str]:
    """The texts, split at the special tokens."""
    tokens = sorted(special.values(), key=lambda token: -len(token))
    pattern = re.compile("|".join(map(re.escape, tokens)) or r"\Z\A")
    for text in progress.shown(each_string(texts), "text", verbose):
        yield from filter(None, pattern.split(text))

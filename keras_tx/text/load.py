"""Loads the tokenizer of a Hugging Face directory."""

from pathlib import Path
from typing import Any

from keras_tx.text.base import Tokenizer
from keras_tx.text.bert import BertTokenizer
from keras_tx.text.byte_pair import BytePairTokenizer, is_byte_level
from keras_tx.text.character import CharacterTokenizer
from keras_tx.text.files import folder_of, read_json
from keras_tx.text.marian import MarianTokenizer
from keras_tx.text.sentence_piece import SentencePieceTokenizer, is_sentence_piece
from keras_tx.text.word_level import WordLevelTokenizer
from keras_tx.text.word_level_graph import is_character_level, is_word_level

# The first of these files that a directory contains determines the class; for tokenizer.json, its content does.
FILES: dict[str, type[Tokenizer] | None] = {
    "source.spm": MarianTokenizer,
    "target.spm": MarianTokenizer,
    "tokenizer.json": None,
    "merges.txt": BytePairTokenizer,
    "spiece.model": SentencePieceTokenizer,
    "sentencepiece.bpe.model": SentencePieceTokenizer,
    "tokenizer.model": SentencePieceTokenizer,
    "vocab.txt": BertTokenizer,
}


def load_tokenizer(directory: str | Path, **overrides: Any) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face directory, of any kind.

    Args:
        directory: a directory with tokenizer.json; or with vocab.txt; or vocab.json and merges.txt; or spiece.model,
            sentencepiece.bpe.model or tokenizer.model; or source.spm, target.spm and vocab.json. If it contains
            several of these, Marian's come first, then tokenizer.json.
        overrides: arguments of the tokenizer's constructor that replace those of the directory, such as
            `pad_token="<|endoftext|>"` for GPT-2, which has no padding token.

    Returns:
        A `BertTokenizer`, `BytePairTokenizer`, `SentencePieceTokenizer`, `MarianTokenizer`, `WordLevelTokenizer` or
        `CharacterTokenizer`.

    Raises:
        ValueError: the directory does not exist, contains no tokenizer or one of another kind, or a file is malformed.

    Examples:
        >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hot", "dog", "##s"]
        >>> keras_tx.text.BertTokenizer(vocabulary).save("my-bert")
        >>> tokenizer = keras_tx.text.load_tokenizer("my-bert", max_length=5)
        >>> type(tokenizer).__name__, tokenizer.vocabulary_size, tokenizer.max_length
        ('BertTokenizer', 8, 5)
    """
    folder = folder_of(directory)
    file = next((name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        names = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"`directory` must contain one of {list(FILES)}. Received: directory={str(directory)!r}, "
            f"which contains {names}"
        )
    return (FILES[file] or _class_of(folder / file)).from_pretrained(folder, **overrides)


def _class_of(path: Path) -> type[Tokenizer]:
    """The class for the kind of tokenizer that a tokenizer.json defines."""
    parts = read_json(path)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if not isinstance(parts.get(name), (dict, type(None))):
            raise ValueError(f"`directory` must describe its {name}. Received: {parts[name]!r:.200} in {path}")
    model = parts.get("model")
    if isinstance(model, dict):
        kind = model.get("type") or _kind_without_type(model)
        typed = parts | {"model": model | {"type": kind}}
        if kind == "WordPiece":
            return BertTokenizer
        if is_byte_level(typed):
            return BytePairTokenizer
        if is_sentence_piece(typed):
            return SentencePieceTokenizer
        if is_word_level(typed):
            return CharacterTokenizer if is_character_level(typed) else WordLevelTokenizer
    else:
        kind = None
    raise ValueError(
        "`directory` must hold WordLevel, WordPiece, byte-level BPE, or SentencePiece's Unigram or BPE in "
        "tokenizer.json. "
        f"Received: model.type={kind!r:.200}, decoder={parts.get('decoder')!r:.200} in {path}"
    )


def _kind_without_type(model: dict[str, Any]) -> str | None:
    """The type of a model in a file of an old version of `tokenizers`, which did not store the type."""
    if "merges" in model:
        return "BPE"
    if "max_input_chars_per_word" in model:
        return "WordPiece"
    return "WordLevel" if isinstance(model.get("vocab"), dict) and "unk_token" in model else None

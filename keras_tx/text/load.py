"""A Hugging Face directory -> the tokenizer that its files describe."""

from pathlib import Path

from keras_tx.text.base import Tokenizer
from keras_tx.text.bert import BertTokenizer
from keras_tx.text.byte_pair import BytePairTokenizer, is_byte_level
from keras_tx.text.files import folder_of, read_json
from keras_tx.text.marian import MarianTokenizer
from keras_tx.text.sentence_piece import SentencePieceTokenizer, is_sentence_piece

# The first of these files that a directory holds decides; tokenizer.json says itself what it is.
FILES = {
    "source.spm": MarianTokenizer,
    "target.spm": MarianTokenizer,
    "tokenizer.json": None,
    "merges.txt": BytePairTokenizer,
    "spiece.model": SentencePieceTokenizer,
    "sentencepiece.bpe.model": SentencePieceTokenizer,
    "tokenizer.model": SentencePieceTokenizer,
    "vocab.txt": BertTokenizer,
}


def load_tokenizer(directory: str | Path, **overrides) -> BertTokenizer | Tokenizer:
    """Reads the tokenizer of a Hugging Face directory, whatever its kind.

    ```python
    tokenizer = load_tokenizer("gpt2", pad_token="<|endoftext|>")  # a BytePairTokenizer
    ```

    Args:
        directory: with tokenizer.json; or vocab.txt, vocab.json and merges.txt, spiece.model, sentencepiece.bpe.model
            or tokenizer.model; or source.spm, target.spm and vocab.json.
        overrides: arguments of the tokenizer's constructor.

    Returns:
        A `BertTokenizer`, `BytePairTokenizer`, `SentencePieceTokenizer` or `MarianTokenizer`.

    Raises:
        ValueError: the directory is missing, holds no tokenizer or one of another kind, or a file is malformed.
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


def _class_of(path: Path) -> type[BertTokenizer] | type[Tokenizer]:
    parts = read_json(path)
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
    else:
        kind = None
    raise ValueError(
        "`directory` must hold WordPiece, byte-level BPE, or SentencePiece's Unigram or BPE in tokenizer.json. "
        f"Received: model.type={kind!r}, decoder={parts.get('decoder')!r} in {path}"
    )


def _kind_without_type(model: dict) -> str | None:
    """The type of a model that an old version of `tokenizers` wrote."""
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "max_input_chars_per_word" in model else None

"""Marian's tokenizer, two SentencePiece models over one vocabulary: (B,) strings -> (B, T) ids -> (B,) strings.

Junczys-Dowmunt et al. 2018, arXiv:1804.00344; Kudo and Richardson 2018, arXiv:1808.06226.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import keras

from keras_tx import json_text
from keras_tx.optional import Lazy
from keras_tx.text.files import read_settings, read_vocabulary_json, tokens_in_order, write_tokenizer
from keras_tx.text.library_tokenizer import LibraryTokenizer
from keras_tx.text.sentencepiece_graph import MarianGraph
from keras_tx.text.sentencepiece_model import SPACE, read_model
from keras_tx.text.template import Template
from keras_tx.types import Tensor

sentencepiece = Lazy("sentencepiece", extra="text")


@keras.saving.register_keras_serializable(package="keras_tx")
class MarianTokenizer(LibraryTokenizer):
    """Marian's tokenizer: two SentencePiece models, for source and target language, with a common vocabulary.

    `__call__`, `tokenize` and `decode` use the model of the source language; the attribute `target` is the tokenizer
    for the target language. A source text may begin with the code of a target language, such as ">>fra<<", if the
    vocabulary has it.

    Outside a graph it uses the `sentencepiece` library and returns NumPy arrays, lists and `str`. It also runs in a
    TensorFlow graph. The ids in a graph were compared with those of `sentencepiece`: they are equal for 69,250
    sentences, for all but 1 of 933,634 strings with one Unicode character each and for all but 5 of 20,000 random
    strings. In the exceptions two splits have the same score, such as "l ll" and "ll l".

    Args:
        source_model: the content of source.spm, as bytes or in base64.
        target_model: the content of target.spm, likewise.
        vocabulary: maps the tokens of both languages to ids, or lists them in the order of their ids.
        max_length: the default for the largest number of tokens in a row, special tokens included. 512, because
            Marian's models have 512 positions. None: no limit.
        truncation_side: "right" or "left", the side on which rows that are too long are truncated.
        clean_up_tokenization_spaces: whether `decode` removes the spaces before punctuation by default.
        unknown_token: the token for pieces that are not in the vocabulary.
        pad_token: the token that pads shorter rows. In transformers it also begins the target sequence.
        sep_token: the token at the end of every row.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a model or the vocabulary is malformed, or a special token is not in the vocabulary.

    Reference:
        Junczys-Dowmunt et al. 2018, arXiv:1804.00344; Kudo and Richardson 2018, arXiv:1808.06226.

    Examples:
        >>> import io, sentencepiece
        >>> def train(texts):
        ...     model, options = io.BytesIO(), {"vocab_size": 30, "hard_vocab_limit": False, "minloglevel": 2}
        ...     sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
        ...     return model.getvalue()
        >>> english, german = train(["a dog runs", "a dog sleeps"]), train(["ein Hund rennt", "ein Hund"])
        >>> pieces = set()
        >>> for model in (english, german):
        ...     processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        ...     pieces |= {processor.id_to_piece(id) for id in range(3, processor.get_piece_size())}
        >>> vocabulary = ["</s>", "<unk>", *sorted(pieces), "<pad>"]
        >>> tokenizer = keras_tx.text.MarianTokenizer(english, german, vocabulary)
        >>> source = tokenizer(["a dog sleeps", "a dog"])["token_ids"]
        >>> tokenizer.decode(source)
        ['a dog sleeps', 'a dog']
        >>> tokenizer.target.decode(tokenizer.target("ein Hund")["token_ids"])
        'ein Hund'
    """

    def __init__(
        self,
        source_model: bytes | str,
        target_model: bytes | str,
        vocabulary: Mapping[str, int] | Sequence[str],
        *,
        max_length: int | None = 512,
        truncation_side: str = "right",
        clean_up_tokenization_spaces: bool = False,
        unknown_token: str = "<unk>",
        pad_token: str = "<pad>",
        sep_token: str = "</s>",
    ) -> None:
        self.source_model = _model_bytes("source_model", source_model)
        self.target_model = _model_bytes("target_model", target_model)
        if isinstance(vocabulary, (str, bytes)) or not isinstance(vocabulary, (Mapping, Sequence)):
            raise TypeError(f"`vocabulary` must map tokens to ids. Received: a {type(vocabulary).__name__}")
        if not isinstance(vocabulary, Mapping):
            vocabulary = {token: i for i, token in enumerate(vocabulary)}
        tokens = tokens_in_order(dict(vocabulary), "vocabulary")
        end = Template(after=(int(vocabulary.get(sep_token, 0)),))
        named: dict[str, str | None] = {"unknown_token": unknown_token, "pad_token": pad_token, "cls_token": None}
        super().__init__(
            tokens,
            end,
            None,
            max_length=max_length,
            truncation_side=truncation_side,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            special_tokens=named | {"sep_token": sep_token, "mask_token": None},
        )
        # The longest special token first, because the first alternative that matches is taken.
        special = sorted(self.special_tokens.values(), key=lambda token: -len(token))
        self._special_pattern = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    @cached_property
    def target(self) -> Self:
        """The tokenizer of the target language: the same vocabulary with `target_model`."""
        return type(self)(**(self.get_config() | {"source_model": self.target_model}))

    def save(self, directory: str | Path) -> None:
        """Writes source.spm, target.spm, vocab.json and tokenizer_config.json, which transformers can load too.

        They replace the tokenizer that the directory has: files that would be loaded instead are removed.
        """
        config: dict[str, Any] = {"tokenizer_class": "MarianTokenizer", "model_max_length": self.max_length or 10**30}
        tokens = self.special_tokens
        config |= {"unk_token": tokens["unknown_token"], "pad_token": tokens["pad_token"]}
        config |= {"eos_token": tokens["sep_token"], "truncation_side": self.truncation_side}
        config["clean_up_tokenization_spaces"] = self.clean_up_tokenization_spaces
        files: dict[str, str | bytes] = {"source.spm": self.source_model, "target.spm": self.target_model}
        files |= {"vocab.json": json_text.of_file(self._id_of), "tokenizer_config.json": json_text.of_file(config)}
        write_tokenizer(directory, files)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor; the models in base64."""
        models = {"source_model": self.source_model, "target_model": self.target_model}
        config = self._common_config()
        del config["cls_token"], config["mask_token"]
        encoded = {name: base64.b64encode(model).decode("ascii") for name, model in models.items()}
        return encoded | {"vocabulary": self.vocabulary} | config

    @classmethod
    def _read_arguments(cls, folder: Path) -> dict[str, Any]:
        missing = [name for name in ("source.spm", "target.spm", "vocab.json") if not (folder / name).is_file()]
        if missing:
            names = sorted(path.name for path in folder.iterdir())
            raise ValueError(f"`directory` must contain {missing}. Received: {folder}, which contains {names}")
        settings = read_settings(folder)
        vocabulary = read_vocabulary_json(folder / "vocab.json")
        models = {f"{side}_model": (folder / f"{side}.spm").read_bytes() for side in ("source", "target")}
        for side in ("source", "target"):
            read_model(models[f"{side}_model"], folder / f"{side}.spm")
        known = {"unk_token": "unknown_token", "pad_token": "pad_token", "eos_token": "sep_token"}
        tokens = {ours: settings.tokens[theirs] for theirs, ours in known.items() if theirs in settings.tokens}
        for token in settings.added:
            flags = [name for name in ("single_word", "lstrip", "rstrip") if token[name]]
            if token["content"] not in {"<unk>", "<pad>", "</s>", *tokens.values()} or flags:
                raise ValueError(
                    f"`directory` must have no special tokens except Marian's three. Received: {token} in {folder}"
                )
            if token["id"] not in (None, vocabulary.get(token["content"])):
                raise ValueError(
                    f"`directory` must have the same token ids in all files. Received: {token} in {folder}"
                )
        return {"max_length": 512, **models, "vocabulary": vocabulary} | settings.options | tokens

    @property
    def not_in_graph(self) -> None:
        """Always None: the tokenizer runs in every TensorFlow graph."""
        return None

    @cached_property
    def _graph(self) -> MarianGraph:
        decode = self._processor.decode_pieces
        return MarianGraph(self.source_model, self.vocabulary, self._special_ids(), self.unknown_id, decode)

    def _graph_encode(self, texts: Tensor) -> Tensor:
        return self._graph.encode(texts)

    def _graph_decode(self, ids: Tensor) -> Tensor:
        return self._graph.decode(ids)

    @cached_property
    def _processor(self) -> Any:
        return sentencepiece.SentencePieceProcessor(model_proto=self.source_model)

    def _special_ids(self) -> set[int]:
        return {self._id_of[token] for token in self.special_tokens.values()}

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [[self._id_of.get(piece, self.unknown_id) for piece in self._pieces(text)] for text in texts]

    def _pieces(self, text: str) -> list[str]:
        found: list[str] = []
        for i, part in enumerate(self._special_pattern.split(text)):
            if i % 2:
                found.append(part)
            elif part:
                code = re.match(r">>.*?<<", part, re.DOTALL)
                found += [code.group()] if code else []
                found += self._processor.encode(part[code.end() :] if code else part, out_type=str)
        return found

    def _decode(self, rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        special = self._special_ids()
        return [self._join([i for i in row if not (skip_special_tokens and i in special)], special) for row in rows]

    def _join(self, ids: list[int], special: set[int]) -> str:
        text, pieces = "", list[str]()
        for i in ids:
            if i in special:
                text += self._processor.decode_pieces(pieces) + self.vocabulary[i] + " "
                pieces = []
            else:
                pieces.append(self.vocabulary[i])
        text += str(self._processor.decode_pieces(pieces))
        return text.replace(SPACE, " ").strip()


def _model_bytes(name: str, model: bytes | str) -> bytes:
    """Checks a SentencePiece model, given as bytes or in base64, and returns its bytes."""
    if not isinstance(model, (bytes, str)):
        raise TypeError(f"`{name}` must be the bytes of a SentencePiece model. Received: a {type(model).__name__}")
    if isinstance(model, str):
        try:
            model = base64.b64decode(model, validate=True)
        except ValueError as error:
            raise ValueError(f"`{name}` must be bytes, or those in base64. Received: {model[:20]!r}...") from error
    read_model(model, name)
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"`{name}` must be a SentencePiece model that can be run. Received: {error}") from error
    return model

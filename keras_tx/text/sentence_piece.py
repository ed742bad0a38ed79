"""SentencePiece, as in T5, XLM-RoBERTa and Llama 2: (B,) strings -> (B, T) ids -> strings.

Kudo and Richardson 2018, arXiv:1808.06226; Unigram: Kudo 2018, arXiv:1804.10959.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Self

import keras

from keras_tx.text.byte_pair import is_byte_level
from keras_tx.text.definition import OF_PIECES, model_and_decoder, special_tokens
from keras_tx.text.files import read_settings
from keras_tx.text.json_tokenizer import JsonTokenizer, constructor_arguments
from keras_tx.text.sentencepiece_graph import SentencePieceGraph
from keras_tx.text.sentencepiece_model import check_normalizer, unsupported_parts
from keras_tx.text.tokenizer_json import read_sentencepiece_model, read_tokenizer_json
from keras_tx.text.trainers import train_pieces
from keras_tx.types import Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class SentencePieceTokenizer(JsonTokenizer):
    """A SentencePiece tokenizer: Unigram (T5, XLM-RoBERTa) or byte-pair encoding over characters (Llama 2).

    Outside a graph it uses the `tokenizers` library and returns NumPy arrays, lists and `str`. In a TensorFlow graph it
    supports Unigram models that split texts at spaces, with a space before each word (T5, XLM-RoBERTa, CamemBERT), and
    byte-pair encoding with all merges that the vocabulary allows (Llama 2, and what `train` learns); for any other
    definition, `not_in_graph` has the reason.

    The ids and texts in a graph were compared with those of `tokenizers` on 69,250 sentences, on 933,634 strings with
    one Unicode character each and on 20,000 random strings. For Llama 2 they are equal. For T5 they are equal except
    for 41 of the random strings, in which `tokenizers` treats some combining marks differently from SentencePiece
    itself, and so from the graph. If two splits of a text have the same score, either may be chosen.

    Most users construct it by `from_pretrained(directory)`, `load_tokenizer(directory)` or `train(texts, ...)`.

    Args:
        definition: the content of a tokenizer.json, as a string or as the dict that `json.load` returns.
        max_length: the default for the largest number of tokens in a row, special tokens included. None: no limit.
        truncation_side: "right" or "left", the side on which rows that are too long are truncated.
        clean_up_tokenization_spaces: whether `decode` removes the spaces before punctuation by default.
        unknown_token: the token for pieces that are not in the vocabulary. None: that of the definition.
        pad_token: the token that pads shorter rows.
        cls_token: the token at the beginning of every row. None: the first token that the definition puts before a
            text, if any.
        sep_token: the token at the end of a text. None: the last token that the definition puts after a text, if any.
        mask_token: the token that replaces others in masked language modeling.
        split_special_tokens: whether a special token that a text contains is split like other text. False: it stays one
            token.

    Raises:
        TypeError: `definition` is not a string or a dictionary.
        ValueError: `definition` is malformed, of another kind, or does not number its tokens without gaps; a special
            token is not in the vocabulary; or `max_length` is too small.

    Reference:
        Kudo and Richardson 2018, arXiv:1808.06226; Unigram: Kudo 2018, arXiv:1804.10959.

    Examples:
        A Unigram vocabulary with its log-probabilities:

        >>> import tokenizers
        >>> pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁hot", -1.0), ("▁dog", -1.0), ("s", -2.0)]
        >>> library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
        >>> library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        >>> library.decoder = tokenizers.decoders.Metaspace()
        >>> tokenizer = keras_tx.text.SentencePieceTokenizer(library.to_str(), pad_token="<pad>")
        >>> tokenizer(["hot dogs", "dog"])["token_ids"]
        array([[3, 4, 5],
               [4, 0, 0]], dtype=int32)
        >>> tokenizer.decode([3, 4, 5])
        'hot dogs'
    """

    def __init__(
        self,
        definition: str | dict[str, Any],
        *,
        max_length: int | None = None,
        truncation_side: str = "right",
        clean_up_tokenization_spaces: bool = False,
        unknown_token: str | None = None,
        pad_token: str | None = None,
        cls_token: str | None = None,
        sep_token: str | None = None,
        mask_token: str | None = None,
        split_special_tokens: bool = False,
    ) -> None:
        tokens = dict(unknown_token=unknown_token, pad_token=pad_token, cls_token=cls_token, sep_token=sep_token)
        super().__init__(
            definition,
            max_length=max_length,
            truncation_side=truncation_side,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            special_tokens=tokens | {"mask_token": mask_token},
            split_special_tokens=split_special_tokens,
        )
        if not is_sentence_piece(self.parts):
            raise ValueError(f"`definition` must be a SentencePiece model's. Received: {model_and_decoder(self.parts)}")
        check_normalizer(self.parts["normalizer"], "definition")

    @classmethod
    def train(cls, texts: Any, vocabulary_size: int, *, verbose: int = 0, **options: Any) -> Self:
        """Learns a vocabulary from texts by SentencePiece: the special tokens, 256 bytes, then frequent pieces.

        The model is byte-pair encoding over characters; characters without a token become bytes. Spaces are characters
        like any other: the tokens have spaces, where the tokens of Llama 2 have "▁". So `decode` gives every text back
        exactly, special tokens included: they are split like other text unless `split_special_tokens=False` is given.
        Rows begin with `cls_token` and end with `sep_token`. The tokenizer runs in a TensorFlow graph. The same texts
        give the same vocabulary.

        Args:
            texts: an iterable of `str`, such as a generator; or a `tf.data.Dataset` of strings, such as
                `load_text(..., in_memory=False).train`. They are read once, one by one. No token spans two of their
                lines. With more than a million different words the rarest are forgotten.
            vocabulary_size: the largest number of tokens. Small amounts of text give fewer tokens. Rare characters get
                no token.
            verbose: 1 shows a progress bar, 0 does not.
            options: further arguments of the constructor. The special tokens are `pad_token="<pad>"`,
                `unknown_token="<unk>"`, `cls_token="<s>"` and `sep_token="</s>"` unless others are given; None leaves
                a token out.

        Raises:
            TypeError: `texts` are not strings, or a special token is not one.
            ValueError: `vocabulary_size` is not larger than 256 and the number of special tokens, `texts` have no
                character, or a special token has only one character.

        Reference:
            Kudo and Richardson 2018, arXiv:1808.06226.

        Examples:
            >>> tokenizer = keras_tx.text.SentencePieceTokenizer.train(["hot dog", "a hot dog", "dogs"], 280)
            >>> [tokenizer.id_to_token(id) for id in tokenizer("hot dogs")["token_ids"]]
            ['<s>', 'hot', ' dog', 's', '</s>']
            >>> tokenizer.decode(tokenizer.tokenize("  Größe\\t<s> 🌭"))
            '  Größe\\t<s> 🌭'
        """
        options = {"split_special_tokens": True} | options
        special = special_tokens(OF_PIECES, options, whole=True)
        return cls(train_pieces(texts, vocabulary_size, special, verbose), **(options | special))

    @classmethod
    def _read_arguments(cls, folder: Path) -> dict[str, Any]:
        settings = read_settings(folder, splits=True)
        read = read_tokenizer_json if (folder / "tokenizer.json").is_file() else read_sentencepiece_model
        return constructor_arguments(read(folder, settings), settings, folder)

    @cached_property
    def not_in_graph(self) -> str | None:
        """The reason why the tokenizer cannot run in a TensorFlow graph, or None if it can."""
        return self._unsupported_split or unsupported_parts(self.parts, self._found, self._tokenizer.normalizer)

    @cached_property
    def _graph(self) -> SentencePieceGraph:
        normalizer, decode = self._tokenizer.normalizer, lambda rows: self._decode(rows, False)
        return SentencePieceGraph(self.parts, self._found, self.vocabulary, normalizer, decode)

    def _graph_encode(self, texts: Tensor) -> Tensor:
        return self._graph.encode(texts)

    def _graph_decode(self, ids: Tensor) -> Tensor:
        return self._graph.decode(ids)


def is_sentence_piece(parts: dict[str, Any]) -> bool:
    """Whether the content of a tokenizer.json is a SentencePiece model: Unigram, or byte pairs over characters."""
    kind = parts["model"].get("type")
    marked = "▁" in str(parts.get("decoder")) or bool(parts["model"].get("byte_fallback"))
    return kind == "Unigram" or (kind == "BPE" and marked and not is_byte_level(parts))

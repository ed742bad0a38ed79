"""Byte-level byte-pair encoding, as in GPT-2, RoBERTa, BART, Llama 3 and Qwen: (B,) strings -> (B, T) ids -> strings.

The smallest tokens are bytes, so every text has ids. Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019
(GPT-2).
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Self

import keras

from keras_tx.text.byte_pair_graph import BytePairGraph, unsupported_parts
from keras_tx.text.definition import OF_PIECES, decoders, model_and_decoder, special_tokens
from keras_tx.text.files import read_settings
from keras_tx.text.json_tokenizer import JsonTokenizer, constructor_arguments
from keras_tx.text.tokenizer_json import read_merges_files, read_tokenizer_json
from keras_tx.text.trainers import train_byte_pairs
from keras_tx.types import Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class BytePairTokenizer(JsonTokenizer):
    """A tokenizer for byte-level byte-pair encoding (BPE), as in GPT-2, RoBERTa, BART, Llama 3 and Qwen.

    Outside a graph it uses the `tokenizers` library and returns NumPy arrays, lists and `str`. In a TensorFlow graph it
    supports the pre-tokenizers of GPT-2 (also RoBERTa, BART), Llama 3 and Qwen 2; for any other definition,
    `not_in_graph` has the reason. The ids and texts in a graph are equal to those of `tokenizers`: this was checked on
    69,250 sentences, on 933,634 strings with one Unicode character each and on 20,000 random strings.

    Most users construct it by `from_pretrained(directory)`, `load_tokenizer(directory)` or `train(texts, ...)`.

    Args:
        definition: the content of a tokenizer.json, as a string or as the dict that `json.load` returns.
        max_length: the default for the largest number of tokens in a row, special tokens included. None: no limit.
        truncation_side: "right" or "left", the side on which rows that are too long are truncated.
        clean_up_tokenization_spaces: whether `decode` removes the spaces before punctuation by default. transformers
            does so only for WordPiece.
        unknown_token: the token for pieces that are not in the vocabulary. None: that of the definition, if it has one.
        pad_token: the token that pads shorter rows. GPT-2 and Llama 3 have none: choose one if the rows of a batch have
            different lengths.
        cls_token: the token at the beginning of every row. None: the first token that the definition puts before a
            text, if any.
        sep_token: the token at the end of a text. None: the last token that the definition puts after a text, if any.
        mask_token: the token that replaces others in masked language modeling.
        split_special_tokens: whether a special token that a text contains is split like other text. False: it stays one
            token.

    Raises:
        TypeError: `definition` is not a string or a dictionary.
        ValueError: `definition` is malformed, not byte-level, or does not number its tokens without gaps; a special
            token is not in the vocabulary; or `max_length` is too small.

    Reference:
        Sennrich et al. 2016, arXiv:1508.07909; Radford et al. 2019 (GPT-2).

    Examples:
        >>> trained = keras_tx.text.BytePairTokenizer.train(["the dog", "the dogs"], vocabulary_size=270)
        >>> trained.decode(trained.tokenize("Ein schöner dog"))
        'Ein schöner dog'

        A vocabulary of the 256 bytes and two merges, "d" + "o" and "do" + "g":

        >>> import tokenizers
        >>> letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        >>> vocabulary = {token: id for id, token in enumerate([*letters, "do", "dog", "<pad>"])}
        >>> library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("d", "o"), ("do", "g")]))
        >>> library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        >>> library.decoder = tokenizers.decoders.ByteLevel()
        >>> tokenizer = keras_tx.text.BytePairTokenizer(library.to_str(), pad_token="<pad>")
        >>> tokenizer(["dog", "do"])["token_ids"]
        array([[257],
               [256]], dtype=int32)
        >>> [tokenizer.id_to_token(id) for id in tokenizer.tokenize("dogs")]
        ['dog', 's']
        >>> tokenizer.decode(tokenizer.tokenize("Ein schöner dog"))
        'Ein schöner dog'
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
        if not is_byte_level(self.parts):
            raise ValueError(
                f"`definition` must be a byte-level BPE tokenizer. Received: {model_and_decoder(self.parts)}"
            )

    @classmethod
    def train(
        cls,
        texts: Any,
        vocabulary_size: int,
        *,
        min_frequency: int = 2,
        add_prefix_space: bool = False,
        verbose: int = 0,
        **options: Any,
    ) -> Self:
        """Learns a vocabulary from texts: the special tokens, the 256 bytes, then frequent merges.

        `decode` gives every text back exactly, special tokens included: they are split like other text unless
        `split_special_tokens=False` is given. Rows begin with `cls_token` and end with `sep_token`. The tokenizer runs
        in a TensorFlow graph. The same texts give the same vocabulary.

        Args:
            texts: an iterable of `str`, such as a generator; or a `tf.data.Dataset` of strings, such as
                `load_text(..., in_memory=False).train`. They are read once, one by one.
            vocabulary_size: the largest number of tokens. Small amounts of text give fewer tokens.
            min_frequency: how often two tokens must stand together to be merged.
            add_prefix_space: whether to put a space before every text, so that a word has the same tokens at the
                beginning of a text and within it. `decode` takes off one space at the beginning of what it is given,
                even if the ids are only the end of a text. A text that continues another one gets a space, too, such as
                the `target` of an export's signature `score`.
            verbose: 1 shows a progress bar, 0 does not.
            options: further arguments of the constructor. The special tokens are `pad_token="<pad>"`,
                `cls_token="<s>"` and `sep_token="</s>"` unless others are given; None leaves a token out.

        Raises:
            TypeError: `texts` are not strings, a special token is not one, or `add_prefix_space` is not a boolean.
            ValueError: `vocabulary_size` is not larger than 256 and the number of special tokens, no two bytes stand
                together often enough in `texts`, or a special token has only one character.

        Reference:
            Sennrich et al. 2016, arXiv:1508.07909.

        Examples:
            >>> tokenizer = keras_tx.text.BytePairTokenizer.train(["hot dog", "a hot dog", "dogs"], 270)
            >>> [tokenizer.id_to_token(id) for id in tokenizer("hot dogs")["token_ids"]]
            ['<s>', 'hot', 'Ġdog', 's', '</s>']
            >>> tokenizer.decode(tokenizer.tokenize("  Größe\\t<s> 🌭"))
            '  Größe\\t<s> 🌭'
            >>> tokenizer = keras_tx.text.BytePairTokenizer.train(["hot dog", "a hot dog", "dogs"], 270,
            ...                                                   add_prefix_space=True)
            >>> [tokenizer.id_to_token(id) for id in tokenizer("hot dogs")["token_ids"]]
            ['<s>', 'Ġhot', 'Ġdog', 's', '</s>']
        """
        options = {"split_special_tokens": True} | options
        defaults = {role: token for role, token in OF_PIECES.items() if role != "unknown_token"}
        special = special_tokens(defaults, options, whole=True)
        definition = train_byte_pairs(texts, vocabulary_size, min_frequency, special, verbose, add_prefix_space)
        return cls(definition, **(options | special))

    @classmethod
    def _read_arguments(cls, folder: Path) -> dict[str, Any]:
        settings = read_settings(folder, splits=True)
        if (folder / "tokenizer.json").is_file():
            return constructor_arguments(read_tokenizer_json(folder, settings), settings, folder)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return constructor_arguments(read_merges_files(folder, settings), settings, folder)
        names = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            "`directory` must contain tokenizer.json, or vocab.json and merges.txt. "
            f"Received: directory={str(folder)!r}, which contains {names}"
        )

    @cached_property
    def not_in_graph(self) -> str | None:
        """The reason why the tokenizer cannot run in a TensorFlow graph, or None if it can."""
        return self._unsupported_split or unsupported_parts(self.parts, self._found_normalized)

    @cached_property
    def _graph(self) -> BytePairGraph:
        return BytePairGraph(self.parts, self._found_normalized, self._decoded)

    def _graph_encode(self, texts: Tensor) -> Tensor:
        return self._graph.encode(texts)

    def _graph_decode(self, ids: Tensor) -> Tensor:
        return self._graph.decode(ids)


def is_byte_level(parts: dict[str, Any]) -> bool:
    """Whether the content of a tokenizer.json is byte-pair encoding whose smallest tokens are bytes."""
    return parts["model"].get("type") == "BPE" and any(step.get("type") == "ByteLevel" for step in decoders(parts)[:1])

"""Words as tokens: (B,) strings -> (B, T) ids -> strings.

Each word of the vocabulary has an id; all other words have that of the unknown token.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Self

import keras

from keras_tx.text.definition import OF_WORDS, as_step, build_definition, read_tokens, special_tokens
from keras_tx.text.files import read_settings
from keras_tx.text.json_tokenizer import JsonTokenizer, constructor_arguments
from keras_tx.text.tokenizer_json import read_tokenizer_json
from keras_tx.text.trainers import train_words
from keras_tx.text.word_level_graph import WordLevelGraph, is_word_level, unsupported_parts
from keras_tx.types import Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class WordLevelTokenizer(JsonTokenizer):
    """A tokenizer whose tokens are words, as `WordLevel` of the `tokenizers` library.

    Outside a graph it uses the `tokenizers` library and returns NumPy arrays, lists and `str`. In a TensorFlow graph
    the ids and texts are the same. The graph supports the normalizers NFC, NFD, NFKC, NFKD, Lowercase, StripAccents,
    BertNormalizer, Strip, Nmt and Replace (of a string), and the pre-tokenizers Whitespace, WhitespaceSplit,
    Punctuation, Digits, BertPreTokenizer, CharDelimiterSplit and Split (at one character), alone and in a Sequence. For
    any other definition, `not_in_graph` has the reason.

    Most users construct it by `train(texts, ...)`, `from_vocabulary(...)`, `from_pretrained(directory)` or
    `load_tokenizer(directory)`.

    Args:
        definition: the content of a tokenizer.json, as a string or as the dict that `json.load` returns.
        max_length: the default for the largest number of tokens in a row, special tokens included. None: no limit.
        truncation_side: "right" or "left", the side on which rows that are too long are truncated.
        clean_up_tokenization_spaces: whether `decode` removes the spaces before punctuation by default.
        unknown_token: the token for words that are not in the vocabulary. None: that of the definition.
        pad_token: the token that pads shorter rows.
        cls_token: the token at the beginning of every row. None: the first token that the definition puts before a
            text, if any.
        sep_token: the token at the end of a text. None: the last token that the definition puts after a text, if any.
        mask_token: the token that replaces others in masked language modeling.
        split_special_tokens: whether a special token that a text contains is split like other text. False: it stays one
            token.

    Raises:
        TypeError: `definition` is not a string or a dictionary.
        ValueError: `definition` is malformed, not word-level, lacks its unknown token or does not number its tokens
            without gaps; a special token is not in the vocabulary; or `max_length` is too small.

    Examples:
        >>> tokenizer = keras_tx.text.WordLevelTokenizer.train(["a hot dog", "hot, hot!"], 50)
        >>> tokenizer.vocabulary
        ['[PAD]', '[UNK]', '[SOS]', '[EOS]', 'hot', '!', ',', 'a', 'dog']
        >>> tokenizer(["A hot dog!", "hot"])["token_ids"]
        array([[2, 1, 4, 8, 5, 3],
               [2, 4, 3, 0, 0, 0]], dtype=int32)
        >>> tokenizer.decode([2, 4, 8, 5, 3])
        'hot dog !'
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
        check_word_level(self.parts)

    @classmethod
    def from_vocabulary(
        cls, vocabulary: Any, *, normalizer: Any = None, pre_tokenizer: Any = "Whitespace", **options: Any
    ) -> Self:
        """Builds a tokenizer from a list of words or from a vocabulary file.

        Args:
            vocabulary: the tokens in the order of their ids; or the path of a vocab.json, which maps tokens to ids; or
                the path of another file with one token per line.
            normalizer: what changes texts before they are split. None; the name of a normalizer of the `tokenizers`
                library, such as "Lowercase"; its form in a tokenizer.json; an object of `tokenizers.normalizers`; or a
                list of these.
            pre_tokenizer: what splits texts into words, in the same form. "Whitespace" splits at white space and
                between words and punctuation.
            options: further arguments of the constructor. The special tokens are `pad_token="[PAD]"`,
                `unknown_token="[UNK]"`, `cls_token="[SOS]"` and `sep_token="[EOS]"` unless others are given; None
                leaves a token out. The vocabulary must have them.

        Raises:
            TypeError: `vocabulary` is not a path or a list of strings, or a step or a special token has the wrong type.
            ValueError: `vocabulary` is a file that is missing or malformed, is empty, repeats a token or lacks a
                special token; or a step is not one of the library's.

        Examples:
            >>> words = ["[PAD]", "[UNK]", "hot", "dog"]
            >>> options = {"normalizer": ["NFD", "StripAccents", "Lowercase"], "cls_token": None, "sep_token": None}
            >>> tokenizer = keras_tx.text.WordLevelTokenizer.from_vocabulary(words, **options)
            >>> tokenizer("Hót dogs, DOG")["token_ids"]
            array([2, 1, 1, 3], dtype=int32)
        """
        special = special_tokens(OF_WORDS, options, ("unknown_token",))
        id_of = read_tokens(vocabulary, special)
        model = {"type": "WordLevel", "vocab": id_of, "unk_token": special["unknown_token"]}
        definition = build_definition(model, special, **_steps(normalizer, pre_tokenizer))
        return cls(definition, **(options | special))

    @classmethod
    def train(
        cls,
        texts: Any,
        vocabulary_size: int,
        *,
        min_frequency: int = 1,
        normalizer: Any = None,
        pre_tokenizer: Any = "Whitespace",
        verbose: int = 0,
        **options: Any,
    ) -> Self:
        """Learns a vocabulary from texts: the special tokens, then the most frequent words.

        Rows begin with `cls_token` and end with `sep_token`. The same texts give the same vocabulary.

        Args:
            texts: an iterable of `str`, such as a generator; or a `tf.data.Dataset` of strings, such as
                `load_text(..., in_memory=False).train`. They are read once, one by one.
            vocabulary_size: the largest number of tokens. Small amounts of text give fewer tokens.
            min_frequency: how often a word must occur.
            normalizer: what changes texts before they are split; see `from_vocabulary`.
            pre_tokenizer: what splits texts into words; see `from_vocabulary`.
            verbose: 1 shows a progress bar, 0 does not.
            options: further arguments of the constructor. The special tokens are `pad_token="[PAD]"`,
                `unknown_token="[UNK]"`, `cls_token="[SOS]"` and `sep_token="[EOS]"` unless others are given; None
                leaves a token out.

        Raises:
            TypeError: `texts` are not strings, or a step or a special token has the wrong type.
            ValueError: no word of `texts` is frequent enough, `vocabulary_size` is not larger than the number of
                special tokens, or a step is not one of the library's.

        Examples:
            >>> texts = ["a hot dog", "A hot day", "hot"]
            >>> options = {"min_frequency": 2, "normalizer": "Lowercase"}
            >>> keras_tx.text.WordLevelTokenizer.train(texts, 50, **options).vocabulary
            ['[PAD]', '[UNK]', '[SOS]', '[EOS]', 'hot', 'a']
        """
        special = special_tokens(OF_WORDS, options, ("unknown_token",))
        steps, split = _steps(normalizer, pre_tokenizer), options.get("split_special_tokens", False)
        definition = train_words(texts, vocabulary_size, min_frequency, special, steps, split, verbose)
        return cls(definition, **(options | special))

    @classmethod
    def _read_arguments(cls, folder: Path) -> dict[str, Any]:
        settings = read_settings(folder, splits=True)
        return constructor_arguments(read_tokenizer_json(folder, settings), settings, folder)

    @cached_property
    def not_in_graph(self) -> str | None:
        """The reason why the tokenizer cannot run in a TensorFlow graph, or None if it can."""
        return self._unsupported_split or unsupported_parts(self.parts, self._found_normalized)

    @cached_property
    def _graph(self) -> WordLevelGraph:
        return WordLevelGraph(self.parts, self._found_normalized, self._decoded)

    def _graph_encode(self, texts: Tensor) -> Tensor:
        return self._graph.encode(texts)

    def _graph_decode(self, ids: Tensor) -> Tensor:
        return self._graph.decode(ids)


def check_word_level(parts: dict[str, Any]) -> None:
    """Raises ValueError if the content of a tokenizer.json is not word-level, or lacks its unknown token."""
    if not is_word_level(parts):
        raise ValueError(f"`definition` must be word-level. Received: {{'model': {parts['model']['type']!r}}}")
    unknown = parts["model"]["unk_token"]
    if unknown not in parts["model"]["vocab"]:
        count = len(parts["model"]["vocab"])
        raise ValueError(
            f"`definition` must have its unknown token in the vocabulary of its model. Received: {unknown!r}, not "
            f"among the {count} tokens"
        )


def _steps(normalizer: Any, pre_tokenizer: Any) -> dict[str, Any]:
    return {
        "normalizer": as_step("normalizer", normalizer),
        "pre_tokenizer": as_step("pre_tokenizer", pre_tokenizer),
    }

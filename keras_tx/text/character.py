"""Characters as tokens: (B,) strings -> (B, T) ids -> strings.

Each Unicode character of the vocabulary has an id; all others have that of the unknown token.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import keras

from keras_tx.text.definition import OF_WORDS, read_tokens, special_tokens
from keras_tx.text.files import read_settings
from keras_tx.text.json_tokenizer import JsonTokenizer, constructor_arguments
from keras_tx.text.tokenizer_json import read_tokenizer_json
from keras_tx.text.trainers import character_definition, train_characters
from keras_tx.text.word_level import check_word_level
from keras_tx.text.word_level_graph import EACH_CHARACTER, WordLevelGraph, is_character_level, unsupported_parts
from keras_tx.types import Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class CharacterTokenizer(JsonTokenizer):
    """A tokenizer whose tokens are characters: one id for each Unicode character of a text.

    `decode` gives a text back exactly if the vocabulary has its characters. A special token that a text contains is
    text: its characters have their own ids. Outside a graph the results are NumPy arrays, lists and `str`; in a
    TensorFlow graph the ids and texts are the same.

    Most users construct it by `train(texts)`, `from_vocabulary(...)`, `from_pretrained(directory)` or
    `load_tokenizer(directory)`.

    Args:
        definition: the content of a tokenizer.json, as a string or as the dict that `json.load` returns: that of
            `WordLevel` of the `tokenizers` library with a Split at every character and the decoder Fuse.
        max_length: the default for the largest number of tokens in a row, special tokens included. None: no limit.
        truncation_side: "right" or "left", the side on which rows that are too long are truncated.
        clean_up_tokenization_spaces: whether `decode` removes the spaces before punctuation by default.
        unknown_token: the token for characters that are not in the vocabulary. None: that of the definition.
        pad_token: the token that pads shorter rows.
        cls_token: the token at the beginning of every row. None: the first token that the definition puts before a
            text, if any.
        sep_token: the token at the end of a text. None: the last token that the definition puts after a text, if any.
        mask_token: the token that replaces others in masked language modeling.
        split_special_tokens: whether a special token that a text contains is split into characters. False: it stays one
            token, which `decode` leaves out. Texts can then contain `mask_token`.

    Raises:
        TypeError: `definition` is not a string or a dictionary.
        ValueError: `definition` is malformed, does not have one token for each character, lacks its unknown token or
            does not number its tokens without gaps; a special token is not in the vocabulary or is one character; or
            `max_length` is too small.

    Examples:
        >>> tokenizer = keras_tx.text.CharacterTokenizer.train(["hot dog", "hot day"])
        >>> "".join(tokenizer.vocabulary[4:])
        'o dhtagy'
        >>> tokenizer(["dog", "hat!"])["token_ids"]
        array([[ 2,  6,  4, 10,  3,  0],
               [ 2,  7,  9,  8,  1,  3]], dtype=int32)
        >>> tokenizer.decode(tokenizer.tokenize("a hot dog"))
        'a hot dog'
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
        split_special_tokens: bool = True,
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
        if not is_character_level(self.parts):
            steps = {name: self.parts[name] for name in ("normalizer", "pre_tokenizer", "decoder")}
            raise ValueError(
                "`definition` must have no normalizer, the decoder Fuse, and the pre-tokenizer "
                f"{EACH_CHARACTER}. Received: {steps}"
            )
        special_tokens({}, self.special_tokens, whole=True)
        self._ids_of_characters = self.parts["model"]["vocab"]
        if all(len(token) > 1 for token in self._ids_of_characters):
            raise ValueError(
                f"`definition` must have at least one character in its vocabulary. Received: {self.vocabulary}"
            )

    @classmethod
    def from_vocabulary(cls, vocabulary: Any, **options: Any) -> Self:
        """Builds a tokenizer from a list of characters or from a vocabulary file.

        Args:
            vocabulary: the tokens in the order of their ids; or the path of a vocab.json, which maps tokens to ids; or
                the path of another file with one token per line.
            options: further arguments of the constructor. The special tokens are `pad_token="[PAD]"`,
                `unknown_token="[UNK]"`, `cls_token="[SOS]"` and `sep_token="[EOS]"` unless others are given; None
                leaves a token out. The vocabulary must have them.

        Raises:
            TypeError: `vocabulary` is not a path or a list of strings, or a special token has the wrong type.
            ValueError: `vocabulary` is a file that is missing or malformed, has no character, repeats a token or lacks
                a special token; or a special token is one character.

        Examples:
            >>> vocabulary = ["[PAD]", "[UNK]", "[SOS]", "[EOS]", *"ACGT"]
            >>> tokenizer = keras_tx.text.CharacterTokenizer.from_vocabulary(vocabulary)
            >>> tokenizer("GATTACA")["token_ids"]
            array([2, 6, 4, 7, 7, 4, 5, 4, 3], dtype=int32)
        """
        special = special_tokens(OF_WORDS, options, ("unknown_token",), whole=True)
        id_of = read_tokens(vocabulary, special)
        model = {"type": "WordLevel", "vocab": id_of, "unk_token": special["unknown_token"]}
        return cls(character_definition(model, special), **(options | special))

    @classmethod
    def train(
        cls, texts: Any, vocabulary_size: int | None = None, *, min_frequency: int = 1, verbose: int = 0, **options: Any
    ) -> Self:
        """Learns a vocabulary from texts: the special tokens, then the characters, the most frequent first.

        Rows begin with `cls_token` and end with `sep_token`. The same texts give the same vocabulary.

        Args:
            texts: an iterable of `str`, such as a generator; or a `tf.data.Dataset` of strings, such as
                `load_text(..., in_memory=False).train`. They are read once, one by one.
            vocabulary_size: the largest number of tokens. None: all characters of the texts.
            min_frequency: how often a character must occur.
            verbose: 1 shows a progress bar, 0 does not.
            options: further arguments of the constructor. The special tokens are `pad_token="[PAD]"`,
                `unknown_token="[UNK]"`, `cls_token="[SOS]"` and `sep_token="[EOS]"` unless others are given; None
                leaves a token out.

        Raises:
            TypeError: `texts` are not strings, or a special token has the wrong type.
            ValueError: no character of `texts` is frequent enough, `vocabulary_size` is not larger than the number of
                special tokens, or a special token is one character.

        Examples:
            >>> tokenizer = keras_tx.text.CharacterTokenizer.train(["to be", "or not to be"], cls_token=None)
            >>> tokenizer.vocabulary
            ['[PAD]', '[UNK]', '[EOS]', ' ', 'o', 't', 'b', 'e', 'n', 'r']
        """
        special = special_tokens(OF_WORDS, options, ("unknown_token",), whole=True)
        return cls(train_characters(texts, vocabulary_size, min_frequency, special, verbose), **(options | special))

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

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self._found:
            return super()._encode(texts)
        find, unknown = self._ids_of_characters.get, self._ids_of_characters[self.parts["model"]["unk_token"]]
        return [[find(character, unknown) for character in text] for text in texts]

    def _decode(self, rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        skipped = self._special_ids() if skip_special_tokens else ()
        return ["".join([self.vocabulary[i] for i in row if i not in skipped]) for row in rows]

    def _graph_encode(self, texts: Tensor) -> Tensor:
        return self._graph.encode(texts)

    def _graph_decode(self, ids: Tensor) -> Tensor:
        return self._graph.decode(ids)

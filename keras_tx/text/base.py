"""The base class of tokenizers: texts -> {"token_ids": (B, T)} -> texts."""

import abc
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from keras_tx import checks
from keras_tx.text.files import through_directory


class Tokenizer(abc.ABC):
    """Base class of all tokenizers, which convert texts to token ids and back.

    Construct one of the subclasses, or let `load_tokenizer` choose the one that fits a directory.

    Your own tokenizer is a subclass that passes its vocabulary to this constructor and defines `__call__`, `tokenize`,
    `decode`, `save`, `get_config`, `from_pretrained` and `not_in_graph`. Register it with
    `keras.saving.register_keras_serializable` if Keras is to save and load it.

    Args:
        vocabulary: the tokens in the order of their ids.
        special_tokens: maps the constructor argument of a special token ("unknown_token", "pad_token", "cls_token",
            "sep_token" or "mask_token") to the token. Names whose token is None are left out.
        max_length: the default for the largest number of tokens in a row. None: no limit.

    Attributes:
        vocabulary: the tokens in the order of their ids, a list of `str`.
        vocabulary_size: the number of tokens.
        special_tokens: a dictionary that maps an argument name to its special token.
        unknown_id: the id of the token for words or pieces that are not in the vocabulary, or None.
        pad_id: the id of the padding token, or None.
        cls_id: the id of the token that begins every row, or None.
        sep_id: the id of the token that ends every text, or None.
        mask_id: the id of the mask token, or None.
        max_length: the default for the largest number of tokens in a row, or None.

    Raises:
        TypeError: a subclass does not define all of the methods above.
        ValueError: `max_length` is neither None nor a positive integer.

    Examples:
        >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hot", "dog", "##s"]
        >>> tokenizer = keras_tx.text.BertTokenizer(vocabulary)
        >>> isinstance(tokenizer, keras_tx.text.Tokenizer)
        True
        >>> tokenizer.token_to_id("dog"), tokenizer.id_to_token(7), tokenizer.pad_id
        (6, '##s', 0)
        >>> tokenizer.save("tokenizer")
        >>> keras_tx.text.load_tokenizer("tokenizer").vocabulary == vocabulary
        True
    """

    def __init__(
        self, vocabulary: Sequence[str], special_tokens: Mapping[str, str | None], max_length: int | None = None
    ) -> None:
        self.vocabulary = list(vocabulary)
        self.vocabulary_size = len(self.vocabulary)
        self.special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        self.max_length: Any = checks.positive_int("max_length", max_length, none=True)
        self._id_of = {token: i for i, token in enumerate(self.vocabulary)}
        names = ("unknown_token", "pad_token", "cls_token", "sep_token", "mask_token")
        tokens = (self.special_tokens.get(name) for name in names)
        ids: list[Any] = [None if token is None else self._id_of.get(token) for token in tokens]
        self.unknown_id, self.pad_id, self.cls_id, self.sep_id, self.mask_id = ids

    @abc.abstractmethod
    def __call__(
        self, texts: Any, pairs: Any = None, *, max_length: int | None = None, padding: str = "longest"
    ) -> dict[str, Any]:
        """Converts texts to rows of token ids with special tokens, padded on the right.

        Args:
            texts: a string, or a list, array or tensor of B strings (`str` or `bytes`).
            pairs: a second text for each of `texts`, in the same form, or None.
            max_length: the largest number of tokens in a row. None: the tokenizer's `max_length`. Longer rows are
                truncated; of a pair, the longer text first.
            padding: "longest" pads to the longest row of the batch, "max_length" to `max_length`.

        Returns:
            A dictionary with "token_ids": int32 (B, T), or (T,) for one string.
        """

    @abc.abstractmethod
    def tokenize(self, texts: Any) -> Any:
        """Converts texts to token ids without special tokens, padding or truncation: one row for each text."""

    @abc.abstractmethod
    def decode(
        self, ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """Converts token ids back to texts.

        Args:
            ids: integers (T,), (B, T) or ragged (B, None), as lists, arrays or tensors.
            skip_special_tokens: whether to leave the special tokens out.
            clean_up_tokenization_spaces: whether to remove the spaces before punctuation and in English contractions.
                None: the tokenizer's default.

        Returns:
            A `str` for one row, a list of B of them for several.
        """

    @abc.abstractmethod
    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files, in Hugging Face's format, into `directory`, whose tokenizer they replace."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor, as values that can be written as JSON."""

    @property
    @abc.abstractmethod
    def not_in_graph(self) -> str | None:
        """The reason why the tokenizer cannot run in a TensorFlow graph, or None if it can."""

    @property
    def in_graph(self) -> bool:
        """Whether the tokenizer also runs in a TensorFlow graph (`tf.data`, `tf.function`) and can be exported."""
        return self.not_in_graph is None

    @classmethod
    @abc.abstractmethod
    def from_pretrained(cls, directory: str | Path, **overrides: Any) -> Self:
        """Reads the tokenizer of a Hugging Face directory.

        Args:
            directory: the path of the directory.
            overrides: arguments of the constructor that replace those of the directory.

        Raises:
            ValueError: the directory does not exist, a file is malformed, or it holds a tokenizer of another kind.
        """

    @classmethod
    def from_transformers(cls, tokenizer: Any, **overrides: Any) -> Self:
        """Builds a tokenizer that is equivalent to a tokenizer object of transformers.

        Args:
            tokenizer: the object of transformers, which is saved to a temporary directory and read back.
            overrides: arguments of the constructor that replace those of the object.

        Raises:
            TypeError: the object cannot be saved as a tokenizer.
        """
        return through_directory(lambda directory: cls.from_pretrained(directory, **overrides), tokenizer)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Builds a tokenizer from the result of `get_config`."""
        return cls(**config)

    def id_to_token(self, id: int) -> str:
        """Returns the token of an id; raises ValueError for what is not the id of a token of the vocabulary."""
        try:
            index = -1 if isinstance(id, bool) else operator.index(id)  # also of a scalar tensor
        except TypeError:
            index = -1
        if not 0 <= index < self.vocabulary_size:
            raise ValueError(
                f"`id` must be an integer in [0, {self.vocabulary_size}), the vocabulary. Received: id={id!r}"
            )
        return self.vocabulary[index]

    def _special_ids(self) -> set[int]:
        """The ids that decoding leaves out."""
        return {self._id_of[token] for token in self.special_tokens.values() if token in self._id_of}

    def token_to_id(self, token: str) -> int:
        """Returns the id of a token; raises ValueError for a token that is not in the vocabulary."""
        if not isinstance(token, str) or token not in self._id_of:
            raise ValueError(f"`token` must be in the vocabulary. Received: token={token!r}")
        return self._id_of[token]

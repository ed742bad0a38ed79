"""Tokenizers that use a Python library outside a graph and TensorFlow ops inside one.

Outside a graph the results are NumPy arrays and lists, so TensorFlow is not needed. Inside a graph (`tf.data`,
`tf.function`, an exported model) TensorFlow ops do the same work, if the tokenizer is `in_graph`.
"""

import abc
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.text import clean_up as cleaning
from keras_tx.text.argument_checks import check_max_length
from keras_tx.text.base import Tokenizer
from keras_tx.text.files import folder_of
from keras_tx.text.python_inputs import as_id_lists, as_string_list, is_graph_tensor
from keras_tx.text.template import Template
from keras_tx.text.tensor_inputs import as_id_tensor, as_string_tensor, replace_unknown_ids
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


class LibraryTokenizer(Tokenizer):
    """Implements `Tokenizer` by the abstract methods at the end, which subclasses define.

    Args:
        vocabulary: the tokens in the order of their ids.
        single: the special tokens around one text.
        double: the special tokens around a pair of texts, or None if the tokenizer takes no pairs.
        max_length: the default for the largest number of tokens in a row. None: no limit.
        truncation_side: "right" or "left", the side on which rows that are too long are truncated.
        clean_up_tokenization_spaces: the default for `decode`.
        special_tokens: maps an argument name to its special token, or to None.
    """

    def __init__(
        self,
        vocabulary: list[str],
        single: Template,
        double: Template | None,
        *,
        max_length: int | None,
        truncation_side: str,
        clean_up_tokenization_spaces: bool,
        special_tokens: dict[str, str | None],
    ) -> None:
        if max_length is not None:
            max_length = check_max_length(max_length, max(1, (double or single).size(double is not None)))
        self.truncation_side: str = checks.one_of("truncation_side", truncation_side, ("right", "left"))
        self.clean_up_tokenization_spaces: bool = checks.boolean(
            "clean_up_tokenization_spaces", clean_up_tokenization_spaces
        )
        for name, ids in (("cls_token", single.before[:1]), ("sep_token", single.after[-1:])):
            if special_tokens[name] is None and ids:
                special_tokens[name] = vocabulary[ids[0]]
        super().__init__(vocabulary, special_tokens, max_length)
        self._templates = (single, double)
        for name, token in self.special_tokens.items():
            if token not in self._id_of:
                raise ValueError(
                    f"`{name}` must be in the vocabulary. Received: {name}={token!r:.200}, not among the "
                    f"{self.vocabulary_size} tokens"
                )

    @property
    def template(self) -> Template:
        """The special tokens of a row of one text."""
        return self._templates[0]

    @classmethod
    def from_pretrained(cls, directory: str | Path, **overrides: Any) -> Self:
        """Reads the tokenizer of a Hugging Face directory.

        Args:
            directory: the path of the directory.
            overrides: arguments of the constructor that replace those of the directory.

        Raises:
            ValueError: the directory does not exist, a file is malformed, or it holds a tokenizer of another kind.
        """
        return cls(**(cls._read_arguments(folder_of(directory)) | overrides))

    def __call__(
        self, texts: Any, pairs: Any = None, *, max_length: int | None = None, padding: str = "longest"
    ) -> dict[str, Any]:
        """Converts texts to rows of token ids with special tokens, padded on the right.

        Args:
            texts: a string, or a list, array or tensor of B strings (`str` or `bytes`).
            pairs: a second text for each of `texts`, in the same form, or None.
            max_length: the largest number of tokens in a row. None: the tokenizer's `max_length`. Longer rows are
                truncated; of a pair, the longer text first, as with `truncation=True` in transformers.
            padding: "longest" pads to the longest row of the batch, "max_length" to `max_length`.

        Returns:
            A dictionary with "token_ids": int32 (B, T), or (T,) for one string. A NumPy array, or a tensor if `texts`
            is a tensor of a graph.

        Raises:
            TypeError: `texts` or `pairs` are not strings.
            ValueError: `texts` have rank 2, there are not as many `pairs`, `padding` is unknown, `max_length` is
                missing or too small, or rows need padding and there is no `pad_token`. Also if the tokenizer is used in
                a graph and is not `in_graph`.
        """
        checks.one_of("padding", padding, ("longest", "max_length"))
        limit = self.max_length if max_length is None else max_length
        template = self._templates[pairs is not None]
        if template is None:
            raise ValueError("`pairs` must be None: this tokenizer does not support pairs of texts. Received: pairs")
        if limit is not None:
            limit = check_max_length(limit, max(1, template.size(pairs is not None)))
        elif padding == "max_length":
            raise ValueError('`max_length` must be given with `padding="max_length"`. Received: max_length=None')
        length = limit if padding == "max_length" else None
        if is_graph_tensor(texts) or is_graph_tensor(pairs):
            return {"token_ids": self._call_in_graph(texts, pairs, template, limit, length)}
        first, is_one = as_string_list("texts", texts)
        second, second_is_one = (None, is_one) if pairs is None else as_string_list("pairs", pairs)
        if second is not None and (len(second), second_is_one) != (len(first), is_one):
            received = f"{len(first)} texts, {len(second)} pairs"
            if is_one != second_is_one:
                received = "one string and a list of strings"
            raise ValueError(f"`pairs` must have the same length as `texts`. Received: {received}")
        encoded = None if second is None else self._encode(second)
        rows = template.fill(self._encode(first), encoded, limit, self.truncation_side)
        width = max((len(row) for row in rows), default=0) if length is None else length
        ids = np.full((len(rows), width), self._padding_id(any(len(row) < width for row in rows)), "int32")
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return {"token_ids": ids[0] if is_one else ids}

    def tokenize(self, texts: Any) -> Any:
        """Converts texts to token ids without special tokens, padding or truncation.

        Args:
            texts: a string, or a list, array or tensor of B strings (`str` or `bytes`).

        Returns:
            A list of ids for each text, or one list for one string. In a graph ragged int32 (B, None), or (T,).
        """
        if is_graph_tensor(texts):
            texts = as_string_tensor("texts", texts)
            ids = self._encode_in_graph(texts)
            return ids[0] if texts.shape.rank == 0 else ids
        strings, is_one = as_string_list("texts", texts)
        rows = self._encode(strings)
        return rows[0] if is_one else rows

    def decode(
        self, ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """Converts token ids back to texts, as transformers does.

        Args:
            ids: integers (T,), (B, T) or ragged (B, None), as lists, arrays or tensors.
            skip_special_tokens: whether to leave the special tokens out.
            clean_up_tokenization_spaces: whether to remove the spaces before punctuation and in English contractions.
                None: the argument of the constructor.

        Returns:
            A `str` for one row, or a list of B strings for several rows. In a graph a string tensor, () or (B,).

        Raises:
            TypeError: `ids` are not integers.
            ValueError: `ids` have rank 0 or more than 2, or one is outside the vocabulary. In a graph ids outside
                the vocabulary are left out instead.
        """
        clean_up = clean_up_tokenization_spaces
        if clean_up is None:
            clean_up = self.clean_up_tokenization_spaces
        if is_graph_tensor(ids):
            self._check_in_graph("ids")
            return self._decode_in_graph(as_id_tensor(ids), skip_special_tokens, clean_up)
        rows, is_one = as_id_lists(ids, self.vocabulary_size)
        texts = self._decode(rows, skip_special_tokens)
        texts = cleaning.clean_up(texts) if clean_up else texts
        return texts[0] if is_one else texts

    def _common_config(self) -> dict[str, Any]:
        """The arguments of the constructor that every tokenizer of this kind has."""
        names = ("max_length", "truncation_side", "clean_up_tokenization_spaces")
        tokens = dict.fromkeys(("unknown_token", "pad_token", "cls_token", "sep_token", "mask_token"))
        return {name: getattr(self, name) for name in names} | tokens | self.special_tokens

    def _padding_id(self, needed: bool) -> int:
        if needed and self.pad_id is None:
            raise ValueError(
                "`pad_token` must be given to pad rows: from_pretrained(directory, pad_token=...). "
                "Received: pad_token=None"
            )
        return self.pad_id or 0

    def _check_in_graph(self, name: str) -> None:
        if not self.in_graph:
            raise ValueError(
                f"`{name}` must be Python values, not tensors of a graph: this tokenizer has no TensorFlow form. "
                f"Received: a tensor of a graph, {self.not_in_graph}"
            )

    def _call_in_graph(
        self, texts: Any, pairs: Any, template: Template, limit: int | None, length: int | None
    ) -> Tensor:
        first = as_string_tensor("texts", texts)
        second = None if pairs is None else as_string_tensor("pairs", pairs)
        if second is not None and not second.shape.is_compatible_with(first.shape):
            received = f"shapes texts={tuple(first.shape)}, pairs={tuple(second.shape)}"
            raise ValueError(f"`pairs` must have the same length as `texts`. Received: {received}")
        encoded = None if second is None else self._encode_in_graph(second)
        rows = template.fill_ragged(self._encode_in_graph(first), encoded, limit, self.truncation_side)
        padding_id = self._padding_id(needed=first.shape.rank != 0 or length is not None)
        ids = rows.to_tensor(padding_id, shape=[None, length])
        return ids[0] if first.shape.rank == 0 else ids

    def _encode_in_graph(self, texts: Tensor) -> Tensor:
        self._check_in_graph("texts")
        return self._graph_encode(tf.reshape(texts, [-1]))

    def _decode_in_graph(self, ids: Tensor, skip_special_tokens: bool, clean_up: bool) -> Tensor:
        rows = tf.RaggedTensor.from_tensor(ids[None]) if ids.shape.rank == 1 else ids
        kept = (rows.values >= 0) & (rows.values < self.vocabulary_size)
        if skip_special_tokens:
            known = replace_unknown_ids(rows.values, self.vocabulary_size, 0)
            kept &= ~tf.gather(tf.constant(self._is_special), known)
        texts = self._graph_decode(tf.ragged.boolean_mask(rows, rows.with_values(kept)))
        texts = cleaning.clean_up_in_graph(texts) if clean_up else texts
        return texts[0] if ids.shape.rank == 1 else texts

    @cached_property
    def _is_special(self) -> np.ndarray:
        special = np.zeros(self.vocabulary_size, bool)
        special[list(self._special_ids())] = True
        return special

    # Methods that a subclass defines.

    @classmethod
    @abc.abstractmethod
    def _read_arguments(cls, folder: Path) -> dict[str, Any]:
        """Reads the arguments of the constructor from a directory."""

    @abc.abstractmethod
    def _special_ids(self) -> set[int]:
        """The ids that decoding leaves out."""

    @abc.abstractmethod
    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Texts -> ids without special tokens."""

    @abc.abstractmethod
    def _decode(self, rows: Sequence[list[int]], skip_special_tokens: bool) -> list[str]:
        """Ids, all within the vocabulary -> texts."""

    @abc.abstractmethod
    def _graph_encode(self, texts: Tensor) -> Tensor:
        """String tensor (B,) -> ragged int32 (B, None)."""

    @abc.abstractmethod
    def _graph_decode(self, ids: Tensor) -> Tensor:
        """Ragged ids (B, None), all within the vocabulary -> string tensor (B,)."""

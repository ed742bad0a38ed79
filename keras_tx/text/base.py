"""What every tokenizer but BERT's has in common: texts -> {"token_ids": (B, T)} -> texts, in Python and in the graph.

Outside a graph a Python library does the work and NumPy arrays come back, so TensorFlow is not needed. Inside one
(`tf.data`, `tf.function`, an exported model) TensorFlow ops do it, where the tokenizer is `in_graph`.
"""

import abc
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.text.files import by_directory, folder_of
from keras_tx.text.python_inputs import as_lists, as_texts, in_a_graph
from keras_tx.text.template import Template
from keras_tx.text.tensor_inputs import as_ids, at_least, boolean, strings, within

tf = Lazy("tensorflow")

# What `clean_up_tokenization_spaces` replaces, in this order, as in transformers.
TIDY = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m")]
TIDY += [(" 's", "'s"), (" 've", "'ve"), (" 're", "'re")]


class Tokenizer(abc.ABC):
    """The face of a tokenizer; a subclass brings the vocabulary, the templates and the methods at the end.

    Attributes:
        vocabulary, vocabulary_size: tokens in the order of their ids.
        special_tokens: name of the argument -> token, for the special tokens that there are.
        unknown_id, pad_id, cls_id, sep_id, mask_id: their ids, or None. `cls_id` begins every row, `sep_id` ends
            a text.
        max_length: the most tokens of a row where a call does not say, or None.
        in_graph: whether it also runs in a TensorFlow graph and can be exported.
        not_in_graph: why it does not, or None.
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
    ):
        self.vocabulary = vocabulary
        self.vocabulary_size = len(vocabulary)
        self._templates = (single, double)
        self._id_of = {token: i for i, token in enumerate(vocabulary)}
        self.max_length = max_length
        if max_length is not None:
            at_least("max_length", max_length, max(1, (double or single).size(double is not None)))
        self.truncation_side = checks.one_of("truncation_side", truncation_side, ("right", "left"))
        self.clean_up_tokenization_spaces = boolean("clean_up_tokenization_spaces", clean_up_tokenization_spaces)
        for name, ids in (("cls_token", single.before[:1]), ("sep_token", single.after[-1:])):
            if special_tokens[name] is None and ids:
                special_tokens[name] = vocabulary[ids[0]]
        self.special_tokens = {name: token for name, token in special_tokens.items() if token is not None}
        for name, token in self.special_tokens.items():
            if token not in self._id_of:
                raise ValueError(
                    f"`{name}` must be in the vocabulary. Received: {name}={token!r}, not among the "
                    f"{self.vocabulary_size} tokens"
                )
        id_of: dict[str, Any] = {name: self._id_of[token] for name, token in self.special_tokens.items()}
        self.unknown_id: Any = id_of.get("unknown_token")
        self.pad_id: Any = id_of.get("pad_token")
        self.cls_id, self.sep_id, self.mask_id = (id_of.get(name) for name in ("cls_token", "sep_token", "mask_token"))

    @classmethod
    def from_pretrained(cls, directory: str | Path, **overrides) -> "Tokenizer":
        """Reads a Hugging Face directory; `overrides` are the constructor's arguments.

        Raises:
            ValueError: the directory is missing, a file is malformed, or it holds another kind of tokenizer.
        """
        return cls(**(cls._arguments(folder_of(directory)) | overrides))

    @classmethod
    def from_transformers(cls, tokenizer: Any, **overrides) -> "Tokenizer":
        """Does what a tokenizer object of transformers does.

        Raises:
            TypeError: the object cannot be saved as a tokenizer.
        """
        return by_directory(lambda directory: cls.from_pretrained(directory, **overrides), tokenizer)

    def __call__(self, texts, pairs=None, *, max_length: int | None = None, padding: str = "longest") -> dict:
        """Texts to rows of ids with special tokens, padded on the right.

        Args:
            texts: a string, or a list, array or tensor of B strings (str or bytes).
            pairs: a second text for each, likewise.
            max_length: the most tokens of a row; None: the tokenizer's. What is too long is cut, of a pair the longer
                half first, as with `truncation=True` in transformers.
            padding: "longest" pads to the longest row, "max_length" to `max_length`.

        Returns:
            "token_ids", int32: (B, T), or (T,) for one string. NumPy's, or a tensor where `texts` belongs to a graph.

        Raises:
            TypeError: texts that are not strings.
            ValueError: texts of rank 2, pairs of another number, an unknown `padding`, a `max_length` too small or
                missing, rows to pad without a `pad_token`; in a graph a tokenizer that is not `in_graph`.
        """
        checks.one_of("padding", padding, ("longest", "max_length"))
        limit = self.max_length if max_length is None else max_length
        template = self._templates[pairs is not None]
        if template is None:
            raise ValueError("`pairs` must be None: this tokenizer has no place for a second text. Received: pairs")
        if limit is not None:
            at_least("max_length", limit, max(1, template.size(pairs is not None)))
        elif padding == "max_length":
            raise ValueError('`max_length` must be given with `padding="max_length"`. Received: max_length=None')
        length = limit if padding == "max_length" else None
        if in_a_graph(texts) or in_a_graph(pairs):
            return {"token_ids": self._call_in_graph(texts, pairs, template, limit, length)}
        first, one = as_texts("texts", texts)
        second, second_one = (None, one) if pairs is None else as_texts("pairs", pairs)
        if second is not None and (len(second), second_one) != (len(first), one):
            received = f"{len(first)} texts, {len(second)} pairs"
            raise ValueError(f"`pairs` must be as many as `texts`. Received: {received}")
        encoded = None if second is None else self._encode(second)
        rows = template.fill(self._encode(first), encoded, limit, self.truncation_side)
        width = max((len(row) for row in rows), default=0) if length is None else length
        ids = np.full((len(rows), width), self._padding(any(len(row) < width for row in rows)), "int32")
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return {"token_ids": ids[0] if one else ids}

    def tokenize(self, texts):
        """Texts to ids without special tokens and without a limit: a list for each; ragged int32 (B, None) in a graph.

        One string gives one list, or int32 (T,).
        """
        if in_a_graph(texts):
            texts = strings("texts", texts)
            ids = self._encode_in_graph(texts)
            return ids[0] if texts.shape.rank == 0 else ids
        found, one = as_texts("texts", texts)
        rows = self._encode(found)
        return rows[0] if one else rows

    def decode(self, ids, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None):
        """Ids to texts, as transformers decodes them.

        Args:
            ids: integers (T,), (B, T) or ragged (B, None): lists, arrays or tensors.
            skip_special_tokens: whether the special tokens are left out.
            clean_up_tokenization_spaces: whether the spaces before punctuation and English contractions are dropped;
                None: as the constructor says.

        Returns:
            A `str`, or a list of B of them; in a graph a string tensor, () or (B,).

        Raises:
            TypeError: ids that are not integers.
            ValueError: ids of rank 0 or over 2, or outside the vocabulary; in a graph those are left out.
        """
        tidy = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        if in_a_graph(ids):
            self._check_in_graph("ids")
            return self._decode_in_graph(as_ids(ids), skip_special_tokens, tidy)
        rows, one = as_lists(ids, self.vocabulary_size)
        texts = self._decode(rows, skip_special_tokens)
        for spaced, joined in TIDY if tidy else ():
            texts = [text.replace(spaced, joined) for text in texts]
        return texts[0] if one else texts

    @property
    def in_graph(self) -> bool:
        """Whether it also runs in a TensorFlow graph, with the agreement that the class states."""
        return self.not_in_graph is None

    def id_to_token(self, id: int) -> str:
        """The token of an id; ValueError for an id outside the vocabulary."""
        if not 0 <= id < self.vocabulary_size:
            raise ValueError(f"`id` must be in [0, {self.vocabulary_size}), the vocabulary. Received: id={id}")
        return self.vocabulary[id]

    def token_to_id(self, token: str) -> int:
        """The id of a token; ValueError for a token that is not in the vocabulary."""
        if token not in self._id_of:
            raise ValueError(f"`token` must be in the vocabulary. Received: token={token!r}")
        return self._id_of[token]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Tokenizer":
        """Builds the tokenizer that `get_config` describes."""
        return cls(**config)

    def _settings(self) -> dict[str, Any]:
        """The constructor's arguments that every tokenizer has."""
        names = ("max_length", "truncation_side", "clean_up_tokenization_spaces")
        tokens = dict.fromkeys(("unknown_token", "pad_token", "cls_token", "sep_token", "mask_token"))
        return {name: getattr(self, name) for name in names} | tokens | self.special_tokens

    def _padding(self, needed: bool) -> int:
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

    def _call_in_graph(self, texts, pairs, template: Template, limit: int | None, length: int | None):
        first = strings("texts", texts)
        second = None if pairs is None else strings("pairs", pairs)
        if second is not None and not second.shape.is_compatible_with(first.shape):
            received = f"shapes texts={tuple(first.shape)}, pairs={tuple(second.shape)}"
            raise ValueError(f"`pairs` must be as many as `texts`. Received: {received}")
        encoded = None if second is None else self._encode_in_graph(second)
        rows = template.fill_ragged(self._encode_in_graph(first), encoded, limit, self.truncation_side)
        ids = rows.to_tensor(self._padding(needed=first.shape.rank != 0 or length is not None), shape=[None, length])
        return ids[0] if first.shape.rank == 0 else ids

    def _encode_in_graph(self, texts):
        self._check_in_graph("texts")
        # There is no Python control flow over tensors to convert, and to look for it takes a second.
        return tf.autograph.experimental.do_not_convert(self._graph_encode)(tf.reshape(texts, [-1]))

    def _decode_in_graph(self, ids, skip: bool, tidy: bool):
        rows = tf.RaggedTensor.from_tensor(ids[None]) if ids.shape.rank == 1 else ids
        kept = (rows.values >= 0) & (rows.values < self.vocabulary_size)
        if skip:
            kept &= ~tf.gather(tf.constant(self._is_special), within(rows.values, self.vocabulary_size, 0))
        texts = self._graph_decode(tf.ragged.boolean_mask(rows, rows.with_values(kept)))
        for spaced, joined in TIDY if tidy else ():
            texts = tf.strings.regex_replace(texts, spaced.replace(".", r"\.").replace("?", r"\?"), joined)
        return texts[0] if ids.shape.rank == 1 else texts

    @cached_property
    def _is_special(self) -> np.ndarray:
        special = np.zeros(self.vocabulary_size, bool)
        special[list(self._special_ids())] = True
        return special

    # What a subclass brings.

    @property
    @abc.abstractmethod
    def not_in_graph(self) -> str | None:
        """Why it does not run in a graph, or None."""

    @abc.abstractmethod
    def save(self, directory: str | Path) -> None:
        """Writes files that `from_pretrained` reads."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""

    @classmethod
    @abc.abstractmethod
    def _arguments(cls, folder: Path) -> dict[str, Any]:
        """The constructor's arguments from a directory."""

    @abc.abstractmethod
    def _special_ids(self) -> set[int]:
        """The ids that decoding skips."""

    @abc.abstractmethod
    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Texts -> ids without special tokens."""

    @abc.abstractmethod
    def _decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        """Ids, all within the vocabulary -> texts."""

    @abc.abstractmethod
    def _graph_encode(self, texts):
        """String tensor (B,) -> ragged int32 (B, None)."""

    @abc.abstractmethod
    def _graph_decode(self, ids):
        """Ragged ids (B, None), all within the vocabulary -> string tensor (B,)."""

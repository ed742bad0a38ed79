"""BERT's tokenizer in TensorFlow ops: (B,) strings -> (B, T) ids -> (B,) strings.

The ids are those of `transformers.BertTokenizer`. The ops use no lookup tables, so they run eagerly, in `tf.data` and
inside a SavedModel. Devlin et al. 2018, arXiv:1810.04805; Song et al. 2021, arXiv:2012.15524 (WordPiece in linear
time).
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import keras

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.text.argument_checks import check_max_length, check_seed
from keras_tx.text.base import Tokenizer
from keras_tx.text.bert_decoding import build_pieces, join_pieces
from keras_tx.text.bert_files import read_arguments, write_directory
from keras_tx.text.bert_inputs import build_inputs
from keras_tx.text.bert_normalization import normalize, split_words, unused_characters
from keras_tx.text.clean_up import clean_up_in_graph
from keras_tx.text.max_match import MaxMatchDropout
from keras_tx.text.tensor_inputs import as_id_tensor, as_string_tensor, replace_unknown_ids
from keras_tx.text.vocabulary import SPECIAL_TOKENS, check_vocabulary, read_vocabulary, train_vocabulary
from keras_tx.text.wordpiece import build_wordpiece, replace_long_words
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


@keras.saving.register_keras_serializable(package="keras_tx")
class BertTokenizer(Tokenizer):
    """BERT's WordPiece tokenizer, with the same results as `transformers.BertTokenizer`.

    It always runs in TensorFlow ops, so it returns TensorFlow tensors outside a graph as well. Special tokens in a text
    stay one token. Bytes that are not UTF-8 become U+FFFD, which BERT deletes like control characters. The only known
    differences from transformers are combining marks and punctuation that Unicode added or changed after version 8.0
    (2015).

    Args:
        vocabulary: the tokens in the order of their ids. Tokens that continue a word begin with "##".
        lowercase: whether to lowercase texts.
        strip_accents: whether to remove accents; None removes them if `lowercase` is True.
        split_chinese: whether to make every Chinese character a word (`tokenize_chinese_chars` in transformers).
        max_length: the default for the largest number of tokens in a row, special tokens included. 512, because BERT
            has 512 positions.
        unknown_token: the token for words that cannot be split into tokens of the vocabulary.
        pad_token: the token that pads shorter rows.
        cls_token: the token at the beginning of every row.
        sep_token: the token at the end of every text.
        mask_token: the token that replaces others in masked language modeling; the only special token that `vocabulary`
            may lack.
        clean_up_tokenization_spaces: whether `decode` removes the spaces before punctuation and in English contractions
            from the whole text by default; see there.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `vocabulary` is empty, repeats a token or lacks a special token, or `max_length` is less than 2.

    Reference:
        Devlin et al. 2018, BERT, arXiv:1810.04805.

    Examples:
        >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hot", "dog", "##s"]
        >>> tokenizer = keras_tx.text.BertTokenizer(vocabulary)
        >>> features = tokenizer(["Hot dogs", "a dog"])
        >>> features["token_ids"].numpy()
        array([[2, 5, 6, 7, 3],
               [2, 1, 6, 3, 0]], dtype=int32)
        >>> tokenizer("hot", "dog")["segment_ids"].numpy()
        array([0, 0, 0, 1, 1], dtype=int32)
        >>> tokenizer.decode(features["token_ids"])  # without "a", which the vocabulary lacks
        ['hot dogs', 'dog']
    """

    def __init__(
        self,
        vocabulary: Sequence[str],
        *,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        split_chinese: bool = True,
        max_length: int = 512,
        unknown_token: str = "[UNK]",
        pad_token: str = "[PAD]",
        cls_token: str = "[CLS]",
        sep_token: str = "[SEP]",
        mask_token: str = "[MASK]",
        clean_up_tokenization_spaces: bool = False,
    ) -> None:
        needed = dict(unknown_token=unknown_token, pad_token=pad_token, cls_token=cls_token, sep_token=sep_token)
        vocabulary = check_vocabulary(vocabulary, needed)
        super().__init__(vocabulary, needed | {"mask_token": mask_token}, check_max_length(max_length, 2))
        self.lowercase: bool = checks.boolean("lowercase", lowercase)
        self.strip_accents: bool | None = checks.boolean("strip_accents", strip_accents, none=True)
        self.split_chinese: bool = checks.boolean("split_chinese", split_chinese)
        self.clean_up_tokenization_spaces: bool = checks.boolean(
            "clean_up_tokenization_spaces", clean_up_tokenization_spaces
        )
        known = [token for token in self.special_tokens.values() if token in self._id_of]
        *placeholders, self._foreign = unused_characters(self.vocabulary, len(known) + 1)
        self._stand_ins = dict(zip(known, placeholders, strict=True))

    @classmethod
    def from_vocabulary(cls, path: str | Path, **options: Any) -> Self:
        """Reads a vocabulary file (vocab.txt).

        Args:
            path: a file with one token per line; the first line has the id 0.
            options: further arguments of the constructor.

        Raises:
            ValueError: `path` is not a file.

        Examples:
            >>> import pathlib
            >>> _ = pathlib.Path("vocab.txt").write_text("[PAD] [UNK] [CLS] [SEP] [MASK] hot dog".replace(" ", "\\n"))
            >>> keras_tx.text.BertTokenizer.from_vocabulary("vocab.txt").vocabulary_size
            7
        """
        return cls(read_vocabulary(path), **options)

    @classmethod
    def from_pretrained(cls, directory: str | Path, **overrides: Any) -> Self:
        """Reads a Hugging Face directory: vocab.txt or tokenizer.json, and tokenizer_config.json if there is one.

        Args:
            directory: the path of the directory. If its files set no limit, `max_length` is 512.
            overrides: arguments of the constructor that replace those of the directory.

        Raises:
            ValueError: the directory does not exist or holds a tokenizer of another kind.
        """
        return cls(**(read_arguments(directory) | overrides))

    @classmethod
    def train(
        cls, texts: Any, vocabulary_size: int, *, lowercase: bool = True, verbose: int = 0, **options: Any
    ) -> Self:
        """Learns a vocabulary from texts: the special tokens, the characters, then frequent pieces.

        The same texts give the same vocabulary on every machine. Words of more than 100 characters, which become the
        unknown token, are left out. With more than a million different words the rarest are forgotten, so that the
        memory is bounded.

        Args:
            texts: an iterable of `str`, such as a generator; or a `tf.data.Dataset` of strings, such as
                `load_text(..., in_memory=False).train`. They are read once, one by one.
            vocabulary_size: the largest number of tokens. Small amounts of text give fewer tokens.
            lowercase: whether to lowercase texts, here and in the tokenizer.
            verbose: 1 shows a progress bar, 0 does not.
            options: further arguments of the constructor.

        Raises:
            TypeError: `texts` are not strings.
            ValueError: `texts` contain no word of at most 100 characters, or `vocabulary_size` is not larger than the
                number of special tokens.

        Reference:
            Sennrich et al. 2016, arXiv:1508.07909.

        Examples:
            >>> tokenizer = keras_tx.text.BertTokenizer.train(["ab ab", "Ab cb"], 50)
            >>> tokenizer.vocabulary[5:]
            ['a', 'b', 'c', '##b', 'ab']
        """
        special = SPECIAL_TOKENS | {name: options[name] for name in SPECIAL_TOKENS if name in options}
        options["lowercase"] = lowercase
        empty = cls(list(special.values()), **options)
        vocabulary = train_vocabulary(
            texts,
            vocabulary_size,
            empty.vocabulary,
            verbose,
            lowercase=empty.lowercase,
            strip_accents=empty.strip_accents,
            handle_chinese_chars=empty.split_chinese,
        )
        return cls(vocabulary, **options)

    def __call__(
        self, texts: Any, pairs: Any = None, *, max_length: int | None = None, padding: str = "longest"
    ) -> dict[str, Any]:
        """Converts texts to rows of ids: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP], padded on the right.

        Args:
            texts: a string, or a list, array or tensor of B strings (`str` or `bytes`).
            pairs: a second text for each of `texts`, in the same form, or None.
            max_length: the largest number of tokens in a row. None: the tokenizer's `max_length`. Longer rows are
                truncated at the end; of a pair, the longer text first, as with `truncation=True` in transformers.
            padding: "longest" pads to the longest row of the batch, "max_length" to `max_length`.

        Returns:
            A dictionary with "token_ids" and "segment_ids" (1 for the pair and the [SEP] after it, 0 elsewhere), int32
            tensors (B, T), or (T,) for one string.

        Raises:
            TypeError: `texts` or `pairs` are not strings.
            ValueError: `texts` have rank 2, there are not as many `pairs`, `padding` is unknown, or `max_length` is
                too small.
        """
        first = as_string_tensor("texts", texts)
        second = None if pairs is None else as_string_tensor("pairs", pairs)
        if second is not None and not second.shape.is_compatible_with(first.shape):
            received = f"shapes texts={tuple(first.shape)}, pairs={tuple(second.shape)}"
            raise ValueError(f"`pairs` must have the same length as `texts`. Received: {received}")
        checks.one_of("padding", padding, ("longest", "max_length"))
        limit = check_max_length(self.max_length if max_length is None else max_length, 2 if second is None else 3)
        special = {"cls_id": self.cls_id, "sep_id": self.sep_id, "pad_id": self.pad_id}
        length = limit if padding == "max_length" else None
        second_ids = None if second is None else self._ragged_ids(second)
        inputs = build_inputs(self._ragged_ids(first), second_ids, max_length=limit, length=length, **special)
        if first.shape.rank == 0:
            return {name: ids[0] for name, ids in inputs.items()}
        for ids in inputs.values():
            ids.set_shape([first.shape[0], length])
        return inputs

    def tokenize(self, texts: Any, *, dropout: float = 0.0, seed: Any = None) -> Tensor:
        """Converts texts to token ids without special tokens, padding or truncation.

        Args:
            texts: a string, or a list, array or tensor of B strings (`str` or `bytes`).
            dropout: the probability, in [0, 1), that a matching piece is dropped in favour of a shorter one; the
                shortest is never dropped. A model then sees a word split in several ways, which helps when there is
                little training data. For training only.
            seed: two integers, for the same splits in every call. None: new splits in every call.

        Returns:
            Ragged int32 (B, None), or int32 (T,) for one string.

        Raises:
            TypeError: `texts` are not strings.
            ValueError: `dropout` is outside [0, 1), or `seed` is not two integers.

        Reference:
            MaxMatch-Dropout, Hiraoka 2022, arXiv:2209.04126.

        Examples:
            >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "d", "dog", "##o", "##og", "##g"]
            >>> tokenizer = keras_tx.text.BertTokenizer(vocabulary)
            >>> tokenizer.tokenize(["dog", "dog dog"]).to_list()
            [[5], [5, 5]]
            >>> tokenizer.tokenize("dog", dropout=0.999999).numpy()
            array([4, 6, 8], dtype=int32)
        """
        texts = as_string_tensor("texts", texts)
        dropout = checks.rate("dropout", dropout)
        ids = self._ragged_ids(texts) if dropout == 0 else self._sampled_ids(texts, dropout, seed)
        return ids[0] if texts.shape.rank == 0 else ids

    def decode(
        self, ids: Any, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """Converts token ids back to texts as `transformers.BertTokenizer.decode` does; words are joined by spaces.

        Args:
            ids: integers (T,), (B, T) or ragged (B, None), as lists, arrays or tensors.
            skip_special_tokens: whether to leave the special tokens out.
            clean_up_tokenization_spaces: None removes the space before each token of punctuation or of an English
                contraction, as does the WordPiece decoder of the `tokenizers` library, if the constructor does not say
                True. True also removes those in the whole text, such as both in "don ' t". False keeps all spaces.

        Returns:
            Eagerly a `str` for one row, or a list of B strings for several rows; in a graph a string tensor, () or
            (B,).

        Raises:
            TypeError: `ids` are not integers.
            ValueError: `ids` have rank 0 or more than 2, or one is outside the vocabulary. In a graph ids outside the
                vocabulary become `unknown_token` instead.
        """
        ids = as_id_tensor(ids)
        rows = tf.RaggedTensor.from_tensor(ids[None]) if ids.shape.rank == 1 else ids
        rows = rows.with_values(replace_unknown_ids(rows.values, self.vocabulary_size, self.unknown_id))
        skipped = [self._id_of[token] for token in self._stand_ins] if skip_special_tokens else []
        clean_up = checks.boolean("clean_up_tokenization_spaces", clean_up_tokenization_spaces, none=True)
        first_pieces, next_pieces = self._pieces if clean_up is False else self._clean_pieces
        texts = join_pieces(rows, first_pieces, next_pieces, skipped)
        if self.clean_up_tokenization_spaces if clean_up is None else clean_up:
            texts = clean_up_in_graph(texts)
        if tf.executing_eagerly():
            texts = [text.decode("utf-8") for text in texts.numpy()]
        return texts[0] if ids.shape.rank == 1 else texts

    def save(self, directory: str | Path) -> None:
        """Writes vocab.txt and tokenizer_config.json, which `from_pretrained` and transformers can load.

        They replace the tokenizer that the directory has: files that would be loaded instead are removed.
        """
        write_directory(directory, self.get_config())

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor."""
        names = ["vocabulary", "lowercase", "strip_accents", "split_chinese", "max_length"]
        names.append("clean_up_tokenization_spaces")
        return {name: getattr(self, name) for name in names} | self.special_tokens

    @property
    def not_in_graph(self) -> None:
        """Always None: the tokenizer runs in every TensorFlow graph."""
        return None

    def _ragged_ids(self, texts: Tensor) -> Tensor:
        """String tensor () or (B,) -> ragged int32 (B, None); a scalar is one row."""
        return self._wordpiece.tokenize(self._words(texts)).merge_dims(1, 2)

    def _sampled_ids(self, texts: Tensor, dropout: float, seed: Any) -> Tensor:
        if seed is None:
            seed = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32)
        words = self._words(texts)
        return words.with_values(self._max_match.word_ids(words.values, dropout, check_seed(seed))).merge_dims(1, 2)

    def _words(self, texts: Tensor) -> Tensor:
        """String tensor () or (B,) -> ragged words (B, None), with placeholders for special tokens and long words."""
        strip = self.lowercase if self.strip_accents is None else self.strip_accents
        texts = normalize(tf.reshape(texts, [-1]), self._stand_ins, self._foreign, self.lowercase, strip)
        words = split_words(texts, self._stand_ins, self.split_chinese)
        return replace_long_words(words, self._stand_ins[self.special_tokens["unknown_token"]])

    @cached_property
    def _wordpiece(self) -> Any:
        return build_wordpiece(self._tokens_in_words, self._stand_ins[self.special_tokens["unknown_token"]])

    @cached_property
    def _max_match(self) -> MaxMatchDropout:
        return MaxMatchDropout(self._tokens_in_words, self._wordpiece.tokenize)

    @property
    def _tokens_in_words(self) -> list[str]:
        """The vocabulary with the same placeholders for special tokens as in `_words`."""
        return [self._stand_ins.get(token, token) for token in self.vocabulary]

    @cached_property
    def _clean_pieces(self) -> tuple[Tensor, Tensor]:
        return build_pieces(self.vocabulary, clean_up=True)

    @cached_property
    def _pieces(self) -> tuple[Tensor, Tensor]:
        return build_pieces(self.vocabulary, clean_up=False)

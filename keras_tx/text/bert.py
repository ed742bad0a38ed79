"""BERT's tokenizer in the TensorFlow graph: (B,) strings -> (B, T) ids -> (B,) strings.

The ids are those of `transformers.BertTokenizer`. Everything runs in TensorFlow ops without lookup tables: eagerly, in
`tf.data` and inside a SavedModel. Devlin et al. 2018, arXiv:1810.04805; Song et al. 2021, arXiv:2012.15524 (WordPiece
in linear time).
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import keras

from keras_tx import checks
from keras_tx.optional import Lazy
from keras_tx.text.bert_inputs import pack
from keras_tx.text.decode import build_pieces, join
from keras_tx.text.files import by_directory
from keras_tx.text.huggingface import read_directory, write_directory
from keras_tx.text.max_match import MaxMatchDropout
from keras_tx.text.normalize import STAND_INS, normalize, split_words
from keras_tx.text.tensor_inputs import as_ids, at_least, boolean, seed_of, strings, within
from keras_tx.text.vocabulary import SPECIAL_TOKENS, check_vocabulary, read_vocabulary, train_vocabulary
from keras_tx.text.wordpiece import build_wordpiece, short_words

tf = Lazy("tensorflow")


@keras.saving.register_keras_serializable(package="keras_tx")
class BertTokenizer:
    """Texts to ids and back, as BERT does it.

    ```python
    tokenizer = BertTokenizer.from_vocabulary("vocab.txt")
    tokenizer(["A dog runs.", "Hi"])      # {"token_ids": int32 (2, 6), "segment_ids": int32 (2, 6)}
    tokenizer.decode([[101, 7632, 102]])  # ["hi"]
    ```

    Bytes that are not UTF-8 read as U+FFFD, which BERT deletes like control characters; nothing raises. The only
    known differences from transformers are marks and punctuation that Unicode added or changed after 8.0 (2015).

    Args:
        vocabulary: tokens in the order of their ids, pieces that continue a word with "##" in front.
        lowercase: whether texts are lowercased.
        strip_accents: whether accents are dropped; None: if `lowercase`.
        split_chinese: whether every Chinese character is a word.
        max_length: the most tokens of a row, special tokens included, where a call does not say.
        unknown_token: stands for words that cannot be spelled with the vocabulary.
        pad_token: fills rows up.
        cls_token: begins every row.
        sep_token: ends every text.
        mask_token: hides a token in masked language modeling; the only one that `vocabulary` may lack.

    Special tokens that are written in a text stay one token.

    Raises:
        TypeError, ValueError: an argument of another type; a vocabulary that is empty, has a token twice or lacks
            a special one; `max_length` < 2.
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
    ):
        needed = dict(unknown_token=unknown_token, pad_token=pad_token, cls_token=cls_token, sep_token=sep_token)
        self.vocabulary = check_vocabulary(vocabulary, needed)
        self.vocabulary_size = len(self.vocabulary)
        self.lowercase = boolean("lowercase", lowercase)
        self.strip_accents = boolean("strip_accents", strip_accents, none=True)
        self.split_chinese = boolean("split_chinese", split_chinese)
        self.max_length = at_least("max_length", max_length, 2)
        self.special_tokens = needed | {"mask_token": mask_token}
        self._id_of = {token: i for i, token in enumerate(self.vocabulary)}
        self.unknown_id = self._id_of[unknown_token]
        self.pad_id = self._id_of[pad_token]
        self.cls_id = self._id_of[cls_token]
        self.sep_id = self._id_of[sep_token]
        self.mask_id = self._id_of.get(mask_token)
        marked = [token for token in self.special_tokens.values() if token in self._id_of]
        self._stand_ins = dict(zip(marked, STAND_INS, strict=False))
        self.in_graph, self.not_in_graph = True, None  # as the other tokenizers say it

    @classmethod
    def from_vocabulary(cls, path: str | Path, **options) -> "BertTokenizer":
        """Reads a vocab.txt, one token a line; `options` are the constructor's."""
        return cls(read_vocabulary(path), **options)

    @classmethod
    def from_pretrained(cls, directory: str | Path, **overrides) -> "BertTokenizer":
        """Reads a Hugging Face directory: vocab.txt or tokenizer.json, and tokenizer_config.json if it is there.

        A length that the directory does not limit is 512. `overrides` are the constructor's arguments.

        Raises:
            ValueError: the directory is missing or holds another kind of tokenizer.
        """
        return cls(**(read_directory(directory) | overrides))

    @classmethod
    def from_transformers(cls, tokenizer: Any, **overrides) -> "BertTokenizer":
        """Does what a `transformers.BertTokenizer` or `BertTokenizerFast` object does.

        Raises:
            TypeError: the object cannot be saved as a tokenizer.
        """
        return by_directory(lambda directory: cls.from_pretrained(directory, **overrides), tokenizer)

    @classmethod
    def train(cls, texts: Any, vocabulary_size: int, *, lowercase: bool = True, **options) -> "BertTokenizer":
        """Learns a vocabulary from texts: [PAD], [UNK], [CLS], [SEP], [MASK], characters, then frequent pieces.

        The same texts give the same vocabulary.

        Args:
            texts: iterable of str, or a `tf.data.Dataset` of strings.
            vocabulary_size: the most tokens; few texts give fewer.
            lowercase: whether texts are lowercased, in training and after.
            options: the constructor's other arguments.

        Raises:
            TypeError, ValueError: texts that are no strings or have no words; `vocabulary_size` too small.
        """
        special = SPECIAL_TOKENS | {name: options[name] for name in SPECIAL_TOKENS if name in options}
        options["lowercase"] = lowercase
        empty = cls(list(special.values()), **options)
        vocabulary = train_vocabulary(
            texts,
            vocabulary_size,
            empty.vocabulary,
            lowercase=empty.lowercase,
            strip_accents=empty.strip_accents,
            handle_chinese_chars=empty.split_chinese,
        )
        return cls(vocabulary, **options)

    def __call__(self, texts, pairs=None, *, max_length: int | None = None, padding: str = "longest") -> dict:
        """Texts to rows of ids: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP], then [PAD].

        Args:
            texts: a string, or a list, array or tensor of B strings (str or bytes).
            pairs: a second text for each, likewise.
            max_length: the most tokens of a row; None: the tokenizer's. What is too long loses its end, of a pair
                the longer half first, as with `truncation=True` in transformers.
            padding: "longest" pads to the longest row, "max_length" to `max_length`.

        Returns:
            "token_ids" and "segment_ids" (1 for the pair and its [SEP]), int32 tensors: (B, T), or (T,) for one string.

        Raises:
            TypeError: texts that are not strings.
            ValueError: texts of rank 2, pairs of another shape, an unknown `padding`, a `max_length` too small.
        """
        first = strings("texts", texts)
        second = None if pairs is None else strings("pairs", pairs)
        if second is not None and not second.shape.is_compatible_with(first.shape):
            received = f"shapes texts={tuple(first.shape)}, pairs={tuple(second.shape)}"
            raise ValueError(f"`pairs` must be as many as `texts`. Received: {received}")
        checks.one_of("padding", padding, ("longest", "max_length"))
        limit = self.max_length if max_length is None else max_length
        at_least("max_length", limit, 2 if second is None else 3)
        special = {"cls_id": self.cls_id, "sep_id": self.sep_id, "pad_id": self.pad_id}
        length = limit if padding == "max_length" else None
        second = None if second is None else self._ragged_ids(second)
        packed = pack(self._ragged_ids(first), second, max_length=limit, length=length, **special)
        return {name: ids[0] for name, ids in packed.items()} if first.shape.rank == 0 else packed

    def tokenize(self, texts, *, dropout: float = 0.0, seed=None):
        """Texts to ids without special tokens and without a limit: ragged int32 (B, None), or (T,) for one string.

        Args:
            texts: a string, or a list, array or tensor of B strings (str or bytes).
            dropout: how likely each piece that fits is passed over for a shorter one, in [0, 1); the shortest never is.
                So a model sees words in several spellings and learns what their parts mean, where there is little text
                (MaxMatch-Dropout, Hiraoka 2022, arXiv:2209.04126). Not for what is to be predicted or served.
            seed: two integers; the same seed draws the same pieces. None draws others in each call.

        Raises:
            TypeError: texts that are not strings.
            ValueError: `dropout` outside [0, 1); a `seed` that is not two integers.
        """
        texts = strings("texts", texts)
        checks.rate("dropout", dropout)
        ids = self._ragged_ids(texts) if dropout == 0 else self._sampled_ids(texts, dropout, seed)
        return ids[0] if texts.shape.rank == 0 else ids

    def decode(self, ids, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = True):
        """Ids to texts, as `transformers.BertTokenizer.decode` joins them: pieces to words, words by spaces.

        Args:
            ids: integers (T,), (B, T) or ragged (B, None): lists, arrays or tensors.
            skip_special_tokens: whether the special tokens are left out.
            clean_up_tokenization_spaces: whether the spaces before punctuation and English contractions are dropped.

        Returns:
            Eagerly a `str`, or a list of B of them; in a graph a string tensor, () or (B,).

        Raises:
            TypeError: ids that are not integers.
            ValueError: ids of rank 0 or over 2, or outside the vocabulary; in a graph these read as `unknown_token`.
        """
        ids = as_ids(ids)
        rows = tf.RaggedTensor.from_tensor(ids[None]) if ids.shape.rank == 1 else ids
        rows = rows.with_values(within(rows.values, self.vocabulary_size, self.unknown_id))
        skipped = [self._id_of[token] for token in self._stand_ins] if skip_special_tokens else []
        first_pieces, next_pieces = self._tidy_pieces if clean_up_tokenization_spaces else self._pieces
        texts = join(rows, first_pieces, next_pieces, skipped)
        if tf.executing_eagerly():
            texts = [text.decode("utf-8") for text in texts.numpy()]
        return texts[0] if ids.shape.rank == 1 else texts

    def save(self, directory: str | Path) -> None:
        """Writes vocab.txt and tokenizer_config.json, which `from_pretrained` here and in transformers read."""
        write_directory(directory, self.get_config())

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

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("vocabulary", "lowercase", "strip_accents", "split_chinese", "max_length")
        return {name: getattr(self, name) for name in names} | self.special_tokens

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BertTokenizer":
        """Builds the tokenizer that `get_config` describes."""
        return cls(**config)

    def _ragged_ids(self, texts):
        """String tensor () or (B,) -> ragged int32 (B, None); a scalar is one row."""
        return self._wordpiece.tokenize(self._words(texts)).merge_dims(1, 2)

    def _sampled_ids(self, texts, dropout, seed):
        if seed is None:
            seed = tf.random.uniform([2], maxval=2**31 - 1, dtype=tf.int32)
        words = self._words(texts)
        return words.with_values(self._max_match.word_ids(words.values, dropout, seed_of(seed))).merge_dims(1, 2)

    def _words(self, texts):
        """String tensor () or (B,) -> ragged strings (B, words), special tokens and long words as their stand-ins."""
        strip = self.lowercase if self.strip_accents is None else self.strip_accents
        texts = normalize(tf.reshape(texts, [-1]), self._stand_ins, self.lowercase, strip)
        words = split_words(texts, self.split_chinese)
        return short_words(words, self._stand_ins[self.special_tokens["unknown_token"]])

    @cached_property
    def _wordpiece(self):
        return build_wordpiece(self._marked, self._stand_ins[self.special_tokens["unknown_token"]])

    @cached_property
    def _max_match(self):
        return MaxMatchDropout(self._marked, self._wordpiece.tokenize)

    @property
    def _marked(self):
        return [self._stand_ins.get(token, token) for token in self.vocabulary]

    @cached_property
    def _tidy_pieces(self):
        return build_pieces(self.vocabulary, tidy=True)

    @cached_property
    def _pieces(self):
        return build_pieces(self.vocabulary, tidy=False)

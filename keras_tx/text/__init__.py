"""Tokenizers, which convert texts to token ids and back."""

from keras_tx.text.base import Tokenizer
from keras_tx.text.bert import BertTokenizer
from keras_tx.text.byte_pair import BytePairTokenizer
from keras_tx.text.character import CharacterTokenizer
from keras_tx.text.compatibility import check_fits
from keras_tx.text.load import load_tokenizer
from keras_tx.text.marian import MarianTokenizer
from keras_tx.text.sentence_piece import SentencePieceTokenizer
from keras_tx.text.word_level import WordLevelTokenizer

__all__ = [
    "BertTokenizer",
    "BytePairTokenizer",
    "CharacterTokenizer",
    "MarianTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "WordLevelTokenizer",
    "check_fits",
    "load_tokenizer",
]

"""Text <-> ids."""

from keras_tx.text.bert import BertTokenizer

__all__ = ["BertTokenizer"]

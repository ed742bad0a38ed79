"""Datasets of texts, and batches of token ids."""

from keras_tx.data.buckets import bucket_by_length
from keras_tx.data.datasets import TextDataset, load_dataset
from keras_tx.data.masking import mask_tokens
from keras_tx.data.packing import pack_sequences
from keras_tx.data.padding_rows import fill_batches
from keras_tx.data.plain_text import PlainText, load_text
from keras_tx.data.token_reader import read_tokens
from keras_tx.data.token_writer import write_tokens
from keras_tx.data.translation import TranslationDataset, load_translation

__all__ = [
    "PlainText",
    "TextDataset",
    "TranslationDataset",
    "bucket_by_length",
    "fill_batches",
    "load_dataset",
    "load_text",
    "load_translation",
    "mask_tokens",
    "pack_sequences",
    "read_tokens",
    "write_tokens",
]

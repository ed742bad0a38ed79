"""Ids -> texts, in the graph, by functions that all signatures of an export share.

A function that several graphs call is saved once, and so are the strings of the vocabulary in it.
"""

from typing import Any

from keras_tx.optional import Lazy
from keras_tx.serving.request_inputs import graph_function
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def rows_spec() -> Any:
    """Ragged ids (B, None)."""
    return tf.RaggedTensorSpec([None, None], tf.int32, 1, tf.int64)


def text_function(tokenizer: Any) -> Any:
    """Returns a `tf.function`: ragged ids (B, None) -> texts (B,)."""

    @graph_function(rows_spec())
    def texts(rows: Tensor) -> Tensor:
        return tf.convert_to_tensor(tokenizer.decode(rows), tf.string)

    return texts


def token_function(tokenizer: Any) -> Any:
    """Returns a `tf.function`: ids (B, T) -> the strings of their tokens (B, T); "" for an id without a token."""
    vocabulary = tokenizer.vocabulary

    @graph_function(tf.TensorSpec([None, None], tf.int32))
    def tokens(ids: Tensor) -> Tensor:
        is_known = (ids >= 0) & (ids < len(vocabulary))
        return tf.gather(tf.constant([*vocabulary, ""]), tf.where(is_known, ids, len(vocabulary)))

    return tokens

"""Base class of generative models: the defaults of the embedding, logits over the vocabulary, and `generate`."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_tx import generation
from keras_tx.layers import TokenEmbedding
from keras_tx.layers.projection import Projection
from keras_tx.models.chunked import VocabularyModel
from keras_tx.models.token_model import options
from keras_tx.types import DType, Tensor


def language_embedding(embedding_options: Any, hidden_dim: int, dropout: float) -> dict[str, Any]:
    """The embedding's options, with defaults as in Vaswani et al. 2017: scaled, so that tied logits start small."""
    return options(
        "embedding_options",
        embedding_options,
        TokenEmbedding,
        position_encoding="sinusoidal",
        scale=True,
        dropout=dropout,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=hidden_dim**-0.5),
    )


def make_head(vocabulary_size: int, tie_embeddings: bool, dtype: DType) -> Projection | None:
    """The output layer for the logits; None if the token embeddings are its kernel."""
    if tie_embeddings:
        return None
    return Projection(vocabulary_size, use_bias=False, dtype=dtype, name="head")


def table_of(embedding: TokenEmbedding, head: Projection | None) -> tuple[Tensor, None]:
    """The output kernel (V, D) and None, because there is no bias."""
    return (embedding.tokens.embeddings if head is None else keras.ops.transpose(head.kernel)), None


def logits_of(hidden: Tensor, embedding: TokenEmbedding, head: Projection | None) -> Tensor:
    """Hidden states (B, T, D) -> logits (B, T, V)."""
    return embedding(hidden, reverse=True) if head is None else head(hidden)


class LanguageModel(VocabularyModel):
    """A model whose outputs are the logits of the next token."""

    def _generation_model(self) -> Any:
        """The functional model that `generate` runs step by step."""
        return self

    def generate(self, inputs: Any, strategy: Any = None, **options: Any) -> Any:
        """Generates a continuation of each prompt, or a target sequence for each source.

        See `keras_tx.generation.generate` for the arguments and results.
        """
        return generation.generate(self, inputs, strategy, **options)

    def stream(self, inputs: Any, strategy: Any = None, **options: Any) -> Iterator[Any]:
        """Yields the generated tokens or pieces of text, each as soon as it is known.

        See `keras_tx.generation.stream` for the arguments and results.
        """
        return generation.stream(self, inputs, strategy, **options)

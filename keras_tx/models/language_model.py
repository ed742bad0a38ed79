"""Base class of generative models: the defaults of the embedding, logits over the vocabulary, and `generate`."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_tx import checks, generation
from keras_tx.layers import TokenEmbedding
from keras_tx.layers.projection import VocabularyProjection
from keras_tx.models.base import HasLayers
from keras_tx.models.chunked import VocabularyModel
from keras_tx.models.token_model import options
from keras_tx.types import DType, Shape, Tensor


def language_embedding(embedding_options: Any, hidden_dim: int, dropout: float) -> dict[str, Any]:
    """The embedding's options, with defaults as in Vaswani et al. 2017: vectors of length 1, which are scaled."""
    made = options(
        "embedding_options",
        embedding_options,
        TokenEmbedding,
        position_encoding="sinusoidal",
        scale=True,
        dropout=dropout,
    )
    width = checks.positive_int("embedding_dim", made.get("embedding_dim"), none=True) or hidden_dim
    return {"embeddings_initializer": keras.initializers.RandomNormal(stddev=width**-0.5), **made}


class Head(HasLayers):
    """The output layer: hidden states (B, T, D) -> logits (B, T, V).

    Args:
        embedding: the embedding of the tokens that are predicted.
        tie_embeddings: whether its token embeddings are the kernel.
        use_output_bias: whether a bias (V,) is added to the logits.
        dtype: dtype policy.

    Raises:
        ValueError: the embeddings are tied, and their `embedding_dim` is not the width of hidden states.

    Attributes:
        dense: the layer with a kernel of its own, and with the bias; None if the embeddings are tied.
        bias: the layer that adds the bias to tied logits, or None.
    """

    def __init__(self, embedding: TokenEmbedding, tie_embeddings: bool, use_output_bias: bool, dtype: DType) -> None:
        if tie_embeddings and embedding.embedding_dim not in (None, embedding.hidden_dim):
            raise ValueError(
                "`tie_embeddings` must be False if `embedding_dim` is not `hidden_dim`, as hidden states have another "
                f"width. Received: tie_embeddings={tie_embeddings}, embedding_dim={embedding.embedding_dim}"
            )
        self.embedding = embedding
        self.dense: VocabularyProjection | None = None
        self.bias: LogitBias | None = None
        if not tie_embeddings:
            size = embedding.vocabulary_size
            self.dense = VocabularyProjection(size, use_bias=use_output_bias, dtype=dtype, name="head")
        elif use_output_bias:
            self.bias = LogitBias(dtype=dtype, name="head_bias")

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.dense is not None:
            return self.dense(hidden)
        logits = self.embedding(hidden, reverse=True)
        return logits if self.bias is None else self.bias(logits)

    def table(self) -> tuple[Tensor, Tensor | None]:
        """The output kernel (V, D), and the bias (V,) or None."""
        if self.dense is not None:
            return keras.ops.transpose(self.dense.kernel), self.dense.bias
        return self.embedding.table(), None if self.bias is None else self.bias.bias


@keras.saving.register_keras_serializable(package="keras_tx")
class LogitBias(keras.layers.Layer):
    """Adds a learned vector (V,) to logits (..., V)."""

    def build(self, inputs_shape: Shape) -> None:
        self.supports_masking = True
        self.bias = self.add_weight(shape=(inputs_shape[-1],), initializer="zeros", name="bias")

    def call(self, inputs: Tensor) -> Tensor:
        return inputs + self.bias

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape


class LanguageModel(VocabularyModel):
    """A model whose outputs are the logits of the next token; a subclass sets `_head`, its `Head`."""

    _head: Head

    def _table(self) -> tuple[Tensor, Tensor | None]:
        return self._head.table()

    def _generation_model(self) -> Any:
        """The functional model that `generate` runs step by step."""
        return self

    def generate(self, inputs: Any, strategy: Any = None, **options: Any) -> Any:
        """Generates a continuation of each prompt, or a target sequence for each source.

        See `keras_tx.generation.generate` for the arguments, the results and the errors.
        """
        return generation.generate(self, inputs, strategy, **options)

    def stream(self, inputs: Any, strategy: Any = None, **options: Any) -> Iterator[Any]:
        """Yields the generated tokens or pieces of text, each as soon as it is known.

        See `keras_tx.generation.stream` for the arguments, the results and the errors.
        """
        return generation.stream(self, inputs, strategy, **options)

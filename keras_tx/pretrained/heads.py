"""Heads of checkpoints: the layers between the vectors of a base model and its logits, as in Hugging Face's models.

B batch, T tokens, D hidden, C classes, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import keras

from keras_tx.layers.dropout import Dropout
from keras_tx.layers.projection import Projection, VocabularyProjection
from keras_tx.layers.residual import make_norm
from keras_tx.models.base import HasLayers
from keras_tx.pretrained import table
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Shape, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class OutputBias(keras.layers.Layer):
    """Logits (..., V) plus a learned bias (V,)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, inputs_shape: Shape) -> None:
        self.bias = self.add_weight(shape=(inputs_shape[-1],), initializer="zeros", name="bias")

    def call(self, inputs: Tensor) -> Tensor:
        return inputs + keras.ops.cast(self.bias, inputs.dtype)

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape


class TokenHead(HasLayers):
    """Masked-language head, (B, T, D) -> (B, T, V): dense, activation, norm, products with a token table, bias.

    Args:
        embedding: the `TokenEmbedding`. The dense layer has the width of its table.
        activation: the activation of the dense layer.
        epsilon: the epsilon of the norm.
        tied: whether the logits are products with the embedding's table instead of a table of the head.
        use_bias: whether the dense layer has a bias.
        normalization: the kind of norm, as in `EncoderLayer`.
        output_bias: whether a bias is added to the logits.
        dtype: dtype policy.
    """

    def __init__(
        self,
        embedding: Any,
        activation: Any,
        epsilon: float,
        *,
        tied: bool,
        dtype: DType,
        use_bias: bool = True,
        normalization: str = "layer_norm",
        output_bias: bool = True,
    ) -> None:
        width = embedding.embedding_dim or embedding.hidden_dim
        self.embedding = embedding
        self.dense = Projection(width, activation=activation, use_bias=use_bias, dtype=dtype, name="head_dense")
        self.norm = make_norm(normalization, epsilon, dtype=dtype, name="head_norm")
        size = embedding.vocabulary_size
        self.output = None if tied else VocabularyProjection(size, use_bias=False, dtype=dtype, name="head_output")
        self.bias = OutputBias(dtype=dtype, name="head_bias") if output_bias else None

    def __call__(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(self.dense(hidden))
        logits = self.embedding(hidden, reverse=True) if self.output is None else self.output(hidden)
        return logits if self.bias is None else self.bias(logits)

    def rows(self, dense: str, norm: str, output: str, bias: str = "") -> Iterator[Row]:
        """Rows with these names; none for `output` if the logits are tied to the embedding."""
        yield from table.linear(dense, self.dense)
        yield from table.norm(norm, self.norm)
        if self.output is not None:
            yield from table.linear(output, self.output)
        if self.bias is not None:
            yield table.Row(bias, self.bias.bias)
            if self.output is not None and bias != f"{output}.bias":
                # The bias that transformers uses if the table is not tied.
                yield table.Row(f"{output}.bias", self.bias.bias)


class ClassHead(HasLayers):
    """Classification head, (B, ..., D) -> (B, ..., C): dropout, an optional dense layer, dropout, logits.

    Args:
        num_classes: C.
        hidden_dim: the width of the dense layer; None for no dense layer.
        activation: the activation of the dense layer.
        dropout: the dropout rate before the logits.
        first_dropout: the dropout rate before the dense layer; `dropout` if None.
        dtype: dtype policy.
        name: the prefix of the names of the layers.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        hidden_dim: int | None = None,
        activation: Any = None,
        dropout: float = 0.0,
        first_dropout: float | None = None,
        dtype: DType = None,
        name: str = "head",
    ) -> None:
        self.dense: Any = None
        self.first_dropout: Any = None
        if hidden_dim is not None:
            first = dropout if first_dropout is None else first_dropout
            self.first_dropout = Dropout(first, dtype=dtype, name=f"{name}_first_dropout")
            self.dense = Projection(hidden_dim, activation=activation, dtype=dtype, name=f"{name}_dense")
        self.dropout = Dropout(dropout, dtype=dtype, name=f"{name}_dropout")
        self.output = Projection(num_classes, dtype=dtype, name=f"{name}_output")

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.dense is not None:
            hidden = self.dense(self.first_dropout(hidden))
        return self.output(self.dropout(hidden))

    def rows(self, output: str, dense: str = "") -> Iterator[Row]:
        """Rows with these names."""
        if self.dense is not None:
            yield from table.linear(dense, self.dense)
        yield from table.linear(output, self.output)


def answer_spans(logits: Tensor) -> dict[str, Tensor]:
    """Splits logits (B, T, 2) into the logits of where the answer starts and where it ends, each (B, T)."""
    return {"start_logits": logits[:, :, 0], "end_logits": logits[:, :, 1]}

"""Masked language model: ids (B, T) -> logits (B, T, V) of the tokens that were masked.

B batch, T tokens, V vocabulary. Devlin et al. 2018, arXiv:1810.04805, sections 3.1 and A.1.
"""

import keras
from keras import activations

from keras_tx import checks
from keras_tx.layers import Encoder, TokenEmbedding
from keras_tx.layers.projection import Projection
from keras_tx.layers.residual import make_norm
from keras_tx.models.chunked import VocabularyModel
from keras_tx.models.language_model import language_embedding
from keras_tx.models.token_model import options


@keras.saving.register_keras_serializable(package="keras_tx")
class MaskedLM(VocabularyModel):
    """A functional `keras.Model` of token embedding, encoder, and BERT's head: dense, activation, norm, tied logits.

    Its input is `token_ids` (B, T), padded with the padding id; with segments, `token_ids` and `segment_ids`.
    `keras_tx.data.mask_tokens` makes such inputs and their labels, for `keras_tx.training.PaddedCrossentropy`.

    Args:
        vocabulary_size: V; ids are in [0, V).
        num_layers, hidden_dim, num_heads: of the encoder.
        intermediate_dim: of its feed-forward; 4 * `hidden_dim` if None.
        dropout: rate in [0, 1), after the embedding and in the encoder.
        activation: of the feed-forward and of the head.
        embedding_options: dict of further arguments of `TokenEmbedding`: `position_encoding` (sinusoidal if left out),
            `num_segments`, `normalization` ("layer_norm" if left out), ...
        encoder_options: dict of further arguments of `Encoder`.
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a size, rate or name that cannot work; the message has the value.
    """

    def __init__(
        self,
        vocabulary_size,
        *,
        num_layers=2,
        hidden_dim=128,
        num_heads=4,
        intermediate_dim=None,
        dropout=0.1,
        activation="gelu",
        embedding_options=None,
        encoder_options=None,
        dtype=None,
        **kwargs,
    ):
        checks.positive_int("hidden_dim", hidden_dim)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        embedding_options = {
            "normalization": "layer_norm",
            **language_embedding(embedding_options, hidden_dim, dropout),
        }
        encoder_options = options("encoder_options", encoder_options, Encoder, dropout=dropout, activation=activation)

        # Layers
        embedding = TokenEmbedding(vocabulary_size, hidden_dim, **embedding_options, dtype=dtype, name="embedding")
        encoder = Encoder(num_layers, num_heads, intermediate_dim, **encoder_options, dtype=dtype, name="encoder")
        head_dense = Projection(hidden_dim, activation=activation, dtype=dtype, name="head_dense")
        head_norm = make_norm("layer_norm", encoder.layers[0].layer_norm_epsilon, dtype=dtype, name="head_norm")
        head_bias = LogitBias(dtype=dtype, name="head_bias")

        # Functional model
        inputs = [keras.Input((None,), dtype="int32", name="token_ids")]
        if embedding.num_segments:
            inputs.append(keras.Input((None,), dtype="int32", name="segment_ids"))
        hidden = head_norm(head_dense(encoder(embedding(*inputs))))
        super().__init__(inputs=inputs, outputs=head_bias(embedding(hidden, reverse=True)), **kwargs)

        self._logits_from(hidden, lambda: (embedding.tokens.embeddings, head_bias.bias))

        # Config
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.dropout = dropout
        self.activation = activations.get(activation)
        self.embedding_options = embedding_options
        self.encoder_options = encoder_options
        self.embedding, self.encoder = embedding, encoder
        self.id_inputs = {"token_ids": embedding}
        self.configured = {"embedding_options": embedding, "encoder_options": encoder}

    def attention_scores(self, inputs):
        """The attention scores of all layers, (B, L, N, T, T) in float32, at inference; `inputs` as for the model."""
        embedded = self.embedding(*self._listed(inputs), training=False)
        return self.encoder(embedded, return_attention_scores=True, training=False)[1]


@keras.saving.register_keras_serializable(package="keras_tx")
class LogitBias(keras.layers.Layer):
    """Adds a learned vector (V,) to logits (..., V)."""

    def build(self, inputs_shape):
        self.supports_masking = True
        self.bias = self.add_weight(shape=(inputs_shape[-1],), initializer="zeros", name="bias")

    def call(self, inputs):
        return inputs + self.bias

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

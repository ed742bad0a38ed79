"""Masked language model: ids (B, T) -> logits (B, T, V) of the original tokens.

B batch, T tokens, V vocabulary. Devlin et al. 2018, arXiv:1810.04805, sections 3.1 and A.1.
"""

from typing import Any

import keras

from keras_tx import checks
from keras_tx.layers import Encoder, TokenEmbedding, activations
from keras_tx.layers.configs import set_untracked
from keras_tx.layers.projection import Projection
from keras_tx.layers.residual import make_norm
from keras_tx.models.base import clonable
from keras_tx.models.chunked import VocabularyModel
from keras_tx.models.language_model import LogitBias, language_embedding
from keras_tx.models.token_model import options
from keras_tx.types import DType, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class MaskedLM(VocabularyModel):
    """A masked language model, as in BERT's pretraining, as a functional `keras.Model`.

    It consists of a token embedding, an encoder and BERT's head: a dense layer with an activation, a norm, and an
    output layer with a bias, whose kernel are the token embeddings. The input is `token_ids` (B, T), padded with the
    padding id; with segments, `token_ids` and `segment_ids`. The output is logits (B, T, V).
    `keras_tx.data.mask_tokens` makes such inputs and their labels, and `keras_tx.training.PaddedCrossentropy` with the
    padding id of the tokenizer is the loss for them.

    Args:
        vocabulary_size: V; ids are in [0, V).
        num_layers: L, the number of encoder layers.
        hidden_dim: D, the size of the hidden vectors, a multiple of `num_heads`.
        num_heads: N, the number of attention heads.
        intermediate_dim: F, the hidden size inside each feed-forward network. None: 4 * `hidden_dim`.
        dropout: rate in [0, 1) of dropout after the embedding and in the encoder.
        activation: the activation of the feed-forward networks and of the head.
        embedding_options: dict of further arguments of `TokenEmbedding`: `position_encoding` (by default "sinusoidal"),
            `num_segments`, `normalization` (by default "layer_norm"), ...
        encoder_options: dict of further arguments of `Encoder`. `skip_padding` is None by default: in training, where
            losses and metrics leave padding out, it is skipped on TensorFlow with only CPUs and without XLA.
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a size, rate or name that is not valid, and for an unknown argument.

    Reference:
        Devlin et al. 2018, https://arxiv.org/abs/1810.04805, sections 3.1 and A.1.

    Examples:
        >>> model = keras_tx.models.MaskedLM(vocabulary_size=100, num_layers=1, hidden_dim=16, num_heads=2)
        >>> ids = np.array([[5, 17, 3, 0], [8, 3, 99, 31]])  # 0 is padding
        >>> tuple(model(ids).shape)
        (2, 4, 100)
        >>> model.compile("adam", keras_tx.training.PaddedCrossentropy())
    """

    @clonable
    def __init__(
        self,
        vocabulary_size: int,
        *,
        num_layers: int = 2,
        hidden_dim: int = 128,
        num_heads: int = 4,
        intermediate_dim: int | None = None,
        dropout: float = 0.1,
        activation: Any = "gelu",
        embedding_options: dict[str, Any] | None = None,
        encoder_options: dict[str, Any] | None = None,
        dtype: DType = None,
        **kwargs: Any,
    ) -> None:
        self._check_names(kwargs)
        hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        dropout = checks.rate("dropout", dropout)
        embedding_options = {
            "normalization": "layer_norm",
            **language_embedding(embedding_options, hidden_dim, dropout),
        }
        encoder_options = options(
            "encoder_options", encoder_options, Encoder, dropout=dropout, activation=activation, skip_padding=None
        )

        # Layers
        embedding = TokenEmbedding(vocabulary_size, hidden_dim, **embedding_options, dtype=dtype, name="embedding")
        encoder = Encoder(num_layers, intermediate_dim, num_heads, **encoder_options, dtype=dtype, name="encoder")
        # The width of the table, of which the logits are products.
        width = embedding.embedding_dim or hidden_dim
        head_dense = Projection(width, activation=activations.get(activation), dtype=dtype, name="head_dense")
        head_norm = make_norm("layer_norm", encoder.layer_norm_epsilon, dtype=dtype, name="head_norm")
        head_bias = LogitBias(dtype=dtype, name="head_bias")

        # Functional model
        inputs = [keras.Input((None,), dtype="int32", name="token_ids")]
        if embedding.num_segments:
            inputs.append(keras.Input((None,), dtype="int32", name="segment_ids"))
        hidden = head_norm(head_dense(encoder(embedding(*inputs))))
        super().__init__(inputs=inputs, outputs=head_bias(embedding(hidden, reverse=True)), **kwargs)

        self._logits_from(hidden)

        # Config
        self.vocabulary_size = embedding.vocabulary_size
        self.num_layers = encoder.num_layers
        self.hidden_dim = hidden_dim
        self.num_heads = encoder.num_heads
        self.intermediate_dim = encoder.intermediate_dim
        self.dropout = dropout
        self.activation = activations.get(activation)
        set_untracked(self, "embedding_options", embedding_options)
        set_untracked(self, "encoder_options", encoder_options)
        self.embedding, self.encoder = embedding, encoder
        self.id_inputs = {"token_ids": embedding}
        self.configured = {"embedding_options": embedding, "encoder_options": encoder}

    def _padding_is_unread(self, training: bool | None) -> bool:
        return bool(training)  # the loss and metrics leave padding out; at inference its logits are returned

    def _table(self) -> tuple[Tensor, Tensor | None]:
        return self.embedding.table(), self.get_layer("head_bias").bias

    def attention_scores(self, inputs: Any) -> Tensor:
        """Returns the attention scores of all layers at inference, (B, L, N, T, T) in float32.

        `inputs` are those of the model.
        """
        embedded = self.embedding(*self._listed(inputs), training=False)
        return self.encoder(embedded, return_attention_scores=True, training=False)[1]

"""Text classifier: ids (B, T) -> logits (B, C).

B batch, T tokens, C classes. An encoder as in Devlin et al. 2018, arXiv:1810.04805, pooled over its tokens.
"""

import keras
from keras import activations

from keras_tx import checks
from keras_tx.layers import Encoder, TokenEmbedding
from keras_tx.layers.configs import in_float32
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.projection import Projection
from keras_tx.models.pooling import TokenPooling
from keras_tx.models.token_model import TokenModel, options


@keras.saving.register_keras_serializable(package="keras_tx")
class TextClassifier(TokenModel):
    """A functional `keras.Model` of token embedding, encoder, pooling and a dense head.

    Its input is `token_ids` (B, T), padded with the padding id; with segments, `token_ids` and `segment_ids`. A dict by
    these names, with or without others, does as well: `BertTokenizer` makes one.

    Args:
        vocabulary_size: V; ids are in [0, V).
        num_classes: C, at least 2.
        num_layers, hidden_dim, num_heads: of the encoder.
        intermediate_dim: of its feed-forward; 4 * `hidden_dim` if None.
        pooling: "first", "mean" or "max", over the real tokens.
        dropout: rate in [0, 1), after the embedding, in the encoder and before the head.
        activation: of the output. None returns logits, "softmax" probabilities.
        embedding_options: dict of further arguments of `TokenEmbedding`: `position_encoding` (sinusoidal if left out),
            `max_length`, `padding_id`, `num_segments`, `scale`, `normalization`, ...
        encoder_options: dict of further arguments of `Encoder`: `normalize_first`, `activation`, `gated`,
            `normalization`, `attention_options`, ...
        dtype: dtype policy of the layers; the head computes in float32.

    Raises:
        ValueError: for a size, rate or name that cannot work; the message has the value.

    Example:

        model = keras_tx.models.TextClassifier(vocabulary_size=30522, num_classes=2)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    """

    def __init__(
        self,
        vocabulary_size,
        num_classes,
        *,
        num_layers=2,
        hidden_dim=128,
        num_heads=4,
        intermediate_dim=None,
        pooling="mean",
        dropout=0.1,
        activation=None,
        embedding_options=None,
        encoder_options=None,
        dtype=None,
        **kwargs,
    ):
        checks.positive_int("hidden_dim", hidden_dim)
        if checks.positive_int("num_classes", num_classes) < 2:
            raise ValueError(f"`num_classes` must be at least 2; yes or no are 2. Received: num_classes={num_classes}")
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        embedding_options = options(
            "embedding_options", embedding_options, TokenEmbedding, position_encoding="sinusoidal"
        )
        encoder_options = options("encoder_options", encoder_options, Encoder)

        # Layers
        embedding = TokenEmbedding(
            vocabulary_size, hidden_dim, **{"dropout": dropout, **embedding_options}, dtype=dtype, name="embedding"
        )
        encoder = Encoder(
            num_layers,
            num_heads,
            intermediate_dim,
            **{"dropout": dropout, **encoder_options},
            dtype=dtype,
            name="encoder",
        )
        pooler = TokenPooling(pooling, dtype=dtype, name="pooling")
        head_dropout = Dropout(dropout, dtype=dtype, name="dropout")
        head = Projection(num_classes, activation=activation, dtype=in_float32(dtype), name="head")

        # Functional model
        inputs = [keras.Input((None,), dtype="int32", name="token_ids")]
        if embedding.num_segments:
            inputs.append(keras.Input((None,), dtype="int32", name="segment_ids"))
        embedded = embedding(*inputs)
        outputs = head(head_dropout(pooler(encoder(embedded))))
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)

        # Config
        self.vocabulary_size = vocabulary_size
        self.num_classes = num_classes
        self.num_layers = num_layers
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.pooling = pooling
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

"""Text classifier: ids (B, T) -> logits (B, C).

B batch, T tokens, C classes. An encoder as in Devlin et al. 2018, arXiv:1810.04805, pooled over its tokens.
"""

from typing import Any

import keras

from keras_tx import checks
from keras_tx.layers import Encoder, SinusoidalPositionalEncoding, TokenEmbedding, activations
from keras_tx.layers.configs import in_float32, set_untracked
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.projection import Projection
from keras_tx.models.base import clonable
from keras_tx.models.pooling import TokenPooling
from keras_tx.models.token_model import TokenModel, options
from keras_tx.types import DType, Tensor

_SIZES = {"scale", "embeddings_initializer"}  # the options that say how large token embeddings are at first


def _is_sinusoidal(position_encoding: Any) -> bool:
    """Whether this name, layer or config of a layer is that of sinusoidal positions."""
    if isinstance(position_encoding, dict):
        position_encoding = keras.saving.deserialize_keras_object(position_encoding)
    return position_encoding == "sinusoidal" or isinstance(position_encoding, SinusoidalPositionalEncoding)


@keras.saving.register_keras_serializable(package="keras_tx")
class TextClassifier(TokenModel):
    """A classifier of texts: token embedding, encoder, pooling and a dense head, as a functional `keras.Model`.

    Its input is `token_ids` (B, T), padded with the padding id; with segments, `token_ids` and `segment_ids`. The input
    may be a dict with these keys, as `BertTokenizer` returns it; other keys are ignored. The output is logits or
    probabilities (B, C).

    Args:
        vocabulary_size: V; ids are in [0, V).
        num_classes: C, at least 2.
        num_layers: L, the number of encoder layers.
        hidden_dim: D, the size of the hidden vectors, a multiple of `num_heads`.
        num_heads: N, the number of attention heads.
        intermediate_dim: F, the hidden size inside each feed-forward network. None: 4 * `hidden_dim`.
        pooling: how the vectors of the real tokens are pooled: "first", "mean" or "max".
        dropout: rate in [0, 1) of dropout after the embedding, in the encoder and before the head.
        activation: the activation of the output: None for logits, "softmax" for probabilities that sum to 1, "sigmoid"
            for a probability of each class by itself, where a text may have several labels.
        embedding_options: dict of further arguments of `TokenEmbedding`: `position_encoding` (by default "sinusoidal"),
            `max_length`, `padding_id`, `num_segments`, `scale`, `embeddings_initializer` (with sinusoidal positions and
            without `scale`, by default normal with a standard deviation of 1), `normalization`, ...
        encoder_options: dict of further arguments of `Encoder`: `normalize_first`, `activation`, `gated`,
            `normalization`, `attention_options`, ... `skip_padding` is None by default: padding is skipped on
            TensorFlow with only CPUs and without XLA.
        dtype: dtype policy of the layers; the head computes in float32.

    Raises:
        ValueError: for a size, rate or name that is not valid, and for an unknown argument.

    Reference:
        Devlin et al. 2018, https://arxiv.org/abs/1810.04805, section 4.1.

    Examples:
        >>> model = keras_tx.models.TextClassifier(100, num_classes=3, num_layers=1, hidden_dim=16, num_heads=2)
        >>> ids = np.array([[5, 17, 4, 0, 0], [8, 2, 99, 31, 7]])  # 0 is padding
        >>> tuple(model(ids).shape)
        (2, 3)
        >>> np.allclose(model(ids[:1, :3]), model(ids)[:1], atol=1e-5)  # padding changes nothing
        True
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> model.compile("adam", loss, metrics=["accuracy"])
    """

    @clonable
    def __init__(
        self,
        vocabulary_size: int,
        num_classes: int,
        *,
        num_layers: int = 2,
        hidden_dim: int = 128,
        num_heads: int = 4,
        intermediate_dim: int | None = None,
        pooling: str = "mean",
        dropout: float = 0.1,
        activation: Any = None,
        embedding_options: dict[str, Any] | None = None,
        encoder_options: dict[str, Any] | None = None,
        dtype: DType = None,
        **kwargs: Any,
    ) -> None:
        self._check_names(kwargs)
        hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        num_classes = checks.positive_int("num_classes", num_classes)
        if num_classes < 2:
            raise ValueError(
                "`num_classes` must be at least 2: a question of yes or no has 2 classes. To predict a number, build a "
                f"model as in the guide docs/guides/tasks.md. Received: num_classes={num_classes}"
            )
        dropout = checks.rate("dropout", dropout)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        embedding_options = options(
            "embedding_options", embedding_options, TokenEmbedding, position_encoding="sinusoidal"
        )
        if _is_sinusoidal(embedding_options["position_encoding"]) and not _SIZES & {*embedding_options}:
            # Keras' initial values, at most 0.05, would be lost among such positions: the model would see no tokens.
            embedding_options["embeddings_initializer"] = keras.initializers.RandomNormal(stddev=1.0)
        encoder_options = options("encoder_options", encoder_options, Encoder, skip_padding=None)

        # Layers
        embedding = TokenEmbedding(
            vocabulary_size, hidden_dim, **{"dropout": dropout, **embedding_options}, dtype=dtype, name="embedding"
        )
        encoder = Encoder(
            num_layers,
            intermediate_dim,
            num_heads,
            **{"dropout": dropout, **encoder_options},
            dtype=dtype,
            name="encoder",
        )
        pooler = TokenPooling(pooling, dtype=dtype, name="pooling")
        head_dropout = Dropout(dropout, dtype=dtype, name="dropout")
        head = Projection(num_classes, activation=activations.get(activation), dtype=in_float32(dtype), name="head")

        # Functional model
        inputs = [keras.Input((None,), dtype="int32", name="token_ids")]
        if embedding.num_segments:
            inputs.append(keras.Input((None,), dtype="int32", name="segment_ids"))
        embedded = embedding(*inputs)
        outputs = head(head_dropout(pooler(encoder(embedded))))
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)

        # Config
        self.vocabulary_size = embedding.vocabulary_size
        self.num_classes = num_classes
        self.num_layers = encoder.num_layers
        self.hidden_dim = hidden_dim
        self.num_heads = encoder.num_heads
        self.intermediate_dim = encoder.intermediate_dim
        self.pooling = pooling
        self.dropout = dropout
        self.activation = activations.get(activation)
        set_untracked(self, "embedding_options", embedding_options)
        set_untracked(self, "encoder_options", encoder_options)
        self.embedding, self.encoder = embedding, encoder
        self.id_inputs = {"token_ids": embedding}
        self.configured = {"embedding_options": embedding, "encoder_options": encoder}

    def _returns_logits(self) -> bool:
        return self.activation is keras.activations.linear

    def attention_scores(self, inputs: Any) -> Tensor:
        """Returns the attention scores of all layers at inference, (B, L, N, T, T) in float32.

        `inputs` are those of the model.
        """
        embedded = self.embedding(*self._listed(inputs), training=False)
        return self.encoder(embedded, return_attention_scores=True, training=False)[1]

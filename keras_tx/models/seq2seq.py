"""Sequence-to-sequence model: source ids (B, S), target ids (B, T) -> logits (B, T, V) of the next target token.

B batch, S source tokens, T target tokens, V vocabulary. Vaswani et al. 2017, arXiv:1706.03762.
"""

from typing import Any

import keras

from keras_tx import checks
from keras_tx.layers import Decoder, Encoder, TokenEmbedding
from keras_tx.layers.configs import checked_copy, set_untracked
from keras_tx.models.base import clonable
from keras_tx.models.language_model import Head, LanguageModel, language_embedding
from keras_tx.models.token_model import options
from keras_tx.types import DType, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class Seq2Seq(LanguageModel):
    """An encoder-decoder model, for example for translation or summarization, as a functional `keras.Model`.

    It consists of embeddings, an encoder, a decoder and an output layer. Its inputs are `source_ids` (B, S) and
    `target_ids` (B, T), padded with the padding id. The target begins with a start token. The output at each target
    token is the logits of the next one, (B, T, V).

    Args:
        source_vocabulary_size: size of the source's vocabulary; ids are in [0, size).
        target_vocabulary_size: V, size of the target's vocabulary. None: source and target have the same vocabulary and
            share one embedding.
        num_layers: the number of encoder layers.
        num_decoder_layers: the number of decoder layers. None: `num_layers`.
        hidden_dim: D, the size of the hidden vectors, a multiple of `num_heads`.
        num_heads: N, the number of attention heads.
        intermediate_dim: F, the hidden size inside each feed-forward network. None: 4 * `hidden_dim`.
        dropout: rate in [0, 1) of dropout after the embeddings, in the encoder and in the decoder.
        tie_embeddings: whether the token embeddings of the target are also the kernel of the output layer. False: the
            output layer has its own kernel.
        use_output_bias: whether the output layer has a bias, one number for each token of the target's vocabulary.
        embedding_options: dict of further arguments of both `TokenEmbedding`s: `position_encoding` (by default
            "sinusoidal"), `scale` (by default True), `max_length`, `padding_id`, `normalization`, ...
        encoder_options: dict of further arguments of `Encoder`: `normalize_first`, `activation`, `attention_options`,
            `position_bias`, ... `skip_padding` is None by default: padding of the source is skipped on TensorFlow with
            only CPUs and without XLA.
        decoder_options: dict of further arguments of `Decoder`, likewise.
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a size, rate or name that is not valid, and for an unknown argument.

    Reference:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.

    Examples:
        >>> model = keras_tx.models.Seq2Seq(100, num_layers=1, hidden_dim=16, num_heads=2)
        >>> source_ids, target_ids = np.array([[5, 17, 4, 9]]), np.array([[1, 8]])
        >>> tuple(model([source_ids, target_ids]).shape)
        (1, 2, 100)
        >>> model.compile("adam", keras_tx.training.PaddedCrossentropy(label_smoothing=0.1))
        >>> generated = model.generate(source_ids, max_new_tokens=3, start_token=1, jit_compile=False)
        >>> generated.shape
        (1, 3)
    """

    @clonable
    def __init__(
        self,
        source_vocabulary_size: int,
        target_vocabulary_size: int | None = None,
        *,
        num_layers: int = 2,
        num_decoder_layers: int | None = None,
        hidden_dim: int = 128,
        num_heads: int = 4,
        intermediate_dim: int | None = None,
        dropout: float = 0.1,
        tie_embeddings: bool = True,
        use_output_bias: bool = False,
        embedding_options: dict[str, Any] | None = None,
        encoder_options: dict[str, Any] | None = None,
        decoder_options: dict[str, Any] | None = None,
        dtype: DType = None,
        **kwargs: Any,
    ) -> None:
        self._check_names(kwargs)
        source_vocabulary_size = checks.positive_int("source_vocabulary_size", source_vocabulary_size)
        target_vocabulary_size = checks.positive_int("target_vocabulary_size", target_vocabulary_size, none=True)
        num_layers = checks.positive_int("num_layers", num_layers)
        num_decoder_layers = checks.positive_int("num_decoder_layers", num_decoder_layers, none=True) or num_layers
        hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        dropout = checks.rate("dropout", dropout)
        use_output_bias = checks.flag("use_output_bias", use_output_bias)
        tie_embeddings = checks.flag("tie_embeddings", tie_embeddings)
        embedding_options = language_embedding(embedding_options, hidden_dim, dropout)
        encoder_options = options("encoder_options", encoder_options, Encoder, dropout=dropout, skip_padding=None)
        decoder_options = options("decoder_options", decoder_options, Decoder, dropout=dropout)

        # Layers
        shared = target_vocabulary_size is None
        embedding = TokenEmbedding(
            source_vocabulary_size,
            hidden_dim,
            **embedding_options,
            dtype=dtype,
            name="embedding" if shared else "source_embedding",
        )
        target_embedding = embedding
        if not shared:
            of_target = dict(embedding_options)
            if isinstance(of_target.get("position_encoding"), keras.layers.Layer):  # else both would have one table
                of_target["position_encoding"] = checked_copy("position_encoding", of_target["position_encoding"])
            target_embedding = TokenEmbedding(
                target_vocabulary_size, hidden_dim, **of_target, dtype=dtype, name="target_embedding"
            )
        sizes = (intermediate_dim, num_heads)
        encoder = Encoder(num_layers, *sizes, **encoder_options, dtype=dtype, name="encoder")
        decoder = Decoder(
            num_decoder_layers, *sizes, cross_attention=True, **decoder_options, dtype=dtype, name="decoder"
        )
        head = Head(target_embedding, tie_embeddings, use_output_bias, dtype)

        # Functional model
        source_ids = keras.Input((None,), dtype="int32", name="source_ids")
        target_ids = keras.Input((None,), dtype="int32", name="target_ids")
        memory = encoder(embedding(source_ids))
        hidden = decoder(target_embedding(target_ids), memory)
        super().__init__(inputs=[source_ids, target_ids], outputs=head(hidden), **kwargs)

        self._logits_from(hidden)

        # Config
        self.source_vocabulary_size = source_vocabulary_size
        self.target_vocabulary_size = target_vocabulary_size
        self.num_layers = num_layers
        self.num_decoder_layers = num_decoder_layers
        self.hidden_dim = hidden_dim
        self.num_heads = encoder.num_heads
        self.intermediate_dim = encoder.intermediate_dim
        self.dropout = dropout
        self.tie_embeddings = tie_embeddings
        self.use_output_bias = use_output_bias
        set_untracked(self, "embedding_options", embedding_options)
        set_untracked(self, "encoder_options", encoder_options)
        set_untracked(self, "decoder_options", decoder_options)
        self.embedding, self.target_embedding = embedding, target_embedding
        self.encoder, self.decoder = encoder, decoder
        self.head, self.head_bias, self._head = head.dense, head.bias, head
        self.id_inputs = {"source_ids": embedding, "target_ids": target_embedding}
        self.configured = {
            "embedding_options": embedding,
            "encoder_options": encoder,
            "decoder_options": decoder,
        }

    def attention_scores(self, inputs: Any) -> dict[str, Tensor]:
        """Returns the attention scores of all layers at inference, in float32; `inputs` as for the model.

        Returns:
            A dict: "encoder" (B, L, N, S, S), "decoder" (B, L, N, T, T) and "cross" (B, L, N, T, S).
        """
        source_ids, target_ids = self._listed(inputs)
        options = {"return_attention_scores": True, "training": False}
        memory, encoder = self.encoder(self.embedding(source_ids, training=False), **options)
        embedded = self.target_embedding(target_ids, training=False)
        _, decoder, cross = self.decoder(embedded, memory, **options)
        return {"encoder": encoder, "decoder": decoder, "cross": cross}

"""Sequence to sequence: source ids (B, S), target ids (B, T) -> logits (B, T, V) of the next target token.

B batch, S source tokens, T target tokens, V vocabulary. Vaswani et al. 2017, arXiv:1706.03762.
"""

import keras

from keras_tx import checks
from keras_tx.layers import Decoder, Encoder, TokenEmbedding
from keras_tx.models.language_model import LanguageModel, language_embedding, logits_of, make_head, table_of
from keras_tx.models.token_model import options


@keras.saving.register_keras_serializable(package="keras_tx")
class Seq2Seq(LanguageModel):
    """A functional `keras.Model` of embeddings, encoder, decoder and logits: a translator, a summarizer.

    Its inputs are `source_ids` (B, S) and `target_ids` (B, T), padded with the padding id; the target begins with a
    start token, and the logits at each token are those of the next one.

    Args:
        source_vocabulary_size: of the source; ids are in [0, V).
        target_vocabulary_size: of the target. None: both have one vocabulary and share one embedding.
        num_layers: of the encoder, and of the decoder unless `num_decoder_layers` are given.
        num_decoder_layers: of the decoder; `num_layers` if None.
        hidden_dim, num_heads: of both.
        intermediate_dim: of both feed-forwards; 4 * `hidden_dim` if None.
        dropout: rate in [0, 1), after the embeddings, in the encoder and in the decoder.
        tie_embeddings: whether the logits are products with the target's token table; else with one of their own.
        embedding_options: dict of further arguments of both `TokenEmbedding`s: `position_encoding` (sinusoidal if left
            out), `scale` (True if left out), `max_length`, `padding_id`, `normalization`, ...
        encoder_options, decoder_options: dicts of further arguments of `Encoder` and `Decoder`: `normalize_first`,
            `activation`, `attention_options`, `position_bias`, ...
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a size, rate or name that cannot work; the message has the value.

    Example:

        model = keras_tx.models.Seq2Seq(tokenizer.vocabulary_size)
        model.compile("adam", keras_tx.training.PaddedCrossentropy(label_smoothing=0.1))
        model.generate(["a dog runs ."], keras_tx.generation.Beam(5), max_new_tokens=40, tokenizer=tokenizer)
    """

    def __init__(
        self,
        source_vocabulary_size,
        target_vocabulary_size=None,
        *,
        num_layers=2,
        num_decoder_layers=None,
        hidden_dim=128,
        num_heads=4,
        intermediate_dim=None,
        dropout=0.1,
        tie_embeddings=True,
        embedding_options=None,
        encoder_options=None,
        decoder_options=None,
        dtype=None,
        **kwargs,
    ):
        checks.positive_int("hidden_dim", hidden_dim)
        checks.positive_int("target_vocabulary_size", target_vocabulary_size, none=True)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
        embedding_options = language_embedding(embedding_options, hidden_dim, dropout)
        encoder_options = options("encoder_options", encoder_options, Encoder, dropout=dropout)
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
            target_embedding = TokenEmbedding(
                target_vocabulary_size, hidden_dim, **embedding_options, dtype=dtype, name="target_embedding"
            )
        sizes = (num_heads, intermediate_dim)
        encoder = Encoder(num_layers, *sizes, **encoder_options, dtype=dtype, name="encoder")
        decoder = Decoder(
            num_decoder_layers, *sizes, cross_attention=True, **decoder_options, dtype=dtype, name="decoder"
        )
        head = make_head(target_embedding.vocabulary_size, tie_embeddings, dtype)

        # Functional model
        source_ids = keras.Input((None,), dtype="int32", name="source_ids")
        target_ids = keras.Input((None,), dtype="int32", name="target_ids")
        memory = encoder(embedding(source_ids))
        hidden = decoder(target_embedding(target_ids), memory)
        outputs = logits_of(hidden, target_embedding, head)
        super().__init__(inputs=[source_ids, target_ids], outputs=outputs, **kwargs)

        self._logits_from(hidden, lambda: table_of(target_embedding, head))

        # Config
        self.source_vocabulary_size = source_vocabulary_size
        self.target_vocabulary_size = target_vocabulary_size
        self.num_layers = num_layers
        self.num_decoder_layers = num_decoder_layers
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.dropout = dropout
        self.tie_embeddings = tie_embeddings
        self.embedding_options = embedding_options
        self.encoder_options = encoder_options
        self.decoder_options = decoder_options
        self.embedding, self.target_embedding = embedding, target_embedding
        self.encoder, self.decoder, self.head = encoder, decoder, head
        self.id_inputs = {"source_ids": embedding, "target_ids": target_embedding}
        self.configured = {
            "embedding_options": embedding,
            "encoder_options": encoder,
            "decoder_options": decoder,
        }

    def attention_scores(self, inputs):
        """The attention scores of all layers at inference, in float32; `inputs` as for the model.

        Returns:
            A dict: "encoder" (B, L, N, S, S), "decoder" (B, L, N, T, T) and "cross" (B, L, N, T, S).
        """
        source_ids, target_ids = self._listed(inputs)
        options = {"return_attention_scores": True, "training": False}
        memory, encoder = self.encoder(self.embedding(source_ids, training=False), **options)
        embedded = self.target_embedding(target_ids, training=False)
        _, decoder, cross = self.decoder(embedded, memory, **options)
        return {"encoder": encoder, "decoder": decoder, "cross": cross}

"""Causal language model: ids (B, T) -> logits (B, T, V) of the next token.

B batch, T tokens, V vocabulary. Liu et al. 2018, arXiv:1801.10198; Radford et al. 2019 (GPT-2).
"""

import keras

from keras_tx import checks
from keras_tx.layers import Decoder, TokenEmbedding
from keras_tx.models.language_model import LanguageModel, language_embedding, logits_of, make_head, table_of
from keras_tx.models.token_model import options


@keras.saving.register_keras_serializable(package="keras_tx")
class CausalLM(LanguageModel):
    """A functional `keras.Model` of token embedding, decoder and logits.

    Its input is `token_ids` (B, T), padded on either side with the padding id. With `packed`, `document_ids` and
    `positions` (B, T) beside them, as `keras_tx.data.pack_sequences` makes them: a token sees its own document alone.

    Args:
        vocabulary_size: V; ids are in [0, V).
        num_layers, hidden_dim, num_heads: of the decoder.
        intermediate_dim: of its feed-forward; 4 * `hidden_dim` if None.
        dropout: rate in [0, 1), after the embedding and in the decoder.
        tie_embeddings: whether the logits are products with the token table; else with a table of their own.
        packed: whether several documents may stand in a row.
        embedding_options: dict of further arguments of `TokenEmbedding`: `position_encoding` (sinusoidal if left out,
            None for rotary or biased attention), `max_length`, `padding_id`, `scale` (True if left out), ...
        decoder_options: dict of further arguments of `Decoder`: `normalize_first` (True if left out), `activation`
            ("gelu" if left out), `attention_options`, `position_bias`, ...
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a size, rate or name that cannot work; the message has the value.

    Example:

        model = keras_tx.models.CausalLM(vocabulary_size=50257)
        model.compile("adam", keras_tx.training.PaddedCrossentropy())
        model.generate([[464, 3290]], max_new_tokens=20)
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
        tie_embeddings=True,
        packed=False,
        embedding_options=None,
        decoder_options=None,
        dtype=None,
        **kwargs,
    ):
        checks.positive_int("hidden_dim", hidden_dim)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        embedding_options = language_embedding(embedding_options, hidden_dim, dropout)
        decoder_options = options(
            "decoder_options", decoder_options, Decoder, dropout=dropout, normalize_first=True, activation="gelu"
        )

        # Layers
        embedding = TokenEmbedding(vocabulary_size, hidden_dim, **embedding_options, dtype=dtype, name="embedding")
        decoder = Decoder(num_layers, num_heads, intermediate_dim, **decoder_options, dtype=dtype, name="decoder")
        head = make_head(vocabulary_size, tie_embeddings, dtype)

        # Functional model
        token_ids = keras.Input((None,), dtype="int32", name="token_ids")
        inputs, of_embedding, of_decoder = [token_ids], {}, {}
        if packed:
            document_ids = keras.Input((None,), dtype="int32", name="document_ids")
            positions = keras.Input((None,), dtype="int32", name="positions")
            inputs += [document_ids, positions]
            of_embedding = {"positions": positions} if embedding.positions is not None else {}
            of_decoder = {"positions": positions, "document_ids": document_ids}
        hidden = decoder(embedding(token_ids, **of_embedding), **of_decoder)
        super().__init__(inputs=inputs, outputs=logits_of(hidden, embedding, head), **kwargs)

        self._logits_from(hidden, lambda: table_of(embedding, head))

        # Config
        self.vocabulary_size = vocabulary_size
        self.num_layers = num_layers
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.intermediate_dim = intermediate_dim
        self.dropout = dropout
        self.tie_embeddings = tie_embeddings
        self.packed = packed
        self.embedding_options = embedding_options
        self.decoder_options = decoder_options
        self.embedding, self.decoder, self.head = embedding, decoder, head
        self.id_inputs = {"token_ids": embedding}
        self.configured = {"embedding_options": embedding, "decoder_options": decoder}

    def _generation_model(self):
        if not self.packed:
            return self
        if "_unpacked" not in vars(self):
            token_ids = keras.Input((None,), dtype="int32", name="token_ids")
            logits = logits_of(self.decoder(self.embedding(token_ids)), self.embedding, self.head)
            object.__setattr__(self, "_unpacked", keras.Model(token_ids, logits))  # not tracked: the same layers
        return self._unpacked

    def attention_scores(self, inputs):
        """The attention scores of all layers, (B, L, N, T, T) in float32, at inference; `inputs` are token ids."""
        embedded = self.embedding(self._listed(inputs)[0], training=False)
        return self.decoder(embedded, return_attention_scores=True, training=False)[1]

"""Causal language model: ids (B, T) -> logits (B, T, V) of the next token.

B batch, T tokens, V vocabulary. Liu et al. 2018, arXiv:1801.10198; Radford et al. 2019 (GPT-2).
"""

from typing import Any

import keras

from keras_tx import checks
from keras_tx.generation.model_checks import checked_functional
from keras_tx.layers import Decoder, TokenEmbedding
from keras_tx.layers.configs import set_untracked
from keras_tx.locks import lock_of
from keras_tx.models.base import clonable
from keras_tx.models.language_model import Head, LanguageModel, language_embedding
from keras_tx.models.token_model import options
from keras_tx.types import DType, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class CausalLM(LanguageModel):
    """A causal language model, such as GPT: token embedding, decoder and logits, as a functional `keras.Model`.

    Its input is `token_ids` (B, T), padded on either side with the padding id; its output is logits (B, T, V) of the
    next token at each position. With `packed` it has two more inputs, `document_ids` and `positions` (B, T), as
    `keras_tx.data.pack_sequences` makes them: a row may contain several documents, and a token attends only to tokens
    of its own document.

    Args:
        vocabulary_size: V; ids are in [0, V).
        num_layers: L, the number of decoder layers.
        hidden_dim: D, the size of the hidden vectors, a multiple of `num_heads`.
        num_heads: N, the number of attention heads.
        intermediate_dim: F, the hidden size inside each feed-forward network. None: 4 * `hidden_dim`.
        dropout: rate in [0, 1) of dropout after the embedding and in the decoder.
        tie_embeddings: whether the token embeddings are also the kernel of the output layer. False: the output layer
            has its own kernel.
        use_output_bias: whether the output layer has a bias, one number for each token of the vocabulary.
        packed: whether a row may contain several documents.
        embedding_options: dict of further arguments of `TokenEmbedding`: `position_encoding` (by default "sinusoidal";
            set it to None if `decoder_options` have rotary attention or a `position_bias`), `max_length`, `padding_id`,
            `scale` (by default True), ...
        decoder_options: dict of further arguments of `Decoder`: `normalize_first` (by default True), `activation` (by
            default "gelu"), `attention_options`, `position_bias`, ...
        dtype: dtype policy of the layers.

    Raises:
        ValueError: for a size, rate or name that is not valid, and for an unknown argument.

    Reference:
        Liu et al. 2018, https://arxiv.org/abs/1801.10198; Radford et al. 2019, "Language Models are Unsupervised
        Multitask Learners".

    Examples:
        >>> model = keras_tx.models.CausalLM(vocabulary_size=100, num_layers=1, hidden_dim=16, num_heads=2)
        >>> tuple(model(np.array([[5, 7, 11]])).shape)
        (1, 3, 100)
        >>> model.compile("adam", keras_tx.training.PaddedCrossentropy())
        >>> generated = model.generate([[5, 7, 11], [5]], max_new_tokens=2, jit_compile=False)
        >>> len(generated[0]), len(generated[1])
        (5, 3)
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
        tie_embeddings: bool = True,
        use_output_bias: bool = False,
        packed: bool = False,
        embedding_options: dict[str, Any] | None = None,
        decoder_options: dict[str, Any] | None = None,
        dtype: DType = None,
        **kwargs: Any,
    ) -> None:
        self._check_names(kwargs)
        hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        intermediate_dim = 4 * hidden_dim if intermediate_dim is None else intermediate_dim
        dropout = checks.rate("dropout", dropout)
        use_output_bias = checks.flag("use_output_bias", use_output_bias)
        tie_embeddings = checks.flag("tie_embeddings", tie_embeddings)
        packed = checks.flag("packed", packed)
        embedding_options = language_embedding(embedding_options, hidden_dim, dropout)
        decoder_options = options(
            "decoder_options", decoder_options, Decoder, dropout=dropout, normalize_first=True, activation="gelu"
        )

        # Layers
        embedding = TokenEmbedding(vocabulary_size, hidden_dim, **embedding_options, dtype=dtype, name="embedding")
        decoder = Decoder(num_layers, intermediate_dim, num_heads, **decoder_options, dtype=dtype, name="decoder")
        head = Head(embedding, tie_embeddings, use_output_bias, dtype)

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
        super().__init__(inputs=inputs, outputs=head(hidden), **kwargs)

        self._logits_from(hidden)

        # Config
        self.vocabulary_size = embedding.vocabulary_size
        self.num_layers = decoder.num_layers
        self.hidden_dim = hidden_dim
        self.num_heads = decoder.num_heads
        self.intermediate_dim = decoder.intermediate_dim
        self.dropout = dropout
        self.tie_embeddings = tie_embeddings
        self.use_output_bias = use_output_bias
        self.packed = packed
        set_untracked(self, "embedding_options", embedding_options)
        set_untracked(self, "decoder_options", decoder_options)
        self.embedding, self.decoder = embedding, decoder
        self.head, self.head_bias, self._head = head.dense, head.bias, head
        self.id_inputs = {"token_ids": embedding}
        self.configured = {"embedding_options": embedding, "decoder_options": decoder}

    def _generation_model(self) -> Any:
        checked_functional(self)
        if not self.packed:
            return self
        if "_unpacked" not in vars(self):
            with lock_of(self):
                if "_unpacked" not in vars(self):
                    object.__setattr__(self, "_unpacked", self._without_documents())  # not tracked by Keras
        return self._unpacked

    def _without_documents(self) -> keras.Model:
        token_ids = keras.Input((None,), dtype="int32", name="token_ids")
        return keras.Model(token_ids, self._head(self.decoder(self.embedding(token_ids))))

    def attention_scores(self, inputs: Any) -> Tensor:
        """Returns the attention scores of all layers at inference, (B, L, N, T, T) in float32.

        `inputs` are those of the model; with `packed` also the token ids alone, which are then one document.
        """
        alone = isinstance(inputs, dict) and [*inputs] == ["token_ids"]
        token_ids, *documents = self._listed(inputs["token_ids"] if alone else inputs)
        of_embedding, of_decoder = {}, {}
        if documents:
            document_ids, positions = documents
            of_embedding = {} if self.embedding.positions is None else {"positions": positions}
            of_decoder = {"document_ids": document_ids, "positions": positions}
        embedded = self.embedding(token_ids, **of_embedding, training=False)
        return self.decoder(embedded, **of_decoder, return_attention_scores=True, training=False)[1]

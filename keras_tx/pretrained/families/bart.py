"""BART. Lewis et al. 2020, arXiv:1910.13461."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import Decoder, Encoder, LearnedPositionalEncoding, TokenEmbedding
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.residual import make_norm
from keras_tx.pretrained import table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.families.seq2seq import AtLast, Seq2SeqFamily, TargetIds
from keras_tx.pretrained.family import Positions, attention_sizes
from keras_tx.pretrained.heads import ClassHead, OutputBias
from keras_tx.pretrained.leading_axes import LeadingAxesRow
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

_DENSE = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
_ENCODER = {
    **{f"self_attn.{name}": f"self_attention.{dense}_dense" for name, dense in _DENSE.items()},
    "self_attn_layer_norm": "self_attention_norm",
    "fc1": "feed_forward.intermediate_dense",
    "fc2": "feed_forward.output_dense",
    "final_layer_norm": "feed_forward_norm",
}
_DECODER = {
    **_ENCODER,
    **{f"encoder_attn.{name}": f"cross_attention.{dense}_dense" for name, dense in _DENSE.items()},
    "encoder_attn_layer_norm": "cross_attention_norm",
}
_EPSILON = 1e-5  # of all norms; not in config.json


class Bart(Seq2SeqFamily):
    """Post-norm layers; encoder and decoder have learned positions, whose first two rows are not used."""

    model_types: tuple[str, ...] = ("bart",)
    prefix = "model."
    tasks = {
        "base": "BartModel",
        "conditional_generation": "BartForConditionalGeneration",
        "sequence_classification": "BartForSequenceClassification",
        "question_answering": "BartForQuestionAnswering",
    }
    needed = ("input_ids",)
    embedding_key = "shared.weight"
    copies: tuple[str, ...] = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    ignored = {r"model\.(encoder|decoder)\.version": "the version of an older format"}
    zeros = ("final_logits_bias",)
    heads = (
        r"final_logits_bias",
        r"(lm_head|qa_outputs)\.weight",
        r"qa_outputs\.bias",
        r"classification_head\.(dense|out_proj)\.(weight|bias)",
    )
    padding_id, start_id, eos_id = 1, 2, 2  # the defaults of config.json
    offset = 2
    initial_scale = ("init_std", 0.02)

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        self.hidden_dim, encoder_heads = attention_sizes(config, "d_model", "encoder_attention_heads")
        _, decoder_heads = attention_sizes(config, "d_model", "decoder_attention_heads")
        self.dropout = config.rate("dropout", default=0.1)
        self._make_embeddings()
        options = {
            "dropout": self.dropout,
            "attention_dropout": config.rate("attention_dropout", default=0.0),
            "activation_dropout": config.rate("activation_dropout", default=0.0),
            "activation": config.activation("activation_function", default="gelu"),
            "layer_norm_epsilon": _EPSILON,
            "dtype": dtype,
        }
        layers, width = config.number("encoder_layers"), config.size("encoder_ffn_dim")
        self.encoder = Encoder(layers, width, encoder_heads, **options, name="encoder")
        layers, width = config.number("decoder_layers"), config.size("decoder_ffn_dim")
        self.decoder = Decoder(layers, width, decoder_heads, cross_attention=True, **options, name="decoder")
        self.slots = Positions(name="slots")
        self.position_encodings = {side: self._position_encoding(side) for side in ("encoder", "decoder")}
        self.norms = {side: self._norm(side) for side in ("encoder", "decoder")}
        self.dropouts = {
            side: Dropout(self.dropout, dtype=dtype, name=f"{side}_dropout") for side in ("encoder", "decoder")
        }
        size = self.target_embedding.vocabulary_size
        start_id = config.token_of("decoder_start_token_id", size, default=self.start_id)
        self.target_ids = TargetIds(start_id, name="target_ids")
        if task == "sequence_classification":
            self.at_last = AtLast(config.token("eos_token_id", default=self.eos_id), name="at_last")
        self.head, self.class_head = self._make_head(), self._make_class_head()
        self.output_bias: Any = None
        if task == "conditional_generation":
            self.output_bias = OutputBias(dtype=dtype, name="final_logits_bias")

    def _make_embeddings(self) -> None:
        self.embedding = self.target_embedding = self._embedding("vocab_size", "embedding")

    def _embedding(self, size: str, name: str) -> TokenEmbedding:
        vocabulary_size = self.config.size(size)
        return TokenEmbedding(
            vocabulary_size,
            self.hidden_dim,
            padding_id=self._padding_id(vocabulary_size, self.padding_id),
            scale=self.config.flag("scale_embedding", default=False),
            dtype=self.dtype,
            name=name,
        )

    def _position_encoding(self, side: str) -> Any:
        length = self.config.size("max_position_embeddings")
        return LearnedPositionalEncoding(
            length,
            offset=self.offset,
            dtype=self.dtype,
            name=f"{side}_positions",
        )

    def _norm(self, side: str) -> Any:
        return make_norm("layer_norm", _EPSILON, dtype=self.dtype, name=f"{side}_norm")

    def _make_class_head(self) -> Any:
        if self.task == "sequence_classification":
            count = self.config.count_labels(default=3)
            rate = self.config.rate("classifier_dropout", default=0.0)
            return ClassHead(count, hidden_dim=self.hidden_dim, activation="tanh", dropout=rate, dtype=self.dtype)
        return ClassHead(2, dtype=self.dtype) if self.task == "question_answering" else None

    def _embed(self, side: str, ids: Tensor, mask: Tensor = None, by_slot: bool = False) -> Tensor:
        embedded = (self.embedding if side == "encoder" else self.target_embedding)(ids, mask=mask)
        embedded = self.position_encodings[side](embedded, positions=self.slots(ids) if by_slot else None)
        norm = self.norms[side]
        return self.dropouts[side](embedded if norm is None else norm(embedded))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.output_bias(super()._logits(hidden))

    def rows(self) -> Iterator[Row]:
        yield from self._embedding_rows()
        for side, names, stack in (("encoder", _ENCODER, self.encoder), ("decoder", _DECODER, self.decoder)):
            start = f"{self.prefix}{side}"
            yield from self._side_rows(side)
            for index, layer in enumerate(stack.layers):
                yield from table.by_path(f"{start}.layers.{index}", names, layer)
        yield from self._head_rows()

    def _embedding_rows(self) -> Iterator[Row]:
        yield table.Row(f"{self.prefix}{self.embedding_key}", embeddings_of(self.embedding.tokens))

    def computed(self) -> dict[str, np.ndarray]:
        if self.tied or self.target_embedding is not self.embedding:
            return {}
        # If the logits have their own table, transformers ties no other tables either.
        table = keras.ops.convert_to_numpy(self.embedding.tokens.embeddings)
        return {f"{self.prefix}{side}.embed_tokens.weight": table for side in ("encoder", "decoder")}

    def _side_rows(self, side: str) -> Iterator[Row]:
        """Rows for the positions and the embedding norm of the encoder or of the decoder."""
        yield table.Row(f"{self.prefix}{side}.embed_positions.weight", self.position_encodings[side].embeddings)
        yield from table.norm(f"{self.prefix}{side}.layernorm_embedding", self.norms[side])

    def _head_rows(self) -> Iterator[Row]:
        yield from super()._head_rows()
        if self.output_bias is not None:
            yield LeadingAxesRow("final_logits_bias", self.output_bias.bias)


FAMILIES = (Bart,)

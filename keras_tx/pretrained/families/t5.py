"""T5, T5 1.1, Flan-T5 and mT5.

Raffel et al. 2020, arXiv:1910.10683; gated: Shazeer 2020, arXiv:2002.05202; mT5: Xue et al. 2021, arXiv:2010.11934.
"""

from collections.abc import Iterator
from typing import Any

import keras
from keras import ops

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import Decoder, Encoder, RelativePositionBias, TokenEmbedding
from keras_tx.layers.dropout import Dropout
from keras_tx.pretrained import table
from keras_tx.pretrained.config import Config, activation
from keras_tx.pretrained.families.seq2seq import AtLast, Seq2SeqFamily, TargetIds
from keras_tx.pretrained.family import split
from keras_tx.pretrained.heads import ClassHead
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Shape, Tensor


def _attention(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}.{name}": f"{ours}.{dense}_dense" for name, dense in _DENSE.items()}


_DENSE = {"q": "query", "k": "key", "v": "value", "o": "output"}
_SELF = {**_attention("layer.0.SelfAttention", "self_attention"), "layer.0.layer_norm": "self_attention_norm"}
_CROSS = {**_attention("layer.1.EncDecAttention", "cross_attention"), "layer.1.layer_norm": "cross_attention_norm"}


@keras.saving.register_keras_serializable(package="keras_tx")
class Scale(keras.layers.Layer):
    """Multiplies inputs of any shape by a constant `factor`."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.factor = factor

    def call(self, inputs: Tensor) -> Tensor:
        return inputs * ops.cast(self.factor, inputs.dtype)

    def compute_output_shape(self, inputs_shape: Shape) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


def tasks_of(name: str) -> dict[str, str | tuple[str, ...]]:
    return {
        "base": f"{name}Model",
        "conditional_generation": f"{name}ForConditionalGeneration",
        "encoder": f"{name}EncoderModel",
        "sequence_classification": f"{name}ForSequenceClassification",
        "token_classification": f"{name}ForTokenClassification",
        "question_answering": f"{name}ForQuestionAnswering",
    }


class T5(Seq2SeqFamily):
    """Pre-norm with RMS norms, no biases, no scaling of attention scores, relative positions shared by all layers.

    In T5 1.0 the logits are tied to the token table, and the decoder's output is scaled by D ** -0.5. Since T5 1.1 they
    are not. transformers 5 writes `tie_word_embeddings: true` for all versions, so the logits are tied if the file has
    no table for them, and `scale_decoder_outputs`, if present, determines whether the output is scaled.

    The tasks "encoder" and "token_classification" use the encoder only. For sequence classification and question
    answering, the input of the decoder is the source, shifted right by one token.
    """

    model_types: tuple[str, ...] = ("t5",)
    tasks = tasks_of("T5")
    encoder_tasks = ("encoder", "token_classification")
    other_prefix = "transformer."
    other_tasks = ("sequence_classification", "token_classification")
    embedding_key = "shared.weight"
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    ignored = {
        r"decoder\..*\.EncDecAttention\.relative_attention_bias\.weight": "of the first release, which never used it"
    }
    heads = (
        r"lm_head\.weight",
        r"classification_head\.(dense|out_proj)\.(weight|bias)",
        r"(classifier|qa_outputs)\.(weight|bias)",
    )
    tied_by_file = True
    initial_scale = ("initializer_factor", 1.0)
    feed_forward = "relu"  # the default of config.json

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        function, gated = self._activation()
        self.is_scaled = self._is_scaled()
        rate = config.rate("dropout_rate", default=0.1)
        num_heads, num_layers = config.size("num_heads"), config.number("num_layers")
        sizes = (config.size("d_ff"), num_heads)
        options = {
            "dropout": rate,
            "activation_dropout": rate,
            "activation": function,
            "gated": gated,
            "use_bias": False,
            "normalize_first": True,
            "normalization": "rms_norm",
            "layer_norm_epsilon": config.positive("layer_norm_epsilon", default=1e-6),
            "attention_options": {"key_dim": config.size("d_kv"), "scale": 1.0},
            "dtype": dtype,
        }
        size = config.size("vocab_size")
        self.embedding = self.target_embedding = TokenEmbedding(
            size,
            config.size("d_model"),
            padding_id=self._padding_id(size, 0),
            dropout=rate,
            dtype=dtype,
            name="embedding",
        )
        self.encoder = Encoder(num_layers, *sizes, position_bias=self._bias(num_heads, True), **options, name="encoder")
        self.encoder_dropout = Dropout(rate, dtype=dtype, name="encoder_dropout")
        self.class_head = self._make_class_head()
        if task in self.encoder_tasks:
            self.inputs, self.needed, self.head = self.inputs[:2], ("input_ids",), None
            return
        self.decoder = Decoder(
            config.number("num_decoder_layers", default=num_layers),
            *sizes,
            cross_attention=True,
            position_bias=self._bias(num_heads, False),
            **options,
            name="decoder",
        )
        self.decoder_dropout = Dropout(rate, dtype=dtype, name="decoder_dropout")
        self.scale = Scale(self.embedding.hidden_dim**-0.5, dtype=dtype, name="scale")
        self.head = self._make_head()
        if self.class_head is not None:
            self.needed = ("input_ids",)
            self.target_ids = TargetIds(config.token_of("decoder_start_token_id", size, default=0), name="target_ids")
            self.at_last = AtLast(config.token("eos_token_id", default=1), name="at_last")

    def _make_class_head(self) -> Any:
        config, rate = self.config, self.config.rate("classifier_dropout", default=0.0)
        if self.task == "sequence_classification":
            width = self.embedding.hidden_dim
            options = {"hidden_dim": width, "activation": "tanh", "dropout": rate}
            return ClassHead(config.num_labels, dtype=self.dtype, **options)
        if self.task == "token_classification":
            return ClassHead(config.num_labels, dropout=rate, dtype=self.dtype)
        return ClassHead(2, dtype=self.dtype) if self.task == "question_answering" else None

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        if self.task not in self.encoder_tasks:
            return super().outputs(inputs, hidden_states)
        ids = inputs["input_ids"]
        mask = self.padding_mask(ids, inputs["attention_mask"])
        hidden = self.encoder(self._embed("encoder", ids, mask), mask=mask, return_hidden_states=hidden_states)
        hidden, *states = hidden if hidden_states else (hidden,)
        hidden = self._encoded(hidden)
        name, made = ("last_hidden_state", hidden) if self.class_head is None else ("logits", self.class_head(hidden))
        return {name: made, **({"hidden_states": split(states[0])} if hidden_states else {})}

    def is_of_other_task(self, name: str) -> bool:
        return super().is_of_other_task(name) or (self.task in self.encoder_tasks and name.startswith("decoder."))

    def initial_stddev(self, theirs: str) -> float:
        # Queries begin smaller, as the products of queries and keys are not scaled.
        config, width = self.config, self.embedding.hidden_dim
        sizes = {"q": width * config.size("d_kv"), "o": config.size("num_heads") * config.size("d_kv")}
        sizes |= {"wo": config.size("d_ff"), "shared": 1, "lm_head": 1, "classifier": 1}
        return float(self.initializer_range * sizes.get(theirs.split(".")[-2], width) ** -0.5)

    def _activation(self) -> tuple[Any, bool]:
        """The activation of the feed-forward, and whether it is gated: "relu", "gated-gelu", ..."""
        name = self.config.take("feed_forward_proj", default=self.feed_forward)
        kind, _, last = str(name).rpartition("-")
        if kind not in ("", "gated"):
            raise ValueError(
                "`feed_forward_proj` in config.json must be an activation, or 'gated-' and an activation. Received: "
                f"feed_forward_proj={name!r:.200}"
            )
        last = "gelu_new" if name == "gated-gelu" else last
        for key, ours in (("dense_act_fn", last), ("is_gated_act", kind == "gated")):
            value = self.config.take(key, default=ours)
            if value != ours:  # transformers would use this one
                raise ValueError(
                    f"`feed_forward_proj` and `{key}` in config.json must agree. Received: "
                    f"feed_forward_proj={name!r:.200}, {key}={value!r:.200}"
                )
        return activation(last, "feed_forward_proj"), kind == "gated"

    def _is_scaled(self) -> bool:
        default = self.config.values.get("tie_word_embeddings") is not False
        return self.config.flag("scale_decoder_outputs", default=default)

    def saved_values(self) -> dict[str, Any]:
        # `tie_word_embeddings` is written by us, and then no longer shows whether the output is scaled.
        values = {**super().saved_values(), "scale_decoder_outputs": self.is_scaled}
        if self.target_ids is not None:  # transformers has no default for it there
            values["decoder_start_token_id"] = self.target_ids.start_id
        return {**values, "is_encoder_decoder": self.task not in self.encoder_tasks}

    def _bias(self, num_heads: int, bidirectional: bool) -> Any:
        return RelativePositionBias(
            num_heads,
            num_buckets=self.config.size("relative_attention_num_buckets", default=32),
            max_distance=self.config.number("relative_attention_max_distance", default=128),
            bidirectional=bidirectional,
            name="position_bias",
        )

    def _embed(self, side: str, ids: Tensor, mask: Tensor = None, by_slot: bool = False) -> Tensor:
        return self.embedding(ids, mask=mask)

    def _encoded(self, hidden: Tensor) -> Tensor:
        return self.encoder_dropout(hidden)

    def _decoded(self, hidden: Tensor) -> Tensor:
        return self.decoder_dropout(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        return super()._logits(self.scale(hidden) if self.is_scaled else hidden)

    def rows(self) -> Iterator[Row]:
        yield table.Row(self.embedding_key, embeddings_of(self.embedding.tokens))
        stacks = {"encoder": self.encoder}
        if self.task not in self.encoder_tasks:
            stacks["decoder"] = self.decoder
        for side, stack in stacks.items():
            bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield table.Row(bias, stack.position_bias.embeddings)
            for index, layer in enumerate(stack.layers):
                names = {**_SELF, **_CROSS} if side == "decoder" else _SELF
                yield from table.by_path(f"{side}.block.{index}", names, layer)
                last = f"{side}.block.{index}.layer.{2 if side == 'decoder' else 1}"
                yield from table.norm(f"{last}.layer_norm", layer.feed_forward_norm)
                yield from self._feed_forward_rows(f"{last}.DenseReluDense", layer.feed_forward)
            yield from table.norm(f"{side}.final_layer_norm", stack.final_norm)
        yield from self._head_rows()

    def _feed_forward_rows(self, theirs: str, layer: Any) -> Iterator[Row]:
        if layer.gated:
            yield from table.linear(f"{theirs}.wi_0", layer.gate_dense)
        yield from table.linear(f"{theirs}.{'wi_1' if layer.gated else 'wi'}", layer.intermediate_dense)
        yield from table.linear(f"{theirs}.wo", layer.output_dense)


class MT5(T5):
    """The multilingual T5 1.1."""

    model_types = ("mt5",)
    tasks = tasks_of("MT5")
    feed_forward = "gated-gelu"

    def _is_scaled(self) -> bool:
        return False


FAMILIES = (T5, MT5)

"""ModernBERT. Warner et al. 2024, arXiv:2412.13663."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import Encoder, TokenEmbedding
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.projection import Projection
from keras_tx.layers.residual import make_norm
from keras_tx.models.pooling import TokenPooling
from keras_tx.pretrained import rope, table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.family import Family, PaddingMask, Positions, attention_sizes, split
from keras_tx.pretrained.heads import TokenHead, answer_spans
from keras_tx.pretrained.table import Row
from keras_tx.types import DType, Tensor

FULL, SLIDING = "full_attention", "sliding_attention"
# {type of layer: (the key of its rotary base in transformers 4, the default)}
THETAS = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}


class ModernBert(Family):
    """A pre-norm encoder without biases. Most layers have a sliding window, and a rotary base of their own.

    `local_attention` is the full width of a window: a token attends to half of it on each side. The embedding ends with
    a norm, so the first layer has no norm before its attention. transformers applies `attention_dropout` also to the
    output of attention; here it applies to the scores only. In the published models it is 0.
    """

    model_types = ("modernbert",)
    prefix = "model."
    is_causal = False
    initial_distribution = keras.initializers.TruncatedNormal  # at two standard deviations
    inputs = ("input_ids", "attention_mask", "position_ids")
    embedding_key = "embeddings.tok_embeddings.weight"
    head_key = "decoder.weight"
    heads = (r"head\.(dense|norm)\.(weight|bias)", r"(decoder|classifier)\.(weight|bias)")
    tasks = {
        "base": "ModernBertModel",
        "masked_lm": "ModernBertForMaskedLM",
        "sequence_classification": "ModernBertForSequenceClassification",
        "token_classification": "ModernBertForTokenClassification",
        "question_answering": "ModernBertForQuestionAnswering",
    }

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        config.refuse("position_embedding_type", "absolute")  # in older files; nothing reads it
        hidden_dim, num_heads = attention_sizes(config)
        self.epsilon = config.positive("norm_eps", default=1e-5)
        self.normalization = "layer_norm" if config.flag("norm_bias", default=False) else "layer_norm_no_bias"
        types = self._layer_types(config.number("num_hidden_layers"))
        self.rope = self._rope(types)
        width = config.number("local_attention", default=128)
        self.padding_mask = PaddingMask(name="padding_mask")
        self.positions = Positions(name="positions")
        self.embedding = TokenEmbedding(
            config.size("vocab_size"),
            hidden_dim,
            padding_id=None,
            normalization=self.normalization,
            layer_norm_epsilon=self.epsilon,
            dropout=config.rate("embedding_dropout", default=0.0),
            dtype=dtype,
            name="embedding",
        )
        rotary = {kind: rope.rotary(config, self.rope[kind]) for kind in dict.fromkeys(types)}
        attention_bias = config.flag("attention_bias", default=False)
        self.encoder = Encoder(
            len(types),
            config.size("intermediate_size"),
            num_heads,
            attention_dropout=config.rate("attention_dropout", default=0.0),
            activation_dropout=config.rate("mlp_dropout", default=0.0),
            activation=config.activation("hidden_activation", default="gelu"),
            gated=True,
            use_bias=config.flag("mlp_bias", default=False),
            normalize_first=True,
            normalization=self.normalization,
            layer_norm_epsilon=self.epsilon,
            attention_options=[
                {
                    "rotary": rotary[kind],
                    "sliding_window": width // 2 + 1 if kind == SLIDING else None,  # the token itself included
                    "use_bias": attention_bias,
                }
                for kind in types
            ],
            normalize_inputs=False,
            dtype=dtype,
            name="encoder",
        )
        self._make_head(hidden_dim)

    def initial_stddev(self, theirs: str) -> float:
        name, layers = theirs.removesuffix(".weight").rpartition(".")[2], len(self.encoder.layers)
        if name == "classifier":
            return float(self.embedding.hidden_dim**-0.5)
        return self.initializer_range * (1 if name in ("tok_embeddings", "Wi", "Wqkv") else (2 * layers) ** -0.5)

    def _layer_types(self, num_layers: int) -> list[str]:
        every = self.config.number("global_attn_every_n_layers", default=3)
        types = self.config.take("layer_types", default=[SLIDING if i % every else FULL for i in range(num_layers)])
        if not isinstance(types, list) or len(types) != num_layers or any(one not in (FULL, SLIDING) for one in types):
            raise ValueError(
                f"`layer_types` in config.json must be {num_layers} of {FULL!r} and {SLIDING!r}. Received: "
                f"layer_types={types!r:.200}"
            )
        return types

    def _rope(self, types: list[str]) -> dict[str, dict[str, Any]]:
        """The rotary parameters of each type of layer."""
        given = self.config.take("rope_parameters", default={})
        if not isinstance(given, dict) or not set(given) <= set(THETAS):
            raise ValueError(
                f"`rope_parameters` in config.json must be a dict of dicts with the keys {list(THETAS)}. Received: "
                f"rope_parameters={given}"
            )
        scaling = rope.as_dict("rope_scaling", self.config.take("rope_scaling", default=None))
        by_kind = {
            # Where nothing else is given, transformers starts from "default", so that a "type" in `rope_scaling`, as
            # other models once called it, has no effect.
            kind: rope.as_dict(f"rope_parameters['{kind}']", given.get(kind)) or {"rope_type": "default"}
            for kind in THETAS
        }
        return {
            kind: rope.completed({**by_kind[kind], **scaling}, theta=self.config.take(name, default=theta))
            for kind, (name, theta) in THETAS.items()
        }

    def _make_head(self, hidden_dim: int) -> Any:
        config, dtype = self.config, self.dtype
        self.head: Any = None
        self.dense: Any = None
        options = {
            "activation": config.activation("classifier_activation", default="gelu"),
            "use_bias": config.flag("classifier_bias", default=False),
        }
        if self.task == "masked_lm":
            self.head = TokenHead(
                self.embedding,
                epsilon=self.epsilon,
                normalization=self.normalization,
                tied=self.tied,
                output_bias=config.flag("decoder_bias", default=True),
                dtype=dtype,
                **options,
            )
        elif self.task != "base":
            self.dense = Projection(hidden_dim, dtype=dtype, name="head_dense", **options)
            self.norm = make_norm(self.normalization, self.epsilon, dtype=dtype, name="head_norm")
            rate = config.rate("classifier_dropout", default=0.0)
            self.dropout = Dropout(rate, dtype=dtype, name="head_dropout")
            classes = 2 if self.task == "question_answering" else config.num_labels  # start and end of an answer
            self.classes = Projection(classes, dtype=dtype, name="head_output")
        config.refuse("classifier_pooling", "cls", "mean")
        self.pooling = TokenPooling("mean", name="pooling")

    def outputs(self, inputs: dict[str, Tensor], hidden_states: bool) -> dict[str, Tensor]:
        ids = inputs["input_ids"]
        mask = self.padding_mask(ids, inputs["attention_mask"])
        positions = self.positions(ids, inputs["position_ids"])
        embedded = self.embedding(ids, mask=mask)
        hidden = self.encoder(embedded, mask=mask, positions=positions, return_hidden_states=hidden_states)
        hidden, *states = hidden if hidden_states else (hidden,)
        outputs = self._task_outputs(hidden, mask)
        return {**outputs, **({"hidden_states": split(states[0])} if hidden_states else {})}

    def _task_outputs(self, hidden: Tensor, mask: Tensor) -> dict[str, Tensor]:
        if self.task == "base":
            return {"last_hidden_state": hidden}
        if self.task == "masked_lm":
            return {"logits": self.head(hidden)}
        if self.task == "sequence_classification":
            is_mean = self.config.take("classifier_pooling", default="cls") == "mean"
            hidden = self.pooling(hidden, mask=mask) if is_mean else hidden[:, 0]
        logits = self.classes(self.dropout(self.norm(self.dense(hidden))))
        return answer_spans(logits) if self.task == "question_answering" else {"logits": logits}

    def both_spellings(self) -> dict[str, Any]:
        thetas = {name: self.rope[kind]["rope_theta"] for kind, (name, _) in THETAS.items()}
        return {"rope_parameters": self.rope, **thetas}

    def rows(self) -> Iterator[Row]:
        prefix = self.prefix
        yield table.Row(f"{prefix}{self.embedding_key}", embeddings_of(self.embedding.tokens))
        yield from table.norm(f"{prefix}embeddings.norm", self.embedding.norm)
        for index, layer in enumerate(self.encoder.layers):
            name, attention, feed_forward = f"{prefix}layers.{index}", layer.self_attention, layer.feed_forward
            if layer.self_attention_norm is not None:
                yield from table.norm(f"{name}.attn_norm", layer.self_attention_norm)
            of_heads = (attention.query_dense, attention.key_dense, attention.value_dense)
            yield from table.linear(f"{name}.attn.Wqkv", *of_heads)
            yield from table.linear(f"{name}.attn.Wo", attention.output_dense)
            yield from table.norm(f"{name}.mlp_norm", layer.feed_forward_norm)
            yield from table.linear(f"{name}.mlp.Wi", feed_forward.gate_dense, feed_forward.intermediate_dense)
            yield from table.linear(f"{name}.mlp.Wo", feed_forward.output_dense)
        yield from table.norm(f"{prefix}final_norm", self.encoder.final_norm)
        if self.task == "masked_lm":
            yield from self.head.rows("head.dense", "head.norm", "decoder", "decoder.bias")
        elif self.dense is not None:
            yield from table.linear("head.dense", self.dense)
            yield from table.norm("head.norm", self.norm)
            yield from table.linear("classifier", self.classes)


FAMILIES = (ModernBert,)

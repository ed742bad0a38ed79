"""Llama 1 to 3, Mistral, Qwen2 and Qwen3: the same decoder with different biases, windows, and query and key norms.

Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2023, arXiv:2310.06825; Yang et al. 2024, arXiv:2407.10671, and
2025, arXiv:2505.09388.
"""

from collections.abc import Iterator
from typing import Any

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import Decoder, TokenEmbedding
from keras_tx.pretrained import rope, table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.families.causal import CausalFamily
from keras_tx.pretrained.table import Row
from keras_tx.types import DType

# {name in a checkpoint: path inside a `DecoderLayer`}
LAYER = {
    "input_layernorm": "self_attention_norm",
    "self_attn.q_proj": "self_attention.query_dense",
    "self_attn.k_proj": "self_attention.key_dense",
    "self_attn.v_proj": "self_attention.value_dense",
    "self_attn.o_proj": "self_attention.output_dense",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "feed_forward.gate_dense",
    "mlp.up_proj": "feed_forward.intermediate_dense",
    "mlp.down_proj": "feed_forward.output_dense",
}
QK_NORMS = {"self_attn.q_norm": "self_attention.query_norm", "self_attn.k_norm": "self_attention.key_norm"}
FULL, SLIDING = "full_attention", "sliding_attention"


def tasks_of(name: str) -> dict[str, str | tuple[str, ...]]:
    return {
        "base": f"{name}Model",
        "causal_lm": f"{name}ForCausalLM",
        "sequence_classification": f"{name}ForSequenceClassification",
        "token_classification": f"{name}ForTokenClassification",
        "question_answering": f"{name}ForQuestionAnswering",
    }


class Llama(CausalFamily):
    """Pre-norm with RMS norms, rotary positions, grouped heads, a gated feed-forward layer.

    Subclasses change which projections have biases, which layers have a sliding window, whether queries and keys are
    normalized, and the defaults of the config.
    """

    model_types: tuple[str, ...] = ("llama",)
    prefix = "model."
    other_prefix: str | None = "transformer."
    other_tasks: tuple[str, ...] = ("question_answering",)
    embedding_key = "embed_tokens.weight"
    tasks = tasks_of("Llama")
    ignored = {r"model\..*rotary_emb\.inv_freq": "a buffer of the rotary frequencies"}
    tied_by_default = False
    key_value_heads: int | None = None  # the default of the config; None: as many as query heads
    key_dim: int | None = None  # the default of the config; None: the hidden size divided by the number of heads
    qk_norm = False

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        hidden_dim = config.size("hidden_size")
        num_layers, self.num_heads = config.number("num_hidden_layers"), config.size("num_attention_heads")
        epsilon = config.positive("rms_norm_eps", default=1e-6)
        self.rope = rope.parameters_of(config)
        use_bias, use_output_bias = self._biases()
        options = {
            "key_dim": self._key_dim(hidden_dim),
            "num_key_value_heads": self._key_value_heads(),
            "rotary": rope.rotary(config, self.rope),
            "use_bias": use_bias,
            "use_output_bias": use_output_bias,
            "qk_norm": self.qk_norm,
            "qk_norm_epsilon": epsilon,
        }
        self.embedding = TokenEmbedding(
            config.size("vocab_size"), hidden_dim, padding_id=self.padding_id, dtype=dtype, name="embedding"
        )
        self.decoder = Decoder(
            num_layers,
            config.size("intermediate_size"),
            self.num_heads,
            attention_dropout=config.rate("attention_dropout", default=0.0),
            activation=config.activation("hidden_act", default="silu"),
            gated=True,
            use_bias=self._feed_forward_bias(),
            normalize_first=True,
            normalization="rms_norm",
            layer_norm_epsilon=epsilon,
            attention_options=[{**options, "sliding_window": window} for window in self._windows(num_layers)],
            dtype=dtype,
            name="decoder",
        )

    def _key_dim(self, hidden_dim: int) -> int:
        """The size of a head."""
        key_dim = self.config.size("head_dim", default=self.key_dim or 0)
        if not key_dim and hidden_dim % self.num_heads:
            raise ValueError(
                "`hidden_size` in config.json must be divisible by `num_attention_heads`, where there is no `head_dim`."
                f" Received: hidden_size={hidden_dim}, num_attention_heads={self.num_heads}"
            )
        return int(key_dim or hidden_dim // self.num_heads)

    def _key_value_heads(self) -> int:
        name, default = "num_key_value_heads", self.key_value_heads or self.num_heads
        is_missing = name not in self.config.values  # null means as many as query heads
        count = self.config.size(name, default=default if is_missing else self.num_heads)
        if self.num_heads % count:
            raise ValueError(
                f"`num_attention_heads` in config.json must be divisible by `{name}`. Received: "
                f"num_attention_heads={self.num_heads}, {name}={count}"
            )
        return int(count)

    def _biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output projection has one."""
        self.config.refuse("attention_bias", True, False)
        return (self.config.flag("attention_bias", default=False),) * 2

    def _feed_forward_bias(self) -> bool:
        self.config.refuse("mlp_bias", True, False)
        return self.config.flag("mlp_bias", default=False)

    def _windows(self, num_layers: int) -> list[int | None]:
        """The sliding window of each layer, in tokens, with the token itself; None for no window."""
        for name in ("sliding_window", "use_sliding_window", "layer_types"):
            self.config.take(name, default=None)  # transformers does not read it for Llama
        return [None] * num_layers

    def both_spellings(self) -> dict[str, Any]:
        return rope.both_spellings(self.rope)

    def rows(self) -> Iterator[Row]:
        prefix, decoder = self.prefix, self.decoder
        yield table.Row(f"{prefix}{self.embedding_key}", embeddings_of(self.embedding.tokens))
        for index, layer in enumerate(decoder.layers):
            names = {**LAYER, **QK_NORMS} if self.qk_norm else LAYER
            yield from table.by_path(f"{prefix}layers.{index}", names, layer)
        yield from table.norm(f"{prefix}norm", decoder.final_norm)
        yield from self._head_rows()


class Mistral(Llama):
    """No biases; all layers have a sliding window unless `sliding_window` is null."""

    model_types = ("mistral",)
    tasks = tasks_of("Mistral")
    other_prefix, other_tasks = None, ()
    key_value_heads = 8

    def _biases(self) -> tuple[bool, bool]:
        self.config.refuse("attention_bias", False)
        return False, False

    def _feed_forward_bias(self) -> bool:
        self.config.refuse("mlp_bias", False)
        return False

    def _windows(self, num_layers: int) -> list[int | None]:
        values = self.config.values
        window = self.config.number("sliding_window", default=None if "sliding_window" in values else 4096)
        types = [FULL if window is None else SLIDING] * num_layers
        self.config.refuse("layer_types", types)  # Mistral has no other kinds of layers
        return [window] * num_layers


class Qwen2(Llama):
    """Queries, keys and values have biases, the output has none; the last layers may have a sliding window."""

    model_types = ("qwen2",)
    tasks = tasks_of("Qwen2")
    key_value_heads = 32

    def _biases(self) -> tuple[bool, bool]:
        self.config.take("attention_bias", default=None)  # transformers does not read it for Qwen2
        return True, False

    def _feed_forward_bias(self) -> bool:
        self.config.refuse("mlp_bias", False)
        return False

    def _windows(self, num_layers: int) -> list[int | None]:
        config, window = self.config, None
        is_missing = "sliding_window" not in config.values
        # Published configs have a width also where `use_sliding_window` is false.
        width = config.number("sliding_window", default=4096 if is_missing else None)
        if config.flag("use_sliding_window", default=False):
            window = width
        first = num_layers if window is None else config.number("max_window_layers", default=28, least=0)
        types = config.take("layer_types", default=[FULL if i < first else SLIDING for i in range(num_layers)])
        if not isinstance(types, list) or len(types) != num_layers or any(one not in (FULL, SLIDING) for one in types):
            raise ValueError(
                f"`layer_types` in config.json must be {num_layers} of {FULL!r} and {SLIDING!r}. Received: "
                f"layer_types={types!r:.200}"
            )
        if SLIDING in types and window is None:
            raise ValueError(
                f"`layer_types` in config.json must not have {SLIDING!r} without `use_sliding_window` and "
                f"`sliding_window`. Received: layer_types={types!r:.200}"
            )
        return [window if kind == SLIDING else None for kind in types]


class Qwen3(Qwen2):
    """Qwen2 with biases only if the config sets them, and with query and key norms before the rotation."""

    model_types = ("qwen3",)
    tasks = tasks_of("Qwen3")
    key_dim = 128
    qk_norm = True

    _biases = Llama._biases


FAMILIES = (Llama, Mistral, Qwen2, Qwen3)

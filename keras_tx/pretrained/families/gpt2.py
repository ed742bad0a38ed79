"""GPT-2. Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

from collections.abc import Iterator

from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import Decoder, TokenEmbedding
from keras_tx.pretrained import table
from keras_tx.pretrained.config import Config
from keras_tx.pretrained.families.causal import CausalFamily
from keras_tx.pretrained.table import Row
from keras_tx.types import DType


class Gpt2(CausalFamily):
    """Learned positions and pre-norm layers. Queries, keys and values are one tensor, stored as (inputs, outputs).

    `reorder_and_upcast_attn` is ignored, because attention scores are float32 here under any dtype policy.
    """

    model_types = ("gpt2",)
    prefix = "transformer."
    embedding_key = "wte.weight"
    heads = (*CausalFamily.heads, r"classifier\.(weight|bias)", r"multiple_choice_head\.summary\.(weight|bias)")
    token_head = "classifier"
    tasks = {
        "base": "GPT2Model",
        "causal_lm": "GPT2LMHeadModel",
        "sequence_classification": "GPT2ForSequenceClassification",
        "token_classification": "GPT2ForTokenClassification",
        "question_answering": "GPT2ForQuestionAnswering",
    }
    ignored = {r"transformer\.h\.\d+\.attn\.(bias|masked_bias)": "buffers of the causal mask"}

    def __init__(self, config: Config, task: str, *, tied: bool = True, dtype: DType = None) -> None:
        super().__init__(config, task, tied=tied, dtype=dtype)
        hidden_dim, num_heads = config.size("n_embd", "hidden_size"), config.size("n_head", "num_attention_heads")
        if hidden_dim % num_heads:
            raise ValueError(
                "`n_embd` in config.json must be divisible by `n_head`. Received: "
                f"n_embd={hidden_dim}, n_head={num_heads}"
            )
        num_layers = config.number("n_layer", "num_hidden_layers")
        dropout = config.rate("resid_pdrop", default=0.1)
        self.embedding = TokenEmbedding(
            config.size("vocab_size"),
            hidden_dim,
            padding_id=self.padding_id,
            position_encoding="learned",
            max_length=config.size("n_positions", "max_position_embeddings"),
            dropout=config.rate("embd_pdrop", default=0.1),
            dtype=dtype,
            name="embedding",
        )
        self.decoder = Decoder(
            num_layers,
            config.size("n_inner", default=4 * hidden_dim),
            num_heads,
            dropout=dropout,
            attention_dropout=config.rate("attn_pdrop", default=0.1),
            activation=config.activation("activation_function", default="gelu_new"),
            normalize_first=True,
            layer_norm_epsilon=config.positive("layer_norm_epsilon", default=1e-5),
            attention_options=[{"scale": self._scale(hidden_dim // num_heads, i)} for i in range(num_layers)],
            dtype=dtype,
            name="decoder",
        )

    def initial_stddev(self, theirs: str) -> float:
        # What is added to the residual stream begins smaller, the more layers add to it.
        is_added = theirs.endswith("c_proj.weight")
        return self.initializer_range * ((2 * len(self.decoder.layers)) ** -0.5 if is_added else 1)

    def _scale(self, key_dim: int, index: int) -> float:
        """The factor of the products of queries and keys in layer `index`."""
        scale = key_dim**-0.5 if self.config.flag("scale_attn_weights", default=True) else 1.0
        return scale / (index + 1) if self.config.flag("scale_attn_by_inverse_layer_idx", default=False) else scale

    def rows(self) -> Iterator[Row]:
        prefix, embedding, decoder = self.prefix, self.embedding, self.decoder
        yield table.Row(f"{prefix}{self.embedding_key}", embeddings_of(embedding.tokens))
        yield table.Row(f"{prefix}wpe.weight", embedding.positions.embeddings)
        for index, layer in enumerate(decoder.layers):
            name, attention, feed_forward = f"{prefix}h.{index}", layer.self_attention, layer.feed_forward
            of_heads = (attention.query_dense, attention.key_dense, attention.value_dense)
            yield from table.norm(f"{name}.ln_1", layer.self_attention_norm)
            yield from table.linear(f"{name}.attn.c_attn", *of_heads, how=table.KERNEL)
            yield from table.linear(f"{name}.attn.c_proj", attention.output_dense, how=table.KERNEL)
            yield from table.norm(f"{name}.ln_2", layer.feed_forward_norm)
            yield from table.linear(f"{name}.mlp.c_fc", feed_forward.intermediate_dense, how=table.KERNEL)
            yield from table.linear(f"{name}.mlp.c_proj", feed_forward.output_dense, how=table.KERNEL)
        yield from table.norm(f"{prefix}ln_f", decoder.final_norm)
        yield from self._head_rows()


FAMILIES = (Gpt2,)

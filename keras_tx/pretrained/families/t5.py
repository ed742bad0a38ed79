"""T5, T5 1.1, Flan-T5 and mT5.

Raffel et al. 2020, arXiv:1910.10683; gated: Shazeer 2020, arXiv:2002.05202; mT5: Xue et al. 2021, arXiv:2010.11934.
"""

import keras
from keras import ops

from keras_tx.layers import Decoder, Encoder, RelativePositionBias, TokenEmbedding
from keras_tx.layers.dropout import Dropout
from keras_tx.pretrained import table
from keras_tx.pretrained.config import activation
from keras_tx.pretrained.families.seq2seq import Seq2SeqFamily


def _attention(theirs, ours):
    return {f"{theirs}.{name}": f"{ours}.{dense}_dense" for name, dense in _DENSE.items()}


_DENSE = {"q": "query", "k": "key", "v": "value", "o": "output"}
_SELF = {**_attention("layer.0.SelfAttention", "self_attention"), "layer.0.layer_norm": "self_attention_norm"}
_CROSS = {**_attention("layer.1.EncDecAttention", "cross_attention"), "layer.1.layer_norm": "cross_attention_norm"}


@keras.saving.register_keras_serializable(package="keras_tx")
class Scale(keras.layers.Layer):
    """`inputs` times a constant `factor`, any shape."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.factor = factor

    def call(self, inputs):
        return inputs * ops.cast(self.factor, inputs.dtype)

    def compute_output_shape(self, inputs_shape):
        return inputs_shape

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


class T5(Seq2SeqFamily):
    """No biases, no scaled products, RMS norms first; relative positions that all layers of a stack share.

    In the first version the token table is also that of the logits, and the decoder's output is scaled by D ** -0.5
    before. From 1.1 on neither. transformers 5 writes `tie_word_embeddings: true` for all of them: whether the file has
    a table of the logits says whether it is tied, and `scale_decoder_outputs`, if it is there, whether it is scaled.
    """

    model_types: tuple[str, ...] = ("t5",)
    tasks = {"base": "T5Model", "conditional_generation": "T5ForConditionalGeneration"}
    embedding_key = "shared.weight"
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    ignored = {r"decoder\..*\.EncDecAttention\.relative_attention_bias\.weight": "of the first release, never used"}
    heads = (r"lm_head\.weight",)
    tied_by_file = True
    feed_forward = "relu"  # where config.json has none

    def __init__(self, config, task, *, tied=True, dtype=None):
        super().__init__(config, task, tied=tied, dtype=dtype)
        function, gated = self._activation()
        rate = config.number("dropout_rate", default=0.1, kind=float)
        num_heads, num_layers = config.number("num_heads"), config.number("num_layers")
        sizes = (num_heads, config.number("d_ff"))
        options = {
            "dropout": rate,
            "activation_dropout": rate,
            "activation": function,
            "gated": gated,
            "use_bias": False,
            "normalize_first": True,
            "normalization": "rms_norm",
            "layer_norm_epsilon": config.number("layer_norm_epsilon", default=1e-6, kind=float),
            "kernel_initializer": keras.initializers.VarianceScaling(distribution="untruncated_normal"),
            "attention_options": {"key_dim": config.number("d_kv"), "scale": 1.0},
            "dtype": dtype,
        }
        size = config.number("vocab_size")
        self.embedding = self.target_embedding = TokenEmbedding(
            size,
            config.number("d_model"),
            padding_id=self._padding_id(size, 0),
            dropout=rate,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0),
            dtype=dtype,
            name="embedding",
        )
        self.encoder = Encoder(num_layers, *sizes, position_bias=self._bias(num_heads, True), **options, name="encoder")
        self.decoder = Decoder(
            config.number("num_decoder_layers", default=num_layers),
            *sizes,
            cross_attention=True,
            position_bias=self._bias(num_heads, False),
            **options,
            name="decoder",
        )
        self.encoder_dropout = Dropout(rate, dtype=dtype, name="encoder_dropout")
        self.decoder_dropout = Dropout(rate, dtype=dtype, name="decoder_dropout")
        self.scale = Scale(self.embedding.hidden_dim**-0.5, dtype=dtype, name="scale")
        self.head = self._make_head()

    def _activation(self):
        """The activation of the feed-forward, and whether it is gated: "relu", "gated-gelu", ..."""
        name = self.config.take("feed_forward_proj", default=self.feed_forward)
        kind, _, last = str(name).rpartition("-")
        if kind not in ("", "gated"):
            raise ValueError(
                "`feed_forward_proj` in config.json must be an activation, or 'gated-' and one. Received: "
                f"feed_forward_proj={name!r}"
            )
        last = "gelu_new" if name == "gated-gelu" else last
        for key, ours in (("dense_act_fn", last), ("is_gated_act", kind == "gated")):
            value = self.config.take(key, default=ours)
            if value != ours:  # transformers would take this one
                raise ValueError(
                    f"`feed_forward_proj` and `{key}` in config.json must say the same. Received: "
                    f"feed_forward_proj={name!r}, {key}={value!r}"
                )
        return activation(last, "feed_forward_proj"), kind == "gated"

    def _is_scaled(self):
        default = self.config.values.get("tie_word_embeddings") is not False
        return self.config.flag("scale_decoder_outputs", default=default)

    def saved_values(self):
        # Where `tie_word_embeddings` is written anew it no longer says whether the output is scaled.
        return {**super().saved_values(), "scale_decoder_outputs": self._is_scaled()}

    def _bias(self, num_heads, bidirectional):
        return RelativePositionBias(
            num_heads,
            num_buckets=self.config.number("relative_attention_num_buckets", default=32),
            max_distance=self.config.number("relative_attention_max_distance", default=128),
            bidirectional=bidirectional,
            name="position_bias",
        )

    def _embed(self, side, ids, mask=None, by_slot=False):
        return self.embedding(ids, mask=mask)

    def _encoded(self, hidden):
        return self.encoder_dropout(hidden)

    def _decoded(self, hidden):
        return self.decoder_dropout(hidden)

    def _logits(self, hidden):
        return super()._logits(self.scale(hidden) if self._is_scaled() else hidden)

    def rows(self):
        yield table.Row(self.embedding_key, self.embedding.tokens.embeddings)
        for side, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
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

    def _feed_forward_rows(self, theirs, layer):
        if layer.gated:
            yield from table.linear(f"{theirs}.wi_0", layer.gate_dense)
        yield from table.linear(f"{theirs}.{'wi_1' if layer.gated else 'wi'}", layer.intermediate_dense)
        yield from table.linear(f"{theirs}.wo", layer.output_dense)


class MT5(T5):
    """T5 1.1 over many languages."""

    model_types = ("mt5",)
    tasks = {"base": "MT5Model", "conditional_generation": "MT5ForConditionalGeneration"}
    feed_forward = "gated-gelu"

    def _is_scaled(self):
        return False


FAMILIES = (T5, MT5)

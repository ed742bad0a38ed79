"""Encoder: (B, T, D) -> (B, T, D), a layer and the stack of layers.

B batch, T tokens, N heads, D hidden, F intermediate, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
"""

import keras
from keras import activations, initializers, ops

from keras_tx import checks
from keras_tx.layers.attention import MultiHeadAttention
from keras_tx.layers.feed_forward import FeedForward
from keras_tx.layers.masks import MaskedLayer
from keras_tx.layers.residual import NORMALIZATIONS, make_norm, residual


@keras.saving.register_keras_serializable(package="keras_tx")
class EncoderLayer(MaskedLayer):
    """Self-attention, then feed-forward, each with a residual connection and a norm.

    Args:
        intermediate_dim: F.
        num_heads: N, a divisor of D unless `attention_options` give a `key_dim`.
        dropout: rate in [0, 1) of dropout on the output of attention and of feed-forward, before the residual sum.
        attention_dropout: rate of dropout on the attention scores; `dropout` if None.
        activation_dropout: rate of dropout inside feed-forward, after the activation.
        activation: of feed-forward, what `keras.activations.get` takes.
        gated: whether feed-forward is gated.
        use_bias: whether the projections have biases.
        normalize_first: norms before attention and feed-forward (pre-norm) instead of after the sums (post-norm).
        normalization: "layer_norm" or "rms_norm".
        layer_norm_epsilon: of the norms.
        kernel_initializer: of all projections.
        attention_options: dict of further arguments of `MultiHeadAttention`: `key_dim`, `num_key_value_heads`,
            `sliding_window`, `qk_norm`, `scale`, `hard_attention`, ...

    Call arguments:
        inputs: (B, T, D).
        mask: (B, T), True at real tokens. Filled from the Keras mask.
        attention_mask: (B, T, T) or (B, N, T, T), True = may look, joined with `mask`.
        attention_bias: added to the scaled products, shaped as `attention_mask`.
        return_attention_scores: also return the scores.
        training: whether dropout is on.

    Returns:
        (B, T, D), and if asked for the attention scores (B, N, T, T) in float32.

    Raises:
        ValueError: for a size, rate or name that cannot work; the message has the value.
    """

    def __init__(
        self,
        intermediate_dim,
        num_heads,
        *,
        dropout=0.0,
        attention_dropout=None,
        activation_dropout=0.0,
        activation="relu",
        gated=False,
        use_bias=True,
        normalize_first=False,
        normalization="layer_norm",
        layer_norm_epsilon=1e-5,
        kernel_initializer="glorot_uniform",
        attention_options=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.intermediate_dim = checks.positive_int("intermediate_dim", intermediate_dim)
        self.num_heads = checks.positive_int("num_heads", num_heads)
        self.dropout = checks.rate("dropout", dropout)
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = checks.rate("attention_dropout", attention_dropout)
        self.activation_dropout = checks.rate("activation_dropout", activation_dropout)
        self.activation = activations.get(activation)
        self.gated = gated
        self.use_bias = use_bias
        self.normalize_first = normalize_first
        self.normalization = checks.one_of("normalization", normalization, NORMALIZATIONS)
        self.layer_norm_epsilon = checks.positive_float("layer_norm_epsilon", layer_norm_epsilon)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.attention_options = checks.options_of(
            "attention_options",
            attention_options,
            MultiHeadAttention,
            given=("num_heads", "attention_axes", "output_shape"),
        )

    def build(self, inputs_shape):
        hidden_dim = inputs_shape[-1]
        if hidden_dim is None:
            raise ValueError(f"`inputs` must have a last axis of known size. Received: inputs.shape={inputs_shape}")
        if "key_dim" not in self.attention_options and hidden_dim % self.num_heads:
            raise ValueError(
                "`hidden_dim`, the last axis of the inputs, must be divisible by `num_heads`; or give "
                f"attention_options={{'key_dim': ...}}. Received: hidden_dim={hidden_dim}, num_heads={self.num_heads}"
            )
        options = {
            "key_dim": hidden_dim // self.num_heads,
            "dropout": self.attention_dropout,
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer,
            **self.attention_options,
        }
        self.self_attention_norm = self._norm("self_attention_norm", inputs_shape)
        self.self_attention = MultiHeadAttention(
            self.num_heads, **options, dtype=self.dtype_policy, name="self_attention"
        )
        self.self_attention.build(inputs_shape, inputs_shape)
        self.feed_forward_norm = self._norm("feed_forward_norm", inputs_shape)
        self.feed_forward = FeedForward(
            self.intermediate_dim,
            activation=self.activation,
            gated=self.gated,
            dropout=self.activation_dropout,
            use_bias=self.use_bias,
            kernel_initializer=self.kernel_initializer,
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        self.feed_forward.build(inputs_shape)
        self._dropout_layer = keras.layers.Dropout(self.dropout, dtype=self.dtype_policy)
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: hidden_dim})

    def _norm(self, name, inputs_shape):
        layer = make_norm(self.normalization, self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)
        layer.build(inputs_shape)
        return layer

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        attention_bias=None,
        return_attention_scores=False,
        training=None,
    ):
        def attention(x):
            outputs = self.self_attention(
                x,
                x,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                return_attention_scores=return_attention_scores,
                training=training,
            )
            return outputs if return_attention_scores else (outputs, None)

        def feed_forward(x):
            return self.feed_forward(x, training=training), None

        options = {"dropout": self._dropout_layer, "normalize_first": self.normalize_first, "training": training}
        outputs, scores = residual(inputs, attention, norm=self.self_attention_norm, **options)
        outputs, _ = residual(outputs, feed_forward, norm=self.feed_forward_norm, **options)
        return (outputs, scores) if return_attention_scores else outputs

    def compute_output_spec(self, inputs, *args, return_attention_scores=False, **kwargs):
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        batch, length = inputs.shape[:2]
        scores = keras.KerasTensor((batch, self.num_heads, length, length), dtype="float32")
        return (outputs, scores) if return_attention_scores else outputs

    def get_config(self):
        return {
            **super().get_config(),
            "intermediate_dim": self.intermediate_dim,
            "num_heads": self.num_heads,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "activation": activations.serialize(self.activation),
            "gated": self.gated,
            "use_bias": self.use_bias,
            "normalize_first": self.normalize_first,
            "normalization": self.normalization,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "attention_options": {
                name: keras.saving.serialize_keras_object(value) for name, value in self.attention_options.items()
            },
        }


@keras.saving.register_keras_serializable(package="keras_tx")
class Encoder(MaskedLayer):
    """A stack of encoder layers; a pre-norm stack ends with a norm. The width D comes from the input.

    Args:
        num_layers: L.
        num_heads, intermediate_dim, dropout, attention_dropout, activation_dropout, activation, gated, use_bias,
            normalize_first, normalization, layer_norm_epsilon, kernel_initializer, attention_options: of each
            `EncoderLayer`.

    Call arguments:
        inputs, mask, attention_mask, attention_bias, training: as for `EncoderLayer`; each layer gets the same.
        return_attention_scores: also return the scores of all layers.

    Returns:
        (B, T, D), and if asked for the attention scores (B, L, N, T, T) in float32.

    Raises:
        ValueError: for a `num_layers` that is not positive, and as `EncoderLayer`.
    """

    def __init__(
        self,
        num_layers,
        num_heads,
        intermediate_dim,
        *,
        dropout=0.0,
        attention_dropout=None,
        activation_dropout=0.0,
        activation="relu",
        gated=False,
        use_bias=True,
        normalize_first=False,
        normalization="layer_norm",
        layer_norm_epsilon=1e-5,
        kernel_initializer="glorot_uniform",
        attention_options=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_layers = checks.positive_int("num_layers", num_layers)
        self.layers = [
            EncoderLayer(
                intermediate_dim,
                num_heads,
                dropout=dropout,
                attention_dropout=attention_dropout,
                activation_dropout=activation_dropout,
                activation=activation,
                gated=gated,
                use_bias=use_bias,
                normalize_first=normalize_first,
                normalization=normalization,
                layer_norm_epsilon=layer_norm_epsilon,
                kernel_initializer=kernel_initializer,
                attention_options=attention_options,
                dtype=self.dtype_policy,
                name=f"layer_{index}",
            )
            for index in range(num_layers)
        ]
        self.normalize_first = normalize_first
        self.final_norm = None
        if normalize_first:
            self.final_norm = make_norm(normalization, layer_norm_epsilon, dtype=self.dtype_policy, name="final_norm")

    def build(self, inputs_shape):
        for layer in self.layers:
            layer.build(inputs_shape)
        self.input_spec = self.layers[0].input_spec
        if self.final_norm is not None:
            self.final_norm.build(inputs_shape)

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        attention_bias=None,
        return_attention_scores=False,
        training=None,
    ):
        outputs, scores = inputs, []
        for layer in self.layers:
            outputs = layer(
                outputs,
                mask=mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                return_attention_scores=return_attention_scores,
                training=training,
            )
            if return_attention_scores:
                outputs, layer_scores = outputs
                scores.append(layer_scores)
        if self.final_norm is not None:
            outputs = self.final_norm(outputs)
        return (outputs, ops.stack(scores, axis=1)) if return_attention_scores else outputs

    def compute_output_spec(self, inputs, *args, return_attention_scores=False, **kwargs):
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        batch, length = inputs.shape[:2]
        shape = (batch, self.num_layers, self.layers[0].num_heads, length, length)
        return (outputs, keras.KerasTensor(shape, dtype="float32")) if return_attention_scores else outputs

    def get_config(self):
        base = super().get_config()
        layer = self.layers[0].get_config()
        options = {name: layer[name] for name in layer if name not in base}
        return {**base, "num_layers": self.num_layers, **options}

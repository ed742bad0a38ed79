"""What encoder and decoder share: a block of sublayers with residuals and norms, and the stack of such blocks.

B batch, T tokens, N heads, D hidden, F intermediate, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
"""

import keras
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers import activations
from keras_tx.layers.attention.layer import MultiHeadAttention
from keras_tx.layers.configs import serialized
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.feed_forward import FeedForward
from keras_tx.layers.masked_layer import MaskedLayer
from keras_tx.layers.position_bias import AlibiBias, RelativePositionBias
from keras_tx.layers.remat import rematerialized
from keras_tx.layers.residual import NORMALIZATIONS, make_norm, residual

POSITION_BIASES = (None, "alibi", "relative")


class TransformerLayer(MaskedLayer):
    """The options and sublayers that `EncoderLayer` and `DecoderLayer` have in common; they say what they mean."""

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
        normalize_inputs=True,
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
        self.normalize_inputs = normalize_inputs
        if not (normalize_inputs or normalize_first):
            raise ValueError(
                "`normalize_inputs=False` needs `normalize_first=True`: post-norm has no norm of the inputs. Received: "
                f"normalize_inputs={normalize_inputs}, normalize_first={normalize_first}"
            )

    def _check_hidden_dim(self, inputs_shape):
        hidden_dim = inputs_shape[-1]
        if hidden_dim is None:
            raise ValueError(f"`inputs` must have a last axis of known size. Received: inputs.shape={inputs_shape}")
        if "key_dim" not in self.attention_options and hidden_dim % self.num_heads:
            raise ValueError(
                "`hidden_dim`, the last axis of the inputs, must be divisible by `num_heads`; or give "
                f"attention_options={{'key_dim': ...}}. Received: hidden_dim={hidden_dim}, num_heads={self.num_heads}"
            )
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: hidden_dim})

    def _attention(self, name, inputs_shape, memory_shape, without=(), has_norm=True):
        """A norm, or None, and an attention of queries (B, T, D) over a memory (B, S, ...)."""
        norm = self._norm(f"{name}_norm", inputs_shape) if has_norm else None
        options = {
            "key_dim": inputs_shape[-1] // self.num_heads,
            "dropout": self.attention_dropout,
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer,
            **{option: value for option, value in self.attention_options.items() if option not in without},
        }
        layer = MultiHeadAttention(self.num_heads, **options, dtype=self.dtype_policy, name=name)
        layer.build(inputs_shape, memory_shape)
        return norm, layer

    def _feed_forward(self, inputs_shape):
        """A norm and the feed-forward."""
        norm = self._norm("feed_forward_norm", inputs_shape)
        layer = FeedForward(
            self.intermediate_dim,
            activation=self.activation,
            gated=self.gated,
            dropout=self.activation_dropout,
            use_bias=self.use_bias,
            kernel_initializer=self.kernel_initializer,
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        layer.build(inputs_shape)
        self._dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy)
        return norm, layer

    def _norm(self, name, inputs_shape):
        layer = make_norm(self.normalization, self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)
        layer.build(inputs_shape)
        return layer

    def _residual(self, inputs, name, sublayer, training):
        """`sublayer(x)` in the residual connection with the norm of this name: its output, and what is beside it."""
        return residual(
            inputs,
            sublayer,
            norm=getattr(self, f"{name}_norm"),
            dropout=self._dropout_layer,
            normalize_first=self.normalize_first,
            training=training,
        )

    def _feed(self, inputs, training):
        return self._residual(inputs, "feed_forward", lambda x: self.feed_forward(x, training=training), training)[0]

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
            "attention_options": {name: serialized(value) for name, value in self.attention_options.items()},
            "normalize_inputs": self.normalize_inputs,
        }


class TransformerStack(MaskedLayer):
    """`num_layers` blocks of one kind; if pre-norm, a norm at the end. `Encoder` and `Decoder` say the rest."""

    block = TransformerLayer

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
        normalize_inputs=True,
        position_bias=None,
        remat=False,
        **kwargs,
    ):
        of_block = {name: kwargs.pop(name) for name in self.further_options if name in kwargs}
        super().__init__(**kwargs)
        self.num_layers = checks.positive_int("num_layers", num_layers)
        self._options_by_layer = isinstance(attention_options, (list, tuple))
        by_layer = attention_options if self._options_by_layer else [attention_options] * num_layers
        if len(by_layer) != num_layers:
            raise ValueError(
                "`attention_options` must be a dict, or a list of one dict for each layer. Received: "
                f"{len(by_layer)} dicts, num_layers={num_layers}"
            )
        self.layers = [
            self.block(
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
                attention_options=options,
                normalize_inputs=normalize_inputs or index > 0,
                dtype=self.dtype_policy,
                name=f"layer_{index}",
                **of_block,
            )
            for index, options in enumerate(by_layer)
        ]
        self.normalize_first = normalize_first
        self.final_norm = None
        if normalize_first:
            self.final_norm = make_norm(normalization, layer_norm_epsilon, dtype=self.dtype_policy, name="final_norm")

        self.position_bias = self._position_bias(position_bias, num_heads)
        self.remat = remat

    further_options: tuple[str, ...] = ()  # those of the block that a kind of stack takes beside the ones above
    bidirectional = True  # whether a query may look at later keys

    def _position_bias(self, position_bias, num_heads):
        if isinstance(position_bias, dict):
            return keras.saving.deserialize_keras_object(position_bias)
        if position_bias is None or isinstance(position_bias, keras.layers.Layer):
            return position_bias
        checks.one_of("position_bias", position_bias, POSITION_BIASES)
        if position_bias == "alibi":
            return AlibiBias(num_heads, name="position_bias")
        return RelativePositionBias(num_heads, bidirectional=self.bidirectional, name="position_bias")

    def build(self, inputs_shape, *args):
        for layer in self.layers:
            layer.build(inputs_shape, *args)
        if self.position_bias is not None and not self.position_bias.built:
            self.position_bias.build(inputs_shape)
        self.input_spec = self.layers[0].input_spec
        if self.final_norm is not None:
            self.final_norm.build(inputs_shape)

    def _bias(self, inputs, attention_bias, **slots):
        """The bias of all layers: that of the positions, and what the caller adds to it."""
        if self.position_bias is None:
            return attention_bias
        bias = self.position_bias(inputs, **slots)
        if attention_bias is None:
            return bias
        if len(attention_bias.shape) == 3:
            attention_bias = ops.expand_dims(attention_bias, 1)
        return bias + ops.cast(attention_bias, "float32")

    def _run(self, layer, inputs, training, **options):
        """`layer(inputs, ...)`, in training by `remat` if asked."""
        if training and self.remat:
            return rematerialized(layer, inputs, training=training, **options)
        return layer(inputs, training=training, **options)

    def _hidden_spec(self, inputs):
        shape = (inputs.shape[0], self.num_layers + 1, *inputs.shape[1:])
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def get_config(self):
        base = super().get_config()
        layer = self.layers[0].get_config()
        options = {name: layer[name] for name in layer if name not in base}
        if self._options_by_layer:
            options["attention_options"] = [layer.get_config()["attention_options"] for layer in self.layers]
        position_bias = serialized(self.position_bias)
        return {**base, "num_layers": self.num_layers, **options, "position_bias": position_bias, "remat": self.remat}

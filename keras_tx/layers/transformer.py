"""Base classes of encoders and decoders: a layer of sublayers with residual connections, and a stack of layers.

B batch, T tokens, N heads, D hidden, F intermediate, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers import activations
from keras_tx.layers.attention.arguments import check_bias
from keras_tx.layers.attention.axes import with_all_axes
from keras_tx.layers.attention.layer import MultiHeadAttention
from keras_tx.layers.configs import checked_copy, copy_of, own_policy, serialized, set_untracked, widened
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.feed_forward import FeedForward
from keras_tx.layers.masked_layer import MaskedLayer
from keras_tx.layers.position_bias import AlibiBias, PositionBias, RelativePositionBias
from keras_tx.layers.remat import rematerialized
from keras_tx.layers.residual import EPSILON, check_normalization, make_norm, residual, serialize_normalization
from keras_tx.layers.shared_trace import SharedTrace
from keras_tx.types import Shape, Tensor

POSITION_BIASES = (None, "alibi", "relative")
_OF_THE_LAYER = ("num_heads", "attention_axes", "output_shape")  # set by the layer, not by `attention_options`


class TransformerLayer(MaskedLayer):
    """The arguments and sublayers that `EncoderLayer` and `DecoderLayer` have in common. See `EncoderLayer`."""

    _cache_depth = 1

    def __init__(
        self,
        intermediate_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        activation_dropout: float = 0.0,
        activation: Any = "relu",
        gated: bool = False,
        use_bias: bool = True,
        normalize_first: bool = False,
        normalization: Any = "layer_norm",
        layer_norm_epsilon: float = EPSILON,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        attention_options: dict[str, Any] | None = None,
        normalize_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.intermediate_dim = checks.positive_int("intermediate_dim", intermediate_dim)
        self.num_heads = checks.positive_int("num_heads", num_heads)
        if self.intermediate_dim < self.num_heads:
            raise ValueError(
                "`intermediate_dim` must not be smaller than `num_heads`. They may have been swapped: "
                "`intermediate_dim` comes first. Received: "
                f"intermediate_dim={intermediate_dim}, num_heads={num_heads}"
            )
        self.dropout = checks.rate("dropout", dropout)
        attention_dropout = dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = checks.rate("attention_dropout", attention_dropout)
        self.activation_dropout = checks.rate("activation_dropout", activation_dropout)
        self.activation = activations.get(activation)
        self.gated = checks.flag("gated", gated)
        self.use_bias = checks.flag("use_bias", use_bias)
        self.normalize_first = checks.flag("normalize_first", normalize_first)
        self.layer_norm_epsilon = checks.positive_float("layer_norm_epsilon", layer_norm_epsilon)
        set_untracked(self, "normalization", check_normalization(normalization, self.layer_norm_epsilon))
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        options = checks.options_of("attention_options", attention_options, MultiHeadAttention, given=_OF_THE_LAYER)
        if isinstance(options.get("rotary"), dict):
            options["rotary"] = keras.saving.deserialize_keras_object(options["rotary"])
        if isinstance(options.get("rotary"), keras.layers.Layer):
            options["rotary"] = checked_copy("rotary", options["rotary"])  # from which attention layers copy theirs
        set_untracked(self, "attention_options", options)
        self.normalize_inputs = checks.flag("normalize_inputs", normalize_inputs)
        if not (normalize_inputs or normalize_first):
            raise ValueError(
                "`normalize_inputs=False` needs `normalize_first=True`: post-norm has no norm of the inputs. Received: "
                f"normalize_inputs={normalize_inputs}, normalize_first={normalize_first}"
            )

    def _check_hidden_dim(self, inputs_shape: Shape) -> None:
        """Raises unless D is divisible by the number of heads, and fixes D for all later calls."""
        hidden_dim = inputs_shape[-1]
        if hidden_dim is None:
            raise ValueError(f"`inputs` must have a last axis of known size. Received: inputs.shape={inputs_shape}")
        if "key_dim" not in self.attention_options and hidden_dim % self.num_heads:
            raise ValueError(
                "`hidden_dim`, the last axis of the inputs, must be divisible by `num_heads`; or give "
                f"attention_options={{'key_dim': ...}}. Received: hidden_dim={hidden_dim}, num_heads={self.num_heads}"
            )
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: hidden_dim})

    def _make_norm(self, name: str, inputs_shape: Shape) -> Any:
        layer = make_norm(self.normalization, self.layer_norm_epsilon, dtype=self.dtype_policy, name=name)
        layer.build(inputs_shape)
        return layer

    def _make_attention(
        self, name: str, query_shape: Shape, value_shape: Shape, left_out: Collection[str] = ()
    ) -> MultiHeadAttention:
        """Attention of queries (B, T, D) to values (B, S, ...), with `attention_options` except those `left_out`."""
        options = {
            "key_dim": (query_shape[-1] or 0) // self.num_heads,
            "dropout": self.attention_dropout,
            "use_bias": self.use_bias,
            "kernel_initializer": self.kernel_initializer,
            "bias_initializer": self.bias_initializer,
            **{option: value for option, value in self.attention_options.items() if option not in left_out},
        }
        if isinstance(options.get("rotary"), keras.layers.Layer):
            options["rotary"] = copy_of(options["rotary"])
        layer = MultiHeadAttention(self.num_heads, **options, dtype=self.dtype_policy, name=name)
        layer.build(query_shape, value_shape)
        return layer

    def _of_rotary(self, positions: Tensor | None) -> Tensor | None:
        """`positions` for attention. Models also hand them to layers that have no rotary embedding."""
        return None if self.self_attention.rotary is None else positions

    def _make_feed_forward(self, inputs_shape: Shape) -> FeedForward:
        layer = FeedForward(
            self.intermediate_dim,
            activation=self.activation,
            gated=self.gated,
            dropout=self.activation_dropout,
            use_bias=self.use_bias,
            kernel_initializer=self.kernel_initializer,
            bias_initializer=self.bias_initializer,
            dtype=self.dtype_policy,
            name="feed_forward",
        )
        layer.build(inputs_shape)
        return layer

    def _make_dropout(self) -> Dropout:
        """The dropout of all residual connections."""
        return Dropout(self.dropout, dtype=own_policy(self))

    def _residual(
        self, inputs: Tensor, sublayer: Callable[[Tensor], Any], norm: Any, training: bool | None
    ) -> tuple[Any, ...]:
        """`sublayer(inputs)` in a residual connection with `norm`: the output, then the sublayer's other results."""
        return residual(
            inputs,
            sublayer,
            norm=norm,
            dropout=self._dropout_layer,
            normalize_first=self.normalize_first,
            training=training,
        )

    def _feed(self, inputs: Tensor, training: bool | None) -> Tensor:
        """The feed-forward network in its residual connection."""

        def feed_forward(x: Tensor) -> Tensor:
            return self.feed_forward(x, training=training)

        return self._residual(inputs, feed_forward, self.feed_forward_norm, training)[0]

    def compute_output_shape(self, inputs_shape: Shape, memory_shape: Shape | None = None) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        options = {name: serialized(value) for name, value in self.attention_options.items()}
        return {**super().get_config(), **_shared_config(self), "attention_options": options}


class TransformerStack(MaskedLayer):
    """`num_layers` layers of one class, one after the other, and a final norm if they are pre-norm. See `Encoder`.

    Args:
        layer_options: dict of the arguments that only this kind of layer has, the same for all layers.
    """

    _cache_depth = 2
    layer_class: type[TransformerLayer] = TransformerLayer
    bidirectional = True  # whether a query may attend to later keys

    def __init__(
        self,
        num_layers: int,
        intermediate_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        activation_dropout: float = 0.0,
        activation: Any = "relu",
        gated: bool = False,
        use_bias: bool = True,
        normalize_first: bool = False,
        normalization: Any = "layer_norm",
        layer_norm_epsilon: float = EPSILON,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        attention_options: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        normalize_inputs: bool = True,
        position_bias: Any = None,
        remat: bool = False,
        layer_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_layers = checks.positive_int("num_layers", num_layers)
        normalization = check_normalization(normalization, layer_norm_epsilon)
        normalize_inputs = checks.flag("normalize_inputs", normalize_inputs)
        self._has_options_by_layer = isinstance(attention_options, (list, tuple))
        options_by_layer: Any = attention_options if self._has_options_by_layer else [attention_options] * num_layers
        if len(options_by_layer) != num_layers:
            raise ValueError(
                "`attention_options` must be a dict, or a list of one dict for each layer. Received: "
                f"{len(options_by_layer)} dicts, num_layers={num_layers}"
            )
        self.layers = [
            self.layer_class(
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
                bias_initializer=bias_initializer,
                attention_options=options,
                normalize_inputs=normalize_inputs or index > 0,
                dtype=self.dtype_policy,
                name=f"layer_{index}",
                **(layer_options or {}),
            )
            for index, options in enumerate(options_by_layer)
        ]
        first = self.layers[0]  # has checked the arguments
        self.intermediate_dim, self.num_heads = first.intermediate_dim, first.num_heads
        self.dropout, self.attention_dropout = first.dropout, first.attention_dropout
        self.activation_dropout, self.activation = first.activation_dropout, first.activation
        self.gated, self.use_bias = first.gated, first.use_bias
        self.normalize_first, self.layer_norm_epsilon = first.normalize_first, first.layer_norm_epsilon
        set_untracked(self, "normalization", first.normalization)
        self.kernel_initializer, self.bias_initializer = first.kernel_initializer, first.bias_initializer
        self.normalize_inputs = first.normalize_inputs
        self.final_norm: Any = None
        if normalize_first:
            self.final_norm = make_norm(
                self.normalization, self.layer_norm_epsilon, dtype=self.dtype_policy, name="final_norm"
            )
        self.position_bias = widened(self._make_position_bias(position_bias), self.compute_dtype)
        self.remat = checks.flag("remat", remat)

    def _make_position_bias(self, position_bias: Any) -> Any:
        if isinstance(position_bias, dict):
            position_bias = keras.saving.deserialize_keras_object(position_bias)
        if position_bias is None:
            return None
        if isinstance(position_bias, keras.layers.Layer):
            return self._checked_bias(position_bias)
        checks.one_of("position_bias", position_bias, POSITION_BIASES)
        if position_bias == "alibi":
            return AlibiBias(self.num_heads, name="position_bias")
        return RelativePositionBias(self.num_heads, bidirectional=self.bidirectional, name="position_bias")

    def _checked_bias(self, layer: keras.layers.Layer) -> PositionBias:
        if not isinstance(layer, PositionBias):
            raise ValueError(
                f"`position_bias` must be one of {[*POSITION_BIASES]}, an `AlibiBias` or a `RelativePositionBias`. "
                f"Received: a layer of type {type(layer).__name__}"
            )
        if layer.num_heads != self.num_heads:
            raise ValueError(
                "`position_bias` must have as many heads as the attention layers. Received: "
                f"position_bias.num_heads={layer.num_heads}, num_heads={self.num_heads}"
            )
        return layer

    @property
    def attention_options(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The options of all layers, or a list with those of each layer, if the constructor got a list."""
        by_layer = [layer.attention_options for layer in self.layers]
        return by_layer if self._has_options_by_layer else by_layer[0]

    def build(self, inputs_shape: Shape, *args: Any) -> None:
        for layer in self.layers:
            layer.build(inputs_shape, *args)
        if self.position_bias is not None and not self.position_bias.built:
            self.position_bias.build(inputs_shape)
        self.input_spec = self.layers[0].input_spec
        if self.final_norm is not None:
            self.final_norm.build(inputs_shape)

    def _bias(self, inputs: Tensor, attention_bias: Tensor, **slots: Any) -> Tensor:
        """The bias that all layers add to their attention logits: `position_bias` plus the caller's, or None."""
        if self.position_bias is None:
            return attention_bias
        bias = self.position_bias(inputs, **slots)
        if attention_bias is None:
            return bias
        check_bias(attention_bias)  # the sum would hide what the attention layers check
        attention_bias = with_all_axes("attention_bias", attention_bias, (inputs.shape[0], *bias.shape[1:]))
        return bias + ops.cast(attention_bias, bias.dtype)

    def _run(
        self, layer: TransformerLayer, inputs: Tensor, training: bool | None, trace: SharedTrace, **options: Any
    ) -> Any:
        """`layer(inputs, ...)`; in training with gradient checkpointing, if `remat` is True.

        Args:
            trace: the same for all layers of a call.
        """
        if training and self.remat:
            return rematerialized(layer, inputs, training=training, **options)
        return trace(layer, inputs, training=training, **options)

    def _hidden_spec(self, inputs: Tensor) -> Any:
        """The shape and dtype of the hidden states of all layers."""
        shape = (inputs.shape[0], self.num_layers + 1, *inputs.shape[1:])
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def compute_output_shape(self, inputs_shape: Shape, memory_shape: Shape | None = None) -> Shape:
        return inputs_shape

    def get_config(self) -> dict[str, Any]:
        options = [layer.get_config()["attention_options"] for layer in self.layers]
        return {
            **super().get_config(),
            "num_layers": self.num_layers,
            **_shared_config(self),
            "attention_options": options if self._has_options_by_layer else options[0],
            "position_bias": serialized(self.position_bias),
            "remat": self.remat,
        }


def _shared_config(layer: TransformerLayer | TransformerStack) -> dict[str, Any]:
    """The part of the config that layers and stacks have in common, without `attention_options`."""
    return {
        "intermediate_dim": layer.intermediate_dim,
        "num_heads": layer.num_heads,
        "dropout": layer.dropout,
        "attention_dropout": layer.attention_dropout,
        "activation_dropout": layer.activation_dropout,
        "activation": activations.serialize(layer.activation),
        "gated": layer.gated,
        "use_bias": layer.use_bias,
        "normalize_first": layer.normalize_first,
        "normalization": serialize_normalization(layer.normalization),
        "layer_norm_epsilon": layer.layer_norm_epsilon,
        "kernel_initializer": initializers.serialize(layer.kernel_initializer),
        "bias_initializer": initializers.serialize(layer.bias_initializer),
        "normalize_inputs": layer.normalize_inputs,
    }

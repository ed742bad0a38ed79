"""`EncoderLayer` and `Encoder`: (B, T, D) -> (B, T, D).

B batch, T tokens, N heads, D hidden, F intermediate, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_tx import checks
from keras_tx.internals.tensorflow_graphs import traces_for_xla
from keras_tx.layers import exported_weights, masks
from keras_tx.layers.attention.dispatch import uses_blocks
from keras_tx.layers.attention.parts import can_attend_in_parts
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.shared_trace import SharedTrace
from keras_tx.layers.transformer import TransformerLayer, TransformerStack
from keras_tx.layers.unpadding import Unpadding, is_possible, is_worthwhile
from keras_tx.types import Shape, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class EncoderLayer(TransformerLayer):
    """Self-attention, then a feed-forward network, each with a residual connection and a norm.

    Args:
        intermediate_dim: F, the hidden size inside the feed-forward network; at least `num_heads`.
        num_heads: N, the number of attention heads. D must be divisible by it, unless `attention_options` have a
            `key_dim`.
        dropout: rate in [0, 1) of dropout on the outputs of attention and of the feed-forward network, before the
            residual addition.
        attention_dropout: rate of dropout on the attention scores. None: `dropout`.
        activation_dropout: rate of dropout inside the feed-forward network, after the activation.
        activation: the activation of the feed-forward network, as for `FeedForward`.
        gated: whether the feed-forward network is gated, as in SwiGLU.
        use_bias: whether the dense projections have biases.
        normalize_first: whether the norms come before attention and feed-forward (pre-norm), or after the residual sums
            (post-norm, as in the paper).
        normalization: "layer_norm", "layer_norm_no_bias" (with a scale only), "rms_norm", a layer of your own, or a
            callable that makes one, such as its class. Each norm is a new layer with the config of the given one, its
            own weights and the dtype policy of this layer.
        layer_norm_epsilon: a small number that the norms add to the variance (RMS norms: to the mean square). It cannot
            be given if `normalization` is a layer.
        kernel_initializer: initializer of the kernels of all dense projections.
        bias_initializer: initializer of the biases of all dense projections.
        attention_options: dict of further arguments of `MultiHeadAttention`: `key_dim`, `num_key_value_heads`,
            `sliding_window`, `rotary`, `qk_norm`, `scale`, `hard_attention`, ... A layer given as `rotary` is copied:
            each layer of a stack has one with weights of its own.
        normalize_inputs: with `normalize_first`, whether there is a norm before attention. False is for inputs that are
            normalized already.

    Call arguments:
        inputs: (B, T, D): batch, tokens, hidden size.
        mask: (B, T), True at real tokens. If None, the Keras mask of `inputs` is used.
        attention_mask: broadcastable to (B, T, T) or (B, N, T, T), True where a query may attend to a key. In addition,
            padding is always masked out.
        attention_bias: added to the attention logits; broadcastable to (B, T, T) or (B, N, T, T).
        return_attention_scores: whether to also return the attention scores.
        training: whether dropout is on.
        positions: (B, T) or (T,) integers, only read by rotary embedding. If None, real tokens are counted from 0.
        document_ids: (B, T) integers. A token attends only to tokens of its own document; 0 marks padding.
        unpadding: internal, passed by `Encoder(skip_padding=True)` in place of `mask`. Then `inputs` are (1, R, D), the
            R real tokens of a batch; the masks and the bias have the shapes of the padded batch.

    Returns:
        The output (B, T, D); with `return_attention_scores`, a tuple of the output and the scores (B, N, T, T) in
        float32.

    Raises:
        ValueError: for a size, rate or name that is not valid; for a layer as `normalization` or `rotary` that has
            weights already or cannot be made again from its config.

    Reference:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1 (post-norm); Xiong et al. 2020,
        https://arxiv.org/abs/2002.04745 (pre-norm).

    Examples:
        >>> layer = keras_tx.layers.EncoderLayer(intermediate_dim=32, num_heads=4)
        >>> x = np.random.normal(size=(2, 5, 16)).astype("float32")
        >>> tuple(layer(x).shape)
        (2, 5, 16)

        Pre-norm, with a gated feed-forward network, rotary positions and grouped heads:

        >>> layer = keras_tx.layers.EncoderLayer(
        ...     32, 4, normalize_first=True, normalization="rms_norm", activation="silu", gated=True,
        ...     attention_options={"rotary": True, "num_key_value_heads": 2},
        ... )
        >>> outputs, scores = layer(x, return_attention_scores=True)
        >>> tuple(scores.shape)
        (2, 4, 5, 5)

        With a norm of another kind, each with weights of its own:

        >>> layer = keras_tx.layers.EncoderLayer(32, 4, normalization=keras.layers.UnitNormalization())
        >>> y = keras.ops.convert_to_numpy(layer(x))
        >>> np.allclose((y**2).sum(-1), 1, atol=1e-5)
        True
    """

    # Here too, since `inspect.signature` of Python 3.11.0 to 3.11.3 finds `Layer.__new__` before what is inherited.
    __init__ = TransformerLayer.__init__

    def build(self, inputs_shape: Shape) -> None:
        self._check_hidden_dim(inputs_shape)
        self.self_attention_norm = (
            self._make_norm("self_attention_norm", inputs_shape) if self.normalize_inputs else None
        )
        self.self_attention = self._make_attention("self_attention", inputs_shape, inputs_shape)
        self.feed_forward_norm = self._make_norm("feed_forward_norm", inputs_shape)
        self.feed_forward = self._make_feed_forward(inputs_shape)
        self._dropout_layer = self._make_dropout()

    def call(
        self,
        inputs: Tensor,
        mask: Tensor = None,
        attention_mask: Tensor = None,
        attention_bias: Tensor = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        *,
        positions: Tensor = None,
        document_ids: Tensor = None,
        unpadding: Unpadding | None = None,
    ) -> Any:
        mask = mask if unpadding is None else unpadding.mask

        def attend(x: Tensor) -> Any:
            return self.self_attention(
                x,
                x,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                positions=self._of_rotary(positions),
                document_ids=document_ids,
                return_attention_scores=return_attention_scores,
                training=training,
                unpadding=unpadding,
            )

        outputs, *scores = self._residual(inputs, attend, self.self_attention_norm, training)
        outputs = self._feed(outputs, training)
        return (outputs, *scores) if scores else outputs

    def compute_output_spec(
        self, inputs: Tensor, *args: Any, return_attention_scores: bool = False, **kwargs: Any
    ) -> Any:
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        batch, length = inputs.shape[:2]
        scores = keras.KerasTensor((batch, self.num_heads, length, length), dtype=wide_dtype(self.compute_dtype))
        return (outputs, scores) if return_attention_scores else outputs


@keras.saving.register_keras_serializable(package="keras_tx")
class Encoder(TransformerStack):
    """A stack of `EncoderLayer`s. With `normalize_first=True` (pre-norm), a final norm follows the last layer.

    Args:
        num_layers: L, the number of layers.
        intermediate_dim: F, the hidden size inside each feed-forward network; at least `num_heads`.
        num_heads: N, the number of attention heads. D must be divisible by it, unless `attention_options` have a
            `key_dim`.
        dropout, attention_dropout, activation_dropout, activation, gated, use_bias, normalize_first, normalization,
            layer_norm_epsilon, kernel_initializer, bias_initializer: as for `EncoderLayer`, the same for all layers.
        attention_options: as for `EncoderLayer`: one dict for all layers, or a list with one dict for each layer.
        normalize_inputs: as for `EncoderLayer`; it applies to the first layer only.
        position_bias: a bias on the attention logits that depends on the distance between two tokens, shared by all
            layers: "alibi" (`AlibiBias`), "relative" (a learned `RelativePositionBias`), a layer of one of these
            classes, or None. The attribute is the layer, or None.
        remat: whether to use gradient checkpointing (rematerialization): only the inputs of each layer are kept for the
            gradient and the rest is computed again, which saves memory and costs time.
        skip_padding: whether norms, projections and feed-forward networks skip padding tokens, which saves time if a
            batch has many of them. False computes all tokens. True sets the outputs at padding tokens (by `mask`, or by
            0 in `document_ids`) to 0. It saves time on TensorFlow only, where it turns XLA off for the model, and not
            in `generate`. None, the default of this package's models: True within a model of this package that does not
            read the outputs at padding tokens, on TensorFlow with only CPUs and without XLA; False otherwise. When
            padding is skipped, attention is computed within each text if T is static or the model is an export. With
            `sliding_window` or hard attention, and if T is not known, it is computed on rows cut to the length of the
            longest text; with `attention_mask`, `attention_bias`, `positions`, `document_ids` or scores, on the full
            length. The attribute may be changed after construction.

    Call arguments:
        inputs, mask, attention_mask, attention_bias, training, positions, document_ids: as for `EncoderLayer`; all
            layers get the same.
        return_attention_scores: whether to also return the attention scores of all layers.
        return_hidden_states: whether to also return the input of the first layer and the outputs of all layers. The
            output of the last layer is taken after the final norm.

    Returns:
        The output (B, T, D), or a tuple: the output; if requested, the attention scores (B, L, N, T, T) in float32; if
        requested, the hidden states (B, L + 1, T, D).

    Raises:
        ValueError: as for `EncoderLayer`; if a list of `attention_options` does not have `num_layers` dicts; for an
            `activity_regularizer` in a layer with `remat=True` or `skip_padding=True`.

    Reference:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1; ALiBi: Press et al. 2021,
        https://arxiv.org/abs/2108.12409; gradient checkpointing: Chen et al. 2016, https://arxiv.org/abs/1604.06174;
        skipped padding: Zeng et al. 2022, https://arxiv.org/abs/2208.08124.

    Examples:
        >>> encoder = keras_tx.layers.Encoder(num_layers=2, intermediate_dim=32, num_heads=4, dropout=0.1)
        >>> encoder.num_heads, encoder.dropout
        (4, 0.1)
        >>> x = np.random.normal(size=(2, 5, 16)).astype("float32")
        >>> outputs, scores = encoder(x, return_attention_scores=True)
        >>> tuple(outputs.shape), tuple(scores.shape)
        ((2, 5, 16), (2, 2, 4, 5, 5))

        The Keras mask of the input keeps padding out of attention:

        >>> ids = np.array([[3, 5, 0], [7, 8, 9]])
        >>> embedded = keras_tx.layers.TokenEmbedding(11, 16)(ids)
        >>> scores = encoder(embedded, return_attention_scores=True)[1]
        >>> float(keras.ops.max(scores[0, ..., 2]))
        0.0
    """

    layer_class = EncoderLayer

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
        layer_norm_epsilon: float = 1e-5,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        attention_options: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        normalize_inputs: bool = True,
        position_bias: Any = None,
        remat: bool = False,
        skip_padding: bool | None = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_layers,
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
            attention_options=attention_options,
            normalize_inputs=normalize_inputs,
            position_bias=position_bias,
            remat=remat,
            **kwargs,
        )
        self.skip_padding = skip_padding

    @property
    def skip_padding(self) -> bool | None:
        return self._skip_padding

    @skip_padding.setter
    def skip_padding(self, value: bool | None) -> None:
        self._skip_padding: bool | None = checks.flag("skip_padding", value, none=True)
        self.supports_jit = not (value and keras.backend.backend() == "tensorflow")

    def call(
        self,
        inputs: Tensor,
        mask: Tensor = None,
        attention_mask: Tensor = None,
        attention_bias: Tensor = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        *,
        positions: Tensor = None,
        document_ids: Tensor = None,
        return_hidden_states: bool = False,
    ) -> Any:
        attention_bias = self._bias(inputs, attention_bias)
        skips = self._skips()
        if skips:
            mask = masks.join(mask, None if document_ids is None else ops.not_equal(document_ids, 0))
        of_whole_rows = attention_mask, attention_bias, positions, document_ids, return_attention_scores or None
        unpadding = None
        if skips and mask is not None and is_possible():
            unpadding = self._unpadding(inputs, mask, training, can_cut=all(x is None for x in of_whole_rows))
        outputs = inputs if unpadding is None else unpadding.remove(inputs)
        scores, hidden, trace = [], [], SharedTrace()
        for layer in self.layers:
            outputs = self._run(
                layer,
                outputs,
                mask=mask if unpadding is None else None,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                return_attention_scores=return_attention_scores,
                training=training,
                trace=trace,
                positions=positions,
                document_ids=document_ids,
                unpadding=unpadding,
            )
            if return_attention_scores:
                outputs, layer_scores = outputs
                scores.append(layer_scores)
            if return_hidden_states:
                hidden.append(outputs)
        if self.final_norm is not None:
            outputs = self.final_norm(outputs)
        zeroed = mask if skips else None
        outputs = self._padded(outputs, zeroed, unpadding)
        results = [outputs]
        if return_attention_scores:
            results.append(ops.stack(scores, axis=1))
        if return_hidden_states:
            before_last = [self._padded(states, zeroed, unpadding) for states in hidden[:-1]]
            results.append(ops.stack([inputs, *before_last, outputs], axis=1))
        return tuple(results) if len(results) > 1 else outputs

    def _skips(self) -> bool:
        """Whether outputs at padding tokens are 0, and on TensorFlow not computed."""
        if self.skip_padding is None:
            return is_worthwhile() and not checks.regularized_within(self)
        if self.skip_padding:
            checks.unregularized("skip_padding", self)
        return self.skip_padding

    def _unpadding(self, inputs: Tensor, mask: Tensor, training: bool | None, can_cut: bool) -> Unpadding:
        """How to remove the padding. `can_cut`: whether rows may be cut to the longest of them."""
        length, attentions = inputs.shape[1], [layer.self_attention for layer in self.layers]
        # Blockwise attention skips blocks of padding itself, but needs rows of a known length.
        in_blocks = any(uses_blocks(attention, length, length, training) for attention in attentions)
        cut = can_cut and not in_blocks
        # Where the length is unknown, a graph may be converted to ONNX or LiteRT, which cannot divide texts into parts.
        is_export = exported_weights.current() is not None
        divides = cut and (length is not None or is_export) and not traces_for_xla()
        in_parts = [one for one in attentions if divides and can_attend_in_parts(one, training)]
        return Unpadding(mask, inputs, cut, in_parts)

    def _padded(self, outputs: Tensor, zeroed: Tensor | None, unpadding: Unpadding | None) -> Tensor:
        """`outputs` as (B, T, D), with 0 where the mask `zeroed` is False."""
        if unpadding is not None:
            return unpadding.whole(outputs)
        return outputs if zeroed is None else ops.where(ops.cast(zeroed, "bool")[..., None], outputs, 0)

    def compute_output_spec(
        self,
        inputs: Tensor,
        *args: Any,
        return_attention_scores: bool = False,
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        results = [keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)]
        if return_attention_scores:
            batch, length = inputs.shape[:2]
            shape = (batch, self.num_layers, self.num_heads, length, length)
            results.append(keras.KerasTensor(shape, dtype=wide_dtype(self.compute_dtype)))
        if return_hidden_states:
            results.append(self._hidden_spec(inputs))
        return tuple(results) if len(results) > 1 else results[0]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "skip_padding": self.skip_padding}

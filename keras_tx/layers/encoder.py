"""Encoder: (B, T, D) -> (B, T, D), a layer and the stack of layers.

B batch, T tokens, N heads, D hidden, F intermediate, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
"""

import keras
from keras import ops

from keras_tx import checks
from keras_tx.layers import masks
from keras_tx.layers.attention.dispatch import uses_blocks
from keras_tx.layers.transformer import TransformerLayer, TransformerStack
from keras_tx.layers.unpadding import Unpadding, is_possible


@keras.saving.register_keras_serializable(package="keras_tx")
class EncoderLayer(TransformerLayer):
    """Self-attention, then feed-forward, each with a residual connection and a norm.

    Args:
        intermediate_dim: F.
        num_heads: N, a divisor of D unless `attention_options` give a `key_dim`.
        dropout: rate in [0, 1) of dropout on the output of attention and of feed-forward, before the residual sum.
        attention_dropout: rate of dropout on the attention scores; `dropout` if None.
        activation_dropout: rate of dropout inside feed-forward, after the activation.
        activation: of `FeedForward`.
        gated: whether feed-forward is gated.
        use_bias: whether the projections have biases.
        normalize_first: norms before attention and feed-forward (pre-norm) instead of after the sums (post-norm).
        normalization: "layer_norm", "layer_norm_no_bias" (a scale only) or "rms_norm".
        layer_norm_epsilon: of the norms.
        kernel_initializer: of all projections.
        attention_options: dict of further arguments of `MultiHeadAttention`: `key_dim`, `num_key_value_heads`,
            `sliding_window`, `rotary`, `qk_norm`, `scale`, `hard_attention`, ...
        normalize_inputs: with `normalize_first`, whether there is a norm before attention; False where the inputs come
            from a norm already.

    Call arguments:
        inputs: (B, T, D).
        mask: (B, T), True at real tokens. Filled from the Keras mask.
        attention_mask: (B, T, T) or (B, N, T, T), True = may look, joined with `mask`.
        attention_bias: added to the scaled products, shaped as `attention_mask`.
        return_attention_scores: also return the scores.
        training: whether dropout is on.
        positions: (B, T) or (T,) integers for rotary embedding, instead of counting the real tokens.
        document_ids: (B, T) integers: a token sees only those of its own document, by self-attention; 0 is padding.
        unpadding: the `Unpadding` of inputs (1, R, D) that are the real tokens of a batch, in place of `mask`; what
            else is given is of its rows. `Encoder(skip_padding=True)` makes it.

    Returns:
        (B, T, D), or as the inputs, and if asked for the attention scores (B, N, T, T) in float32.

    Raises:
        ValueError: for a size, rate or name that cannot work; the message has the value.
    """

    def build(self, inputs_shape):
        self._check_hidden_dim(inputs_shape)
        self.self_attention_norm, self.self_attention = self._attention(
            "self_attention", inputs_shape, inputs_shape, has_norm=self.normalize_inputs
        )
        self.feed_forward_norm, self.feed_forward = self._feed_forward(inputs_shape)

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        attention_bias=None,
        return_attention_scores=False,
        training=None,
        *,
        positions=None,
        document_ids=None,
        unpadding=None,
    ):
        mask = mask if unpadding is None else unpadding.mask

        def attention(x):
            return self.self_attention(
                x,
                x,
                query_mask=mask,
                value_mask=mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                positions=positions,
                document_ids=document_ids,
                return_attention_scores=return_attention_scores,
                training=training,
                unpadding=unpadding,
            )

        outputs, *scores = self._residual(inputs, "self_attention", attention, training)
        outputs = self._feed(outputs, training)
        return (outputs, *scores) if scores else outputs

    def compute_output_spec(self, inputs, *args, return_attention_scores=False, **kwargs):
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        batch, length = inputs.shape[:2]
        scores = keras.KerasTensor((batch, self.num_heads, length, length), dtype="float32")
        return (outputs, scores) if return_attention_scores else outputs


@keras.saving.register_keras_serializable(package="keras_tx")
class Encoder(TransformerStack):
    """A stack of encoder layers; a pre-norm stack ends with a norm. The width D comes from the input.

    Args:
        num_layers: L.
        num_heads, intermediate_dim, dropout, attention_dropout, activation_dropout, activation, gated, use_bias,
            normalize_first, normalization, layer_norm_epsilon, kernel_initializer: of each `EncoderLayer`.
        attention_options: of each `EncoderLayer`, or a list of one dict for each.
        normalize_inputs: of the first `EncoderLayer`.
        position_bias: None, "alibi", "relative" or a layer, whose bias on the products all layers share:
            `AlibiBias`, or `RelativePositionBias` with its learned table.
        remat: keep only the inputs of each layer for the gradient, and compute the rest again (gradient checkpointing).
        skip_padding: leave padding out of norms, projections and feed-forwards, and attention's rows end where the
            longest of them does, unless a bias, scores or anything else is asked of pairs or positions. Outputs are 0
            at what `mask` or a 0 in `document_ids` says is padding. On TensorFlow, where Keras then does not use XLA;
            on other backends, and in `generate`, only the outputs are set to 0. Can be set later, too.

    Call arguments:
        inputs, mask, attention_mask, attention_bias, training, positions, document_ids: as for
            `EncoderLayer`; each layer gets the same.
        return_attention_scores: also return the scores of all layers.
        return_hidden_states: also return the inputs and the outputs of all layers, the last one after the final norm.

    Returns:
        (B, T, D); if asked for, the attention scores (B, L, N, T, T) in float32, and the hidden states
        (B, L + 1, T, D).

    Raises:
        ValueError: for a `num_layers` that is not positive or not the number of `attention_options`; for an activity
            regularizer with `remat` or `skip_padding`; and as `EncoderLayer`.
    """

    block = EncoderLayer

    def __init__(self, num_layers, num_heads, intermediate_dim, *, skip_padding=False, **kwargs):
        super().__init__(num_layers, num_heads, intermediate_dim, **kwargs)
        self.skip_padding = skip_padding

    @property
    def skip_padding(self):
        return self._skip_padding

    @skip_padding.setter
    def skip_padding(self, value):
        self._skip_padding = checks.one_of("skip_padding", value, (True, False))
        self.supports_jit = not (value and keras.backend.backend() == "tensorflow")

    def call(
        self,
        inputs,
        mask=None,
        attention_mask=None,
        attention_bias=None,
        return_attention_scores=False,
        training=None,
        *,
        positions=None,
        document_ids=None,
        return_hidden_states=False,
    ):
        attention_bias = self._bias(inputs, attention_bias)
        if self.skip_padding:
            checks.unregularized("skip_padding", self)
            mask = masks.join(mask, None if document_ids is None else ops.not_equal(document_ids, 0))
        of_rows = attention_mask, attention_bias, positions, document_ids, return_attention_scores or None
        unpadding = self._unpadding(inputs, mask, training, can_cut=all(x is None for x in of_rows))
        outputs = inputs if unpadding is None else unpadding.remove(inputs)
        scores, hidden = [], []
        for layer in self.layers:
            outputs = self._run(
                layer,
                outputs,
                mask=mask if unpadding is None else None,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                return_attention_scores=return_attention_scores,
                training=training,
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
        outputs = self._padded(outputs, mask, unpadding)
        beside = [ops.stack(scores, axis=1)] if return_attention_scores else []
        if return_hidden_states:
            before_last = [self._padded(one, mask, unpadding) for one in hidden[:-1]]
            beside.append(ops.stack([inputs, *before_last, outputs], axis=1))
        return (outputs, *beside) if beside else outputs

    def _unpadding(self, inputs, mask, training, can_cut):
        if not self.skip_padding or mask is None or not is_possible():
            return None
        length = inputs.shape[1]
        # By blocks attention skips padding itself, where it knows the length.
        in_blocks = any(uses_blocks(layer.self_attention, length, length, training) for layer in self.layers)
        return Unpadding(mask, inputs.shape[:2], cut=can_cut and not in_blocks)

    def _padded(self, outputs, mask, unpadding):
        if unpadding is not None:
            return unpadding.whole(outputs)
        if self.skip_padding and mask is not None:
            return ops.where(ops.cast(mask, "bool")[..., None], outputs, 0)
        return outputs

    def compute_output_spec(self, inputs, *args, return_attention_scores=False, return_hidden_states=False, **kwargs):
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        batch, length = inputs.shape[:2]
        shape = (batch, self.num_layers, self.layers[0].num_heads, length, length)
        beside = [keras.KerasTensor(shape, dtype="float32")] if return_attention_scores else []
        if return_hidden_states:
            beside.append(self._hidden_spec(inputs))
        return (outputs, *beside) if beside else outputs

    def get_config(self):
        return {**super().get_config(), "skip_padding": self.skip_padding}

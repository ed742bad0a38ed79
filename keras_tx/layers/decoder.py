"""Decoder: (B, T, D), memory (B, S, D) -> (B, T, D), a layer and the stack of layers; causal, with or without memory.

B batch, T tokens, S memory tokens, N heads, D hidden, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1;
without memory: Liu et al. 2018, arXiv:1801.10198.
"""

import keras
from keras import ops

from keras_tx.layers import cache as caches
from keras_tx.layers.transformer import TransformerLayer, TransformerStack


@keras.saving.register_keras_serializable(package="keras_tx")
class DecoderLayer(TransformerLayer):
    """Causal self-attention, attention over the memory if there is one, then feed-forward.

    Args:
        intermediate_dim, num_heads, dropout, attention_dropout, activation_dropout, activation, gated, use_bias,
            normalize_first, normalization, layer_norm_epsilon, kernel_initializer, normalize_inputs: as for
            `EncoderLayer`.
        attention_options: dict of further arguments of `MultiHeadAttention`. `rotary` and `sliding_window` are for
            self-attention alone.
        cross_attention: whether the layer attends over a memory, the output of an encoder.

    Call arguments:
        inputs: (B, T, D).
        memory: (B, S, D'), with `cross_attention`.
        mask: (B, T), True at real tokens. Filled from the Keras mask.
        memory_mask: (B, S), True at real tokens of the memory. Filled from its Keras mask.
        attention_mask: (B, T, T) or (B, N, T, T), True = may look, for self-attention, joined with `mask`.
        attention_bias: added to the scaled products of self-attention, shaped as `attention_mask`.
        return_attention_scores: also return the scores.
        training: whether dropout is on.
        positions: (B, T) or (T,) integers for rotary embedding, instead of counting the real tokens.
        document_ids: (B, T) integers: a token sees only those of its own document, by self-attention; 0 is padding.
        cache: of `new_cache`, for decoding step by step: keys and values of this call are written from the slot `start`
            on. `mask` is then (B, slots), the last axis of `attention_mask` and `attention_bias` is slots too, and
            `memory` need not be given.
        start: integer or scalar tensor, the slot of the first token of `inputs`.

    Returns:
        (B, T, D); if asked for, the scores of self-attention (B, N, T, T), and of cross-attention (B, N, T, S), in
        float32; with a `cache` the cache, filled.

    Raises:
        ValueError: for a size, rate or name that cannot work, a memory without `cross_attention` or the reverse.
    """

    def __init__(self, intermediate_dim, num_heads, *, cross_attention=False, **kwargs):
        super().__init__(intermediate_dim, num_heads, **kwargs)
        self.has_cross_attention = cross_attention

    def build(self, inputs_shape, memory_shape=None):
        self._check_hidden_dim(inputs_shape)
        self._check_memory(memory_shape)
        self.self_attention_norm, self.self_attention = self._attention(
            "self_attention", inputs_shape, inputs_shape, has_norm=self.normalize_inputs
        )
        if self.has_cross_attention:
            self.cross_attention_norm, self.cross_attention = self._attention(
                "cross_attention", inputs_shape, memory_shape, without=("rotary", "sliding_window")
            )
        self.feed_forward_norm, self.feed_forward = self._feed_forward(inputs_shape)

    def _check_memory(self, memory):
        if (memory is not None) != self.has_cross_attention:
            rule = "must be given with" if self.has_cross_attention else "needs"
            raise ValueError(
                f"`memory` {rule} `cross_attention=True`. Received: "
                f"memory={memory}, cross_attention={self.has_cross_attention}"
            )

    def new_cache(self, batch_size, num_slots, memory=None):
        """An empty cache for `num_slots` tokens, with the keys and values of `memory` (B, S, D') if there is one."""
        self._check_memory(memory)
        own = self.self_attention.new_cache(batch_size, num_slots)
        return (own,) if memory is None else (own, self.cross_attention.new_memory(memory))

    def call(
        self,
        inputs,
        memory=None,
        mask=None,
        memory_mask=None,
        attention_mask=None,
        attention_bias=None,
        return_attention_scores=False,
        training=None,
        *,
        positions=None,
        document_ids=None,
        cache=None,
        start=None,
    ):
        options = {"return_attention_scores": return_attention_scores, "training": training}
        own_cache, memory_cache = (None, None) if cache is None else (*cache, None)[:2]
        if cache is None:
            self._check_memory(memory)

        def attention(x):
            return self.self_attention(
                x,
                x,
                query_mask=mask if cache is None else None,
                value_mask=mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                use_causal_mask=True,
                positions=positions,
                document_ids=document_ids,
                cache=own_cache,
                start=start,
                **options,
            )

        def cross_attention(x):
            return self.cross_attention(x, memory, value_mask=memory_mask, cache=memory_cache, **options)

        outputs, *beside = self._residual(inputs, "self_attention", attention, training)
        if self.has_cross_attention:
            outputs, *beside_cross = self._residual(outputs, "cross_attention", cross_attention, training)
            beside = [*zip(beside, beside_cross, strict=True)]
        else:
            beside = [(one,) for one in beside]
        outputs = self._feed(outputs, training)
        return _flat(outputs, beside, cache is not None)

    def compute_output_spec(self, inputs, memory=None, *args, return_attention_scores=False, **kwargs):
        self._check_memory(memory)
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return outputs
        batch, length = inputs.shape[:2]
        keys = [length] if memory is None else [length, memory.shape[1]]
        shapes = [(batch, self.num_heads, length, size) for size in keys]
        return (outputs, *[keras.KerasTensor(shape, dtype="float32") for shape in shapes])

    def get_config(self):
        return {**super().get_config(), "cross_attention": self.has_cross_attention}


@keras.saving.register_keras_serializable(package="keras_tx")
class Decoder(TransformerStack):
    """A stack of decoder layers; a pre-norm stack ends with a norm. The width D comes from the input.

    Args:
        num_layers: L.
        num_heads, intermediate_dim, dropout, attention_dropout, activation_dropout, activation, gated, use_bias,
            normalize_first, normalization, layer_norm_epsilon, kernel_initializer: of each `DecoderLayer`.
        attention_options: of each `DecoderLayer`, or a list of one dict for each.
        normalize_inputs: of the first `DecoderLayer`.
        cross_attention: whether the layers attend over a memory, the output of an encoder.
        position_bias: None, "alibi", "relative" or a layer, whose bias on the products of self-attention all layers
            share: `AlibiBias`, or `RelativePositionBias` with its learned table.
        remat: keep only the inputs of each layer for the gradient, and compute the rest again (gradient checkpointing).

    Call arguments:
        inputs, memory, mask, memory_mask, attention_mask, attention_bias, training, positions, document_ids, cache,
            start: as for `DecoderLayer`; each layer gets the same, and of the cache its own part.
        return_attention_scores: also return the scores of all layers.
        return_hidden_states: also return the inputs and the outputs of all layers, the last one after the final norm.

    Returns:
        (B, T, D); if asked for, the scores of self-attention (B, L, N, T, T), and of cross-attention (B, L, N, T, S),
        float32, and the hidden states (B, L + 1, T, D); with a `cache` the cache, filled.

    Raises:
        ValueError: for a `num_layers` that is not positive or not the number of `attention_options`, and as
            `DecoderLayer`.
    """

    block = DecoderLayer
    further_options = ("cross_attention",)
    bidirectional = False

    def __init__(self, num_layers, num_heads, intermediate_dim, *, cross_attention=False, **kwargs):
        super().__init__(num_layers, num_heads, intermediate_dim, cross_attention=cross_attention, **kwargs)
        self.has_cross_attention = cross_attention

    def build(self, inputs_shape, memory_shape=None):
        super().build(inputs_shape, memory_shape)

    def new_cache(self, batch_size, num_slots, memory=None):
        """An empty cache for `num_slots` tokens, with the keys and values of `memory` (B, S, D') if there is one."""
        return tuple(layer.new_cache(batch_size, num_slots, memory) for layer in self.layers)

    def call(
        self,
        inputs,
        memory=None,
        mask=None,
        memory_mask=None,
        attention_mask=None,
        attention_bias=None,
        return_attention_scores=False,
        training=None,
        *,
        positions=None,
        document_ids=None,
        cache=None,
        start=None,
        return_hidden_states=False,
    ):
        slots = {} if cache is None else {"start": start, "num_keys": caches.num_slots(cache)}
        attention_bias = self._bias(inputs, attention_bias, **slots)
        outputs, beside, hidden = inputs, [], [inputs]
        for index, layer in enumerate(self.layers):
            outputs = self._run(
                layer,
                outputs,
                memory=memory,
                mask=mask,
                memory_mask=memory_mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                return_attention_scores=return_attention_scores,
                training=training,
                positions=positions,
                document_ids=document_ids,
                cache=None if cache is None else cache[index],
                start=start,
            )
            outputs, *beside_one = outputs if isinstance(outputs, tuple) else (outputs,)
            beside.append(beside_one)
            if return_hidden_states:
                hidden.append(outputs)
        if self.final_norm is not None:
            outputs = self.final_norm(outputs)
        of_layers = [*zip(*beside, strict=True)]
        scores = of_layers if cache is None else of_layers[:-1]
        stacked = [ops.stack(one, axis=1) for one in scores]
        if return_hidden_states:
            stacked.append(ops.stack([*hidden[:-1], outputs], axis=1))
        if cache is not None:
            return outputs, *stacked, of_layers[-1]
        return (outputs, *stacked) if stacked else outputs

    def compute_output_spec(
        self, inputs, memory=None, *args, return_attention_scores=False, return_hidden_states=False, **kwargs
    ):
        outputs = self.layers[0].compute_output_spec(inputs, memory, return_attention_scores=return_attention_scores)
        outputs, *scores = outputs if return_attention_scores else (outputs,)
        shapes = [(one.shape[0], self.num_layers, *one.shape[1:]) for one in scores]
        beside = [keras.KerasTensor(shape, dtype="float32") for shape in shapes]
        if return_hidden_states:
            beside.append(self._hidden_spec(inputs))
        return (outputs, *beside) if beside else outputs


def _flat(outputs, beside, has_cache):
    """The output, then the scores of self- and of cross-attention, then the cache; the output alone if that is all."""
    scores, cache = (beside[:-1], beside[-1:]) if has_cache else (beside, [])
    beside = [*[one for pair in scores for one in pair], *cache]
    return (outputs, *beside) if beside else outputs

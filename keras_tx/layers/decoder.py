"""`DecoderLayer` and `Decoder`: (B, T, D), optional memory (B, S, D') -> (B, T, D), with causal self-attention.

B batch, T tokens, S memory tokens, N heads, D hidden, L layers. Vaswani et al. 2017, arXiv:1706.03762, section 3.1;
without memory: Liu et al. 2018, arXiv:1801.10198.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_tx import checks
from keras_tx.layers import cache as caches
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.shared_trace import SharedTrace
from keras_tx.layers.transformer import TransformerLayer, TransformerStack
from keras_tx.types import Shape, Tensor

_OF_SELF_ATTENTION = ("rotary", "sliding_window")  # the `attention_options` that are for self-attention only


@keras.saving.register_keras_serializable(package="keras_tx")
class DecoderLayer(TransformerLayer):
    """Causal self-attention, optional cross-attention, then a feed-forward network.

    Each of them has a residual connection and a norm. The argument `cross_attention` is stored as the attribute
    `has_cross_attention`; the attribute `cross_attention` is the attention layer, or None.

    Args:
        intermediate_dim: F, the hidden size inside the feed-forward network; at least `num_heads`.
        num_heads: N, the number of attention heads. D must be divisible by it, unless `attention_options` have a
            `key_dim`.
        cross_attention: whether the layer attends to a memory, the output of an encoder.
        dropout, attention_dropout, activation_dropout, activation, gated, use_bias, normalize_first, normalization,
            layer_norm_epsilon, kernel_initializer, bias_initializer, normalize_inputs: as for `EncoderLayer`.
        attention_options: dict of further arguments of `MultiHeadAttention`, for self-attention and cross-attention.
            `rotary` and `sliding_window` are used by self-attention only.

    Call arguments:
        inputs: (B, T, D): batch, tokens, hidden size.
        memory: (B, S, D'), the output of an encoder; required with `cross_attention`.
        mask: (B, T), True at real tokens. If None, the Keras mask of `inputs` is used.
        memory_mask: (B, S), True at real tokens of the memory. If None, the Keras mask of `memory` is used.
        attention_mask: broadcastable to (B, T, T) or (B, N, T, T), True where a query may attend to a key in
            self-attention. Padding and later keys are always masked out.
        attention_bias: added to the logits of self-attention; broadcastable to (B, T, T) or (B, N, T, T).
        return_attention_scores: whether to also return the attention scores.
        training: whether dropout is on.
        positions: (B, T) or (T,) integers, only read by rotary embedding. If None, real tokens are counted from 0.
        document_ids: (B, T) integers. In self-attention a token attends only to tokens of its own document; 0 marks
            padding.
        cache: the key-value cache from `new_cache`, for decoding step by step. The keys and values of this call are
            stored in its slots from `start` on. With a cache, `mask` is (B, slots), the last axis of `attention_mask`
            and `attention_bias` has one entry for each slot, and `memory` may be left out.
        start: integer or scalar tensor, the slot of the first token of `inputs`.

    Returns:
        The output (B, T, D). With `return_attention_scores` or `cache`, a tuple: the output; if requested, the scores
        of self-attention (B, N, T, T) and those of cross-attention (B, N, T, S), in float32; with a `cache`, the
        updated cache.

    Raises:
        ValueError: for a size, rate or name that is not valid; for a `memory` without `cross_attention`, or none with
            it.

    Reference:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1.

    Examples:
        >>> layer = keras_tx.layers.DecoderLayer(intermediate_dim=32, num_heads=4, cross_attention=True)
        >>> x = np.random.normal(size=(2, 3, 16)).astype("float32")
        >>> memory = np.random.normal(size=(2, 7, 12)).astype("float32")
        >>> outputs, own_scores, cross_scores = layer(x, memory, return_attention_scores=True)
        >>> tuple(outputs.shape), tuple(own_scores.shape), tuple(cross_scores.shape)
        ((2, 3, 16), (2, 4, 3, 3), (2, 4, 3, 7))
    """

    def __init__(
        self,
        intermediate_dim: int,
        num_heads: int,
        *,
        cross_attention: bool = False,
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
        attention_options: dict[str, Any] | None = None,
        normalize_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
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
            **kwargs,
        )
        self.has_cross_attention = checks.flag("cross_attention", cross_attention)
        self.cross_attention: Any = None

    def build(self, inputs_shape: Shape, memory_shape: Shape | None = None) -> None:
        self._check_hidden_dim(inputs_shape)
        self._check_memory(memory_shape)
        self.self_attention_norm = (
            self._make_norm("self_attention_norm", inputs_shape) if self.normalize_inputs else None
        )
        self.self_attention = self._make_attention("self_attention", inputs_shape, inputs_shape)
        if memory_shape is not None:
            self.cross_attention_norm = self._make_norm("cross_attention_norm", inputs_shape)
            self.cross_attention = self._make_attention(
                "cross_attention", inputs_shape, memory_shape, left_out=_OF_SELF_ATTENTION
            )
        self.feed_forward_norm = self._make_norm("feed_forward_norm", inputs_shape)
        self.feed_forward = self._make_feed_forward(inputs_shape)
        self._dropout_layer = self._make_dropout()

    def _check_memory(self, memory: Tensor | Shape | None) -> None:
        if (memory is not None) != self.has_cross_attention:
            rule = "must be given with" if self.has_cross_attention else "needs"
            received = "memory=None" if memory is None else f"memory.shape={tuple(getattr(memory, 'shape', memory))}"
            text = f"`memory` {rule} `cross_attention=True`. Received: {received}"
            raise ValueError(f"{text}, cross_attention={self.has_cross_attention}")

    def new_cache(self, batch_size: int, num_slots: int, memory: Tensor = None) -> tuple[Any, ...]:
        """An empty key-value cache for `num_slots` tokens.

        With `cross_attention=True` it needs `memory` (B, S, D'), and has its keys and values, computed here once.
        """
        self._check_memory(memory)
        checks.built("new_cache", self)
        own = self.self_attention.new_cache(batch_size, num_slots)
        return (own,) if memory is None else (own, self.cross_attention.new_memory(memory))

    def call(
        self,
        inputs: Tensor,
        memory: Tensor = None,
        mask: Tensor = None,
        memory_mask: Tensor = None,
        attention_mask: Tensor = None,
        attention_bias: Tensor = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        *,
        positions: Tensor = None,
        document_ids: Tensor = None,
        cache: tuple[Any, ...] | None = None,
        start: Tensor = None,
    ) -> Any:
        options = {"return_attention_scores": return_attention_scores, "training": training}
        own_cache, memory_cache = (None, None) if cache is None else (*cache, None)[:2]
        if cache is None:
            self._check_memory(memory)

        def attend(x: Tensor) -> Any:
            return self.self_attention(
                x,
                x,
                query_mask=mask if cache is None else None,
                value_mask=mask,
                attention_mask=attention_mask,
                attention_bias=attention_bias,
                use_causal_mask=True,
                positions=self._of_rotary(positions),
                document_ids=document_ids,
                cache=own_cache,
                start=start,
                **options,
            )

        def attend_to_memory(x: Tensor) -> Any:
            return self.cross_attention(x, memory, value_mask=memory_mask, cache=memory_cache, **options)

        outputs, *own_results = self._residual(inputs, attend, self.self_attention_norm, training)
        results = [own_results]  # of each attention: its scores if requested, then its cache if there is one
        if self.has_cross_attention:
            outputs, *cross_results = self._residual(outputs, attend_to_memory, self.cross_attention_norm, training)
            results.append(cross_results)
        outputs = self._feed(outputs, training)
        new_cache = [] if cache is None else [tuple(of_one.pop() for of_one in results)]
        scores = [x for of_one in results for x in of_one]
        return (outputs, *scores, *new_cache) if scores or new_cache else outputs

    def compute_output_spec(
        self, inputs: Tensor, memory: Tensor = None, *args: Any, return_attention_scores: bool = False, **kwargs: Any
    ) -> Any:
        self._check_memory(memory)
        outputs = keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return outputs
        keys = [inputs.shape[1]] if memory is None else [inputs.shape[1], memory.shape[1]]
        shapes = [(inputs.shape[0], self.num_heads, inputs.shape[1], size) for size in keys]
        return (outputs, *[keras.KerasTensor(shape, dtype=wide_dtype(self.compute_dtype)) for shape in shapes])

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "cross_attention": self.has_cross_attention}


@keras.saving.register_keras_serializable(package="keras_tx")
class Decoder(TransformerStack):
    """A stack of `DecoderLayer`s. With `normalize_first=True` (pre-norm), a final norm follows the last layer.

    Args:
        num_layers: L, the number of layers.
        intermediate_dim: F, the hidden size inside each feed-forward network; at least `num_heads`.
        num_heads: N, the number of attention heads. D must be divisible by it, unless `attention_options` have a
            `key_dim`.
        cross_attention: whether the layers attend to a memory, the output of an encoder.
        dropout, attention_dropout, activation_dropout, activation, gated, use_bias, normalize_first, normalization,
            layer_norm_epsilon, kernel_initializer, bias_initializer: as for `EncoderLayer`, the same for all layers.
        attention_options: as for `DecoderLayer`: one dict for all layers, or a list with one dict for each layer.
        normalize_inputs: as for `EncoderLayer`; it applies to the first layer only.
        position_bias: as for `Encoder`: None, "alibi", "relative" or a layer, for self-attention.
        remat: as for `Encoder`: whether to use gradient checkpointing.

    Call arguments:
        inputs, memory, mask, memory_mask, attention_mask, attention_bias, training, positions, document_ids, start: as
            for `DecoderLayer`; all layers get the same.
        cache: the key-value cache from `new_cache`; each layer uses its own part.
        return_attention_scores: whether to also return the attention scores of all layers.
        return_hidden_states: whether to also return the input of the first layer and the outputs of all layers. The
            output of the last layer is taken after the final norm.

    Returns:
        The output (B, T, D), or a tuple: the output; if requested, the scores of self-attention (B, L, N, T, T) and
        those of cross-attention (B, L, N, T, S), in float32; if requested, the hidden states (B, L + 1, T, D); with a
        `cache`, the updated cache.

    Raises:
        ValueError: as for `DecoderLayer`; if a list of `attention_options` does not have `num_layers` dicts; for an
            `activity_regularizer` in a layer with `remat=True`.

    Reference:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.1; without memory: Liu et al. 2018,
        https://arxiv.org/abs/1801.10198.

    Examples:
        A decoder-only stack:

        >>> decoder = keras_tx.layers.Decoder(num_layers=2, intermediate_dim=32, num_heads=4)
        >>> x = np.random.normal(size=(1, 3, 16)).astype("float32")
        >>> whole = decoder(x)
        >>> tuple(whole.shape)
        (1, 3, 16)

        The same token by token, with a key-value cache:

        >>> cache = decoder.new_cache(batch_size=1, num_slots=3)
        >>> for slot in range(3):
        ...     step, cache = decoder(x[:, slot : slot + 1], cache=cache, start=slot)
        >>> np.allclose(step[:, 0], whole[:, 2], atol=1e-5)
        True
    """

    layer_class = DecoderLayer
    bidirectional = False

    def __init__(
        self,
        num_layers: int,
        intermediate_dim: int,
        num_heads: int,
        *,
        cross_attention: bool = False,
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
            layer_options={"cross_attention": cross_attention},
            **kwargs,
        )
        self.cross_attention = self.layers[0].has_cross_attention

    def build(self, inputs_shape: Shape, memory_shape: Shape | None = None) -> None:
        super().build(inputs_shape, memory_shape)

    def new_cache(self, batch_size: int, num_slots: int, memory: Tensor = None) -> tuple[Any, ...]:
        """An empty key-value cache for `num_slots` tokens, one part per layer. See `DecoderLayer.new_cache`."""
        return tuple(layer.new_cache(batch_size, num_slots, memory) for layer in self.layers)

    def call(
        self,
        inputs: Tensor,
        memory: Tensor = None,
        mask: Tensor = None,
        memory_mask: Tensor = None,
        attention_mask: Tensor = None,
        attention_bias: Tensor = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        *,
        positions: Tensor = None,
        document_ids: Tensor = None,
        cache: tuple[Any, ...] | None = None,
        start: Tensor = None,
        return_hidden_states: bool = False,
    ) -> Any:
        slots = {} if cache is None else {"start": start, "num_keys": caches.num_slots(cache)}
        attention_bias = self._bias(inputs, attention_bias, **slots)
        outputs, results, hidden, trace = inputs, [], [inputs], SharedTrace()
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
                trace=trace,
                positions=positions,
                document_ids=document_ids,
                cache=None if cache is None else cache[index],
                start=start,
            )
            outputs, *of_layer = outputs if isinstance(outputs, tuple) else (outputs,)
            results.append(of_layer)
            if return_hidden_states:
                hidden.append(outputs)
        outputs = outputs if self.final_norm is None else self.final_norm(outputs)
        by_kind = [*zip(*results, strict=True)]
        scores = by_kind if cache is None else by_kind[:-1]
        stacked = [ops.stack(of_layers, axis=1) for of_layers in scores]
        if return_hidden_states:
            stacked.append(ops.stack([*hidden[:-1], outputs], axis=1))
        stacked += by_kind[len(scores) :]  # the cache, if there is one
        return (outputs, *stacked) if stacked else outputs

    def compute_output_spec(
        self,
        inputs: Tensor,
        memory: Tensor = None,
        *args: Any,
        return_attention_scores: bool = False,
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        outputs = self.layers[0].compute_output_spec(inputs, memory, return_attention_scores=return_attention_scores)
        results, count = list(outputs) if return_attention_scores else [outputs], self.num_layers
        results[1:] = [keras.KerasTensor((x.shape[0], count, *x.shape[1:]), dtype=x.dtype) for x in results[1:]]
        if return_hidden_states:
            results.append(self._hidden_spec(inputs))
        return tuple(results) if len(results) > 1 else outputs

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "cross_attention": self.cross_attention}

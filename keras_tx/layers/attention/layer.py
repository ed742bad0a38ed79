"""The layer `MultiHeadAttention`: (B, T, D), (B, S, D) -> (B, T, D).

B batch, T queries, S keys, N query heads, K key heads, H head, D model.
Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; gate: Qiu et al. 2025,
arXiv:2505.06708; normalized queries and keys: Henry et al. 2020, arXiv:2010.04245.
"""

from typing import Any

import keras
from keras import constraints, initializers, ops, regularizers

from keras_tx import checks
from keras_tx.internals.keras_models import keep_call_arguments
from keras_tx.layers import cache as caches
from keras_tx.layers.attention import arguments, projections
from keras_tx.layers.attention.axes import attended_axes, fold, unfold, unfold_scores
from keras_tx.layers.attention.dense import attend_cached, can_attend_cached
from keras_tx.layers.attention.dispatch import dispatch_attention
from keras_tx.layers.attention.memory import side_by_side
from keras_tx.layers.attention.parts import attend_in_parts
from keras_tx.layers.attention.projections import make_projection
from keras_tx.layers.configs import Composite, serialized, widened
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.mask_search import find_mask
from keras_tx.layers.masked_layer import convert_inputs
from keras_tx.layers.masks import LARGEST_WINDOW
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.residual import make_norm
from keras_tx.layers.rotary import rotate_heads
from keras_tx.types import Shape, Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class MultiHeadAttention(Composite):
    """`keras.layers.MultiHeadAttention` with grouped-query heads, rotary positions, biases and a key-value cache.

    It takes the arguments of Keras' layer, by the same names and in the same order, and has weights of the same shapes
    in the same order, so it can replace that layer in any model, with `set_weights` or `load_weights`. Three things
    differ: a query that may not attend to any key gets zeros before the output projection, not the mean of all values;
    scores are float32 at least, also in half precision; a mask of a wrong shape is an error.

    Args:
        num_heads: N, the number of query heads.
        key_dim: H, the size of each head of queries and keys.
        value_dim: the size of each head of values; `key_dim` if None.
        dropout: rate in [0, 1) of dropout on the attention scores.
        use_bias: whether the projections have biases.
        output_shape: int or tuple, sizes of the output's feature axes. None: that of the query. The attribute is called
            `output_features`, because `output_shape` has another meaning in Keras.
        attention_axes: int or tuple, the axes to attend over; 0 is the batch. None: all except batch and features.
        sliding_window: a query attends only to keys less than this many positions away, on both sides. None: no limit.
        flash_attention: None uses one of Keras' fused kernels where it gives the same result and is not slower: on
            PyTorch, and on JAX in half precision on NVIDIA GPUs. True requires one, and excludes dropout and scores.
            False uses none. Some kernels cannot be differentiated twice. In training with dropout only PyTorch has
            kernels, for GPUs; they take the random numbers of PyTorch's global generator instead of `seed`.
        kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer, activity_regularizer,
            kernel_constraint, bias_constraint: as in Keras, for each projection. The attribute for
            `activity_regularizer` is `projection_activity_regularizer`.
        use_gate: whether the output of each head is multiplied by the sigmoid of a projection of the query.
        seed: integer, seed of the dropout.
        num_key_value_heads: K, the number of key and value heads, a divisor of `num_heads`; `num_heads` if None. Fewer
            make the key-value cache smaller (grouped-query attention); 1 is multi-query attention.
        scale: the factor applied to the dot products of queries and keys. None: 1 / sqrt(key_dim).
        qk_norm: whether each head of queries and keys is RMS-normalized, with a learned scale (H,), before the product.
        hard_attention: whether, at inference, each query takes only the value of its best key. Training uses softmax.
        rotary: the rotary position embedding of queries and keys: True for a `RotaryEmbedding` with its defaults, a
            `RotaryEmbedding`, or any other Keras layer with `get_config()` and `call(inputs, positions)`: (B, T, N, H)
            -> the same shape, with integer `positions` (B, T) or (T,), or None for 0 to T - 1.
        use_output_bias: whether the output projection has a bias; `use_bias` if None.
        qk_norm_epsilon: a small number that `qk_norm` adds to the mean square.
        blockwise: whether to compute block by block, in memory that grows with T + S instead of T * S. None: if `T * S`
            is at least 4096 * 4096, known statically, and no fused kernel is used. Never with a cache, returned scores,
            `flash_attention=True`, or hard attention at inference.

    Call arguments:
        query: (B, T, D): batch, queries, features. There may be several axes in place of T.
        value: (B, S, Dv), S keys.
        key: (B, S, Dk). None: the same as `value`.
        query_mask, value_mask, key_mask: (B, T), (B, S), (B, S), True at real tokens. By default their Keras masks.
        attention_mask: broadcastable to (B, T, S) or (B, N, T, S), True or 1 where a query may attend to a key.
        return_attention_scores: whether to also return the attention scores.
        training: whether dropout is on.
        use_causal_mask: whether a query may not attend to later keys.
        attention_bias: added to the attention logits, in its own dtype; broadcastable to (B, T, S) or (B, N, T, S).
        positions: (B, T) or (T,) integers, only with `rotary`; also of as many keys, not of a `Memory`. None: counted.
        document_ids: (B, T) integers, or (B, *attended axes), for several documents packed into one sequence: a query
            attends only to its own document. 0 marks padding.
        cache: for decoding step by step. A `KeyValue` from `new_cache`: the keys and values of this call are stored in
            its slots from `start` on, and each query attends to all slots up to its own; S in the shapes of masks and
            bias is the number of slots. Or a `Memory` from `new_memory`, in place of `value` and `key`, which may be
            None.
        start: integer or scalar tensor, the slot of the first query. Only and always with a `KeyValue`.
        unpadding: internal, passed by `Encoder(skip_padding=True)` for self-attention without a cache. The query is
            then (1, R, D), the R real tokens of a batch; masks have the shapes of the padded batch.

    Returns:
        The output (B, T, D). With `return_attention_scores` or `cache`, a tuple: the output; if requested the scores
        (B, N, T, S), in float32 (in float64 under such a policy) and before dropout; with a `cache` the updated cache.

    Raises:
        ValueError: for a size, rate or shape that is not valid, and for arguments that exclude each other.

    Examples:
        >>> layer = keras_tx.layers.MultiHeadAttention(num_heads=4, key_dim=8, num_key_value_heads=2)
        >>> query, value = keras.ops.ones((2, 5, 32)), keras.ops.ones((2, 7, 16))
        >>> output, scores = layer(query, value, return_attention_scores=True)
        >>> tuple(output.shape), tuple(scores.shape)
        ((2, 5, 32), (2, 4, 5, 7))

        Decoding step by step with a cache gives the same output as the full sequence:

        >>> layer = keras_tx.layers.MultiHeadAttention(num_heads=2, key_dim=8, rotary=True)
        >>> x = np.random.default_rng(0).normal(size=(1, 3, 16)).astype("float32")
        >>> whole = layer(x, x, use_causal_mask=True)
        >>> cache, steps = layer.new_cache(batch_size=1, num_slots=3), []
        >>> for t in range(3):
        ...     step, cache = layer(x[:, t : t + 1], x[:, t : t + 1], cache=cache, start=t)
        ...     steps.append(step)
        >>> np.allclose(keras.ops.concatenate(steps, axis=1), whole, atol=1e-5)
        True
    """

    _checks_dense = True

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | tuple[int, ...] | None = None,
        attention_axes: int | tuple[int, ...] | None = None,
        sliding_window: int | None = None,
        flash_attention: bool | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        use_gate: bool = False,
        seed: int | None = None,
        *,
        num_key_value_heads: int | None = None,
        scale: float | None = None,
        qk_norm: bool = False,
        hard_attention: bool = False,
        rotary: Any = None,
        use_output_bias: bool | None = None,
        qk_norm_epsilon: float = 1e-6,
        blockwise: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = checks.positive_int("num_heads", num_heads)
        self.key_dim = checks.positive_int("key_dim", key_dim)
        self.value_dim = checks.positive_int("value_dim", value_dim, none=True) or self.key_dim
        self.dropout = checks.rate("dropout", dropout)
        self.use_bias = checks.flag("use_bias", use_bias)
        self.output_features = arguments.check_output_shape(output_shape)
        self.attention_axes = arguments.check_attention_axes(attention_axes)
        self.sliding_window = checks.positive_int("sliding_window", sliding_window, none=True, most=LARGEST_WINDOW)
        self.flash_attention = checks.flag("flash_attention", flash_attention, none=True)
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        # For the projections: Keras would apply an attribute of the usual name to the output of this layer.
        self.projection_activity_regularizer = regularizers.get(activity_regularizer)
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self.use_gate = checks.flag("use_gate", use_gate)
        self.seed = checks.integer("seed", seed, none=True)
        self.num_key_value_heads = (
            checks.positive_int("num_key_value_heads", num_key_value_heads, none=True) or self.num_heads
        )
        self.scale = scale if scale is None else checks.positive_float("scale", scale)
        self.qk_norm = checks.flag("qk_norm", qk_norm)
        self.hard_attention = checks.flag("hard_attention", hard_attention)
        self.rotary: Any = widened(arguments.make_rotary(rotary), self.compute_dtype)
        use_output_bias = checks.flag("use_output_bias", use_output_bias, none=True)
        self.use_output_bias = self.use_bias if use_output_bias is None else use_output_bias
        self.qk_norm_epsilon = checks.positive_float("qk_norm_epsilon", qk_norm_epsilon)
        self.blockwise = checks.flag("blockwise", blockwise, none=True)
        keep_call_arguments(self)  # `convert_inputs` makes them tensors
        arguments.check_options(self)

    def build(self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None) -> None:
        if self.rotary is not None and self.attention_axes not in (None, (1,)):
            raise ValueError(f"`rotary` needs `attention_axes=1`. Received: attention_axes={self.attention_axes}")
        key_shape = value_shape if key_shape is None else key_shape
        arguments.check_shapes(query_shape, value_shape, key_shape)
        key_heads, bias = self.num_key_value_heads, self.use_bias
        self.query_dense = make_projection(self, "query", query_shape, (self.num_heads, self.key_dim), use_bias=bias)
        self.key_dense = make_projection(self, "key", key_shape, (key_heads, self.key_dim), use_bias=bias)
        if self.use_gate:
            gated = (self.num_heads, self.value_dim)
            self._gate_dense = make_projection(self, "gate", query_shape, gated, activation="sigmoid", use_bias=bias)
        self.value_dense = make_projection(self, "value", value_shape, (key_heads, self.value_dim), use_bias=bias)
        features = self.output_features or (query_shape[-1],)
        values_shape = (*query_shape[:-1], self.num_heads, self.value_dim)
        self.output_dense = make_projection(
            self, "attention_output", values_shape, features, num_axes=2, use_bias=self.use_output_bias
        )
        if self.qk_norm:
            self.query_norm = make_norm("rms_norm", self.qk_norm_epsilon, dtype=self.dtype_policy, name="query_norm")
            self.key_norm = make_norm("rms_norm", self.qk_norm_epsilon, dtype=self.dtype_policy, name="key_norm")
            self.query_norm.build((None, self.key_dim))
            self.key_norm.build((None, self.key_dim))
        if self.rotary is not None and not self.rotary.built:
            self.rotary.build((*query_shape[:-1], self.num_heads, self.key_dim))
        self._dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy, seed=self.seed)

    def __call__(self, query: Tensor, value: Any = None, key: Any = None, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(_POSITIONAL):
            raise TypeError(
                "Arguments after `attention_mask` must be given by name. Received: "
                f"{len(args) + 3} arguments by position"
            )
        kwargs.update(zip(_POSITIONAL, args, strict=False))
        caches.check_cache(kwargs.get("cache"), [query, value, key, kwargs], depth=0)
        arguments.check_call(self, query, value, key, kwargs)
        if not ops.is_tensor(kwargs.get("use_causal_mask")):  # an eager one, whose value Python reads
            checks.flag("use_causal_mask", kwargs.get("use_causal_mask"), none=True)
        for name, tensor in (("query_mask", query), ("value_mask", value), ("key_mask", key)):
            if isinstance(tensor, keras.KerasTensor) and kwargs.get(name) is None:
                kwargs[name] = find_mask(tensor, self, name)
        kwargs = convert_inputs(self, {"query": query, "value": value, "key": key, **kwargs})
        if kwargs.get("cache") is not None:
            arguments.mask_slots(kwargs)
        return super().__call__(kwargs.pop("query"), kwargs.pop("value"), kwargs.pop("key"), **kwargs)

    def new_cache(self, batch_size: int, num_slots: int) -> caches.KeyValue:
        """An empty cache: (key, value), zeros (B, K, num_slots, key_dim) and (B, K, num_slots, value_dim)."""
        shape = (batch_size, self.num_key_value_heads, num_slots)
        return caches.KeyValue(*[ops.zeros((*shape, n), self.compute_dtype) for n in (self.key_dim, self.value_dim)])

    def new_memory(self, value: Tensor, key: Tensor | None = None) -> caches.Memory:
        """Keys and values of a source `value` (B, S, D), computed once for all decode steps of cross-attention."""
        return caches.Memory(*[ops.swapaxes(x, 1, 2) for x in projections.project_keys_and_values(self, value, key)])

    def call(
        self,
        query: Tensor,
        value: Tensor | None = None,
        key: Tensor | None = None,
        query_mask: Tensor | None = None,
        value_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
        *,
        attention_bias: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: Any = None,
        start: Any = None,
        unpadding: Any = None,
    ) -> Any:
        start = arguments.slot(start)
        memory = cache if isinstance(cache, (caches.Memory, caches.SharedMemory)) else None
        arguments.check_cache(cache, start, unpadding)
        gate = self._gate_dense(query) if self.use_gate else None
        length = query.shape[1] if isinstance(cache, caches.SharedMemory) else None
        if memory is not None:
            others = attention_mask, attention_bias, document_ids, self.rotary, self.sliding_window
            can_share = all(x is None for x in others) and not (use_causal_mask or return_attention_scores)
            query, cache, query_mask, (value_mask, key_mask) = side_by_side(
                projections.project_queries(self, query), memory, query_mask, (value_mask, key_mask), can_share
            )
            key, value = (ops.swapaxes(x, 1, 2) for x in cache)
        else:
            query, key, value = projections.project_all(self, query, value, key)
        parts = None if unpadding is None else unpadding.parts_of(self, training)
        if parts is not None:
            positions = parts.positions[None]
        elif unpadding is not None:
            query, key, value = unpadding.rows(query, key, value)
        if self.rotary is not None:
            own_keys = memory is not None or (start is None and query.shape[1] != key.shape[1])  # without `positions`
            real = None, None  # masks by which positions are counted
            if positions is None or own_keys:
                real = arguments.real_tokens(query, key, query_mask, value_mask, document_ids, start)
            rotated = rotate_heads(self.rotary, query, key, (positions, None if own_keys else positions), *real, start)
            query, key = (ops.cast(x, self.compute_dtype) for x in rotated)
        if parts is not None:
            dropout = (lambda x: self._dropout_layer(x, training=training)) if self.dropout else None
            output = attend_in_parts(query, key, value, parts, scale=self.scale, dropout=dropout)
            return self._project(output, gate)
        if start is not None:
            key_mask = None  # Keras may have filled it, for the keys of this call; `value_mask` is for all slots
            cache = caches.write(cache, caches.heads_first(key), caches.heads_first(value), start)
            if isinstance(start, int) and start == 0 and not return_attention_scores:
                # Prefill: the cache was empty, so the queries look only at the keys of this call.
                value_mask, attention_mask, attention_bias = (
                    None if x is None else x[..., : ops.shape(key)[1]]
                    for x in (value_mask, attention_mask, attention_bias)
                )
            else:
                key, value = (ops.swapaxes(x, 1, 2) for x in cache)
        axes = attended_axes(self.attention_axes, len(query.shape) - 1)
        visible = arguments.visible_keys(
            query,
            key,
            axes,
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            document_ids=document_ids,
            causal=use_causal_mask or start is not None,
            window=self.sliding_window,
            start=0 if start is None else start,
        )
        bias = None if attention_bias is None else arguments.folded_bias(attention_bias, query, key, axes)
        is_plain = not (return_attention_scores or training or self.flash_attention or self.hard_attention)
        rotates = memory is not None and self.rotary is not None  # the keys, which those in the memory are not
        if cache is not None and is_plain and not rotates and can_attend_cached(length or query.shape[1], axes, start):
            output = attend_cached(query, cache, visible, bias=bias, scale=self.scale)
            return self._project(output, gate, length), memory or cache
        output, scores = dispatch_attention(
            self,
            (fold(query, axes), fold(key, axes), fold(value, axes)),
            visible,
            bias=bias,
            allow_blocks=cache is None and not return_attention_scores,
            return_attention_scores=return_attention_scores,
            training=training,
        )
        output = unfold(output, query, axes)
        if unpadding is not None:
            output = unpadding.remove(output)
        outputs = [self._project(output, gate, length)]
        if return_attention_scores:
            outputs.append(unfold_scores(scores, query, key, axes))
        if cache is not None:
            outputs.append(memory or cache)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _project(self, output: Tensor, gate: Tensor | None, length: int | None = None) -> Tensor:
        if length is not None:  # of queries, whose rows were put side by side
            output = ops.reshape(output, (-1, length, *output.shape[2:]))
        return self.output_dense(output if gate is None else output * gate)

    def compute_output_shape(self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None) -> Shape:
        arguments.check_shapes(query_shape, value_shape, value_shape if key_shape is None else key_shape)
        return (*query_shape[:-1], *(self.output_features or query_shape[-1:]))

    def compute_output_spec(
        self, query: Any, value: Any, key: Any = None, *args: Any, return_attention_scores: bool = False, **kwargs: Any
    ) -> Any:
        shape = self.compute_output_shape(query.shape, value.shape, None if key is None else key.shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        axes = attended_axes(self.attention_axes, len(query.shape))
        free = [size for axis, size in enumerate(query.shape[:-1]) if axis not in axes]
        sides = [side.shape[axis] for side in (query, value) for axis in axes]
        return output, keras.KerasTensor((*free, self.num_heads, *sides), dtype=wide_dtype(self.compute_dtype))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "output_shape": self.output_features,
            "attention_axes": self.attention_axes,
            "sliding_window": self.sliding_window,
            "flash_attention": self.flash_attention,
            "kernel_initializer": initializers.serialize(self.kernel_initializer),
            "bias_initializer": initializers.serialize(self.bias_initializer),
            "kernel_regularizer": regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": regularizers.serialize(self.projection_activity_regularizer),
            "kernel_constraint": constraints.serialize(self.kernel_constraint),
            "bias_constraint": constraints.serialize(self.bias_constraint),
            "use_gate": self.use_gate,
            "seed": self.seed,
            "num_key_value_heads": self.num_key_value_heads,
            "scale": self.scale,
            "qk_norm": self.qk_norm,
            "hard_attention": self.hard_attention,
            "rotary": serialized(self.rotary),
            "use_output_bias": self.use_output_bias,
            "qk_norm_epsilon": self.qk_norm_epsilon,
            "blockwise": self.blockwise,
        }


_POSITIONAL = ("query_mask", "value_mask", "key_mask", "attention_mask")  # what Keras takes by position after `key`

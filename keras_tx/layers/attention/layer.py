"""Multi-head attention, the layer: (B, T, D), (B, S, D) -> (B, T, D).

B batch, T queries, S keys, N query heads, K key heads, H head, D model.
Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; gate: Qiu et al. 2025,
arXiv:2505.06708; normalized queries and keys: Henry et al. 2020, arXiv:2010.04245.
"""

import string

import keras
from keras import constraints, initializers, ops, regularizers

from keras_tx import checks
from keras_tx.keras_internals import keep_call_arguments
from keras_tx.layers import cache as caches
from keras_tx.layers import masks
from keras_tx.layers.attention import axes as folding
from keras_tx.layers.attention.arguments import axes_of, check_aligned, feature_sizes, rotary_layer
from keras_tx.layers.attention.dense import attend_stored, takes_stored
from keras_tx.layers.attention.dispatch import compute_attention
from keras_tx.layers.configs import Composite, serialized
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.initializers import fresh
from keras_tx.layers.projection import HeadProjection
from keras_tx.layers.residual import make_norm


@keras.saving.register_keras_serializable(package="keras_tx")
class MultiHeadAttention(Composite):
    """`keras.layers.MultiHeadAttention` with grouped heads, biases and scores under every mask.

    Takes the arguments of Keras' layer, by the same names and in the same order, and holds its weights in the same
    order and shapes, so it can replace that layer in any model, with `set_weights` or `load_weights`. It differs in
    this: a query that may look at nothing gets zeros before the output projection, in Keras the mean of all values.

    Args:
        num_heads: N, the number of query heads.
        key_dim: H, the size of a head of queries and keys.
        value_dim: the size of a head of values; `key_dim` if None.
        dropout: rate in [0, 1) of dropout on the scores.
        use_bias: whether the projections have biases.
        output_shape: int or tuple, the feature axes of the output; as the query if None.
        attention_axes: the axes to attend over, batch counted; all but batch and features if None.
        sliding_window: a query looks only at keys less than this many positions away, on both sides.
        flash_attention: True takes Keras' fused kernel (JAX and PyTorch; no dropout, no scores), or raises. None takes
            one where it computes the same and takes no longer, on PyTorch, and on JAX in half precision in programs
            for NVIDIA GPUs; its gradient has no gradient on every device. False never does.
        kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer, activity_regularizer,
            kernel_constraint, bias_constraint: for each projection.
        use_gate: multiply the heads' outputs by the sigmoid of a projection of the query.
        seed: of the dropout.
        num_key_value_heads: K, a divisor of `num_heads`; `num_heads` if None. 1 is multi-query attention.
        scale: factor of the products of queries and keys; 1 / sqrt(key_dim) if None.
        qk_norm: RMS-normalize each head of queries and keys, with a learned scale (H,), before the products.
        hard_attention: at inference each query takes the value of its best key alone; training stays soft.
        rotary: a `RotaryEmbedding` of queries and keys, or True for one with the default arguments.
        use_output_bias: whether the output projection has a bias; as `use_bias` if None.
        qk_norm_epsilon: of `qk_norm`.
        blockwise: whether attention goes block by block, in memory that grows with T + S; None: where T * S is
            4096 * 4096 or more, known when the graph is made, and no fused kernel is taken, whose memory grows so too.
            With a cache and where scores are asked for it does not.

    Call arguments:
        query: (B, T, D), or more axes in place of T.
        value: (B, S, Dv).
        key: (B, S, Dk); `value` if None.
        query_mask, value_mask, key_mask: (B, T), (B, S), (B, S), True at real tokens. Filled from the Keras masks.
        attention_mask: (B, T, S), or whatever broadcasts to (B, N, T, S) with the head axis left out or in. True or 1 =
            may look.
        return_attention_scores: also return the scores.
        training: whether dropout is on.
        use_causal_mask: a query looks at no later key.
        attention_bias: added to the scaled products, shaped as `attention_mask`; stays in the dtype it has.
        positions: (B, T) or (T,) integers for `rotary`; the real tokens are counted if None.
        document_ids: (B, T) integers, or (B, *attended axes): a query sees only keys of its document; 0 is padding.
        cache: for decoding step by step. A `KeyValue` of `new_cache`: keys and values of this call are written from
            the slot `start` on, and the queries look at all slots up to their own; S of the masks and of the bias is
            then the number of slots. Or the `Memory` of `new_memory`: used in place of `value` and `key`, which may be
            None.
        start: integer or scalar tensor, the slot of the first query.
        unpadding: the `Unpadding` that `Encoder(skip_padding=True)` makes, of a query (1, R, D) that is the real tokens
            of a batch, and its own value, without a cache; the masks are those of its rows.

    Returns:
        (B, T, D), and if asked for the scores (B, N, T, S) in float32, as they were before dropout, and with a `cache`
        that cache, filled.

    Raises:
        ValueError: for a size, rate, shape or combination that cannot work; the message has the value.
    """

    def __init__(
        self,
        num_heads,
        key_dim,
        value_dim=None,
        dropout=0.0,
        use_bias=True,
        output_shape=None,
        attention_axes=None,
        sliding_window=None,
        flash_attention=None,
        kernel_initializer="glorot_uniform",
        bias_initializer="zeros",
        kernel_regularizer=None,
        bias_regularizer=None,
        activity_regularizer=None,
        kernel_constraint=None,
        bias_constraint=None,
        use_gate=False,
        seed=None,
        *,
        num_key_value_heads=None,
        scale=None,
        qk_norm=False,
        hard_attention=False,
        rotary=None,
        use_output_bias=None,
        qk_norm_epsilon=1e-6,
        blockwise=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.num_heads = checks.positive_int("num_heads", num_heads)
        self.key_dim = checks.positive_int("key_dim", key_dim)
        self.value_dim = checks.positive_int("value_dim", value_dim, none=True) or self.key_dim
        self.dropout = checks.rate("dropout", dropout)
        self.use_bias = use_bias
        self.output_features = feature_sizes(output_shape)  # Keras models read `output_shape` as something else
        self.attention_axes = axes_of(attention_axes)
        self.sliding_window = checks.positive_int("sliding_window", sliding_window, none=True)
        self.flash_attention = flash_attention
        self.kernel_initializer = initializers.get(kernel_initializer)
        self.bias_initializer = initializers.get(bias_initializer)
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self._activity_regularizer = regularizers.get(activity_regularizer)  # of the projections, not of this layer
        self.kernel_constraint = constraints.get(kernel_constraint)
        self.bias_constraint = constraints.get(bias_constraint)
        self.use_gate = use_gate
        self.seed = seed
        self.num_key_value_heads = (
            checks.positive_int("num_key_value_heads", num_key_value_heads, none=True) or self.num_heads
        )
        self.scale = scale if scale is None else checks.positive_float("scale", scale)
        self.qk_norm = qk_norm
        self.hard_attention = hard_attention
        self.rotary = rotary_layer(rotary)
        self.use_output_bias = use_bias if use_output_bias is None else use_output_bias
        self.qk_norm_epsilon = checks.positive_float("qk_norm_epsilon", qk_norm_epsilon)
        self.blockwise = checks.one_of("blockwise", blockwise, (None, True, False))
        keep_call_arguments(self)  # `masks.converted` makes them tensors
        if num_heads % self.num_key_value_heads:
            raise ValueError(
                "`num_heads` must be divisible by `num_key_value_heads`. Received: "
                f"num_heads={num_heads}, num_key_value_heads={num_key_value_heads}"
            )
        if flash_attention and (dropout or hard_attention):
            raise ValueError(
                "Dropout is not supported when flash attention is enabled. Nor is hard attention. Received: "
                f"flash_attention={flash_attention}, dropout={dropout}, hard_attention={hard_attention}"
            )

    def build(self, query_shape, value_shape, key_shape=None):
        if self.rotary is not None and self.attention_axes not in (None, (1,)):
            raise ValueError(f"`rotary` needs the attention axis 1. Received: attention_axes={self.attention_axes}")
        key_shape = value_shape if key_shape is None else key_shape
        check_aligned(value_shape, key_shape)
        self.query_dense = self._projection("query", query_shape, (self.num_heads, self.key_dim))
        self.key_dense = self._projection("key", key_shape, (self.num_key_value_heads, self.key_dim))
        if self.use_gate:
            self._gate_dense = self._projection("gate", query_shape, (self.num_heads, self.value_dim), "sigmoid")
        self.value_dense = self._projection("value", value_shape, (self.num_key_value_heads, self.value_dim))
        heads_shape = (*query_shape[:-1], self.num_heads, self.value_dim)
        features = self.output_features or (query_shape[-1],)
        self.output_dense = self._projection(
            "attention_output", heads_shape, features, bound=2, bias=self.use_output_bias
        )
        if self.qk_norm:
            self.query_norm = make_norm("rms_norm", self.qk_norm_epsilon, dtype=self.dtype_policy, name="query_norm")
            self.key_norm = make_norm("rms_norm", self.qk_norm_epsilon, dtype=self.dtype_policy, name="key_norm")
            self.query_norm.build((None, self.key_dim))
            self.key_norm.build((None, self.key_dim))
        self._dropout_layer = Dropout(self.dropout, dtype=self.dtype_policy, seed=self.seed)

    def _projection(self, name, input_shape, features, activation=None, bound=1, bias=None):
        """A dense layer from the last `bound` axes of its input to `features`; `bias` as `use_bias` if None."""
        free, summed, made = _letters(len(input_shape) - bound, bound, len(features))
        layer = HeadProjection(
            f"{free}{summed},{summed}{made}->{free}{made}",
            output_shape=(*[None] * (len(free) - 1), *features),
            activation=activation,
            bias_axes=made if (self.use_bias if bias is None else bias) else None,
            kernel_initializer=fresh(self.kernel_initializer),  # a shared one would fill all kernels alike
            bias_initializer=fresh(self.bias_initializer),
            kernel_regularizer=self.kernel_regularizer,
            bias_regularizer=self.bias_regularizer,
            activity_regularizer=self._activity_regularizer,
            kernel_constraint=self.kernel_constraint,
            bias_constraint=self.bias_constraint,
            dtype=self.dtype_policy,
            name=name,
        )
        layer.supports_masking = True  # else it warns about the mask that it is not responsible for
        layer.build(input_shape)
        return layer

    def __call__(self, query, value=None, key=None, *args, **kwargs):
        if len(args) > len(_POSITIONAL):
            raise TypeError(
                "Arguments behind `attention_mask` must be given by name. Received: "
                f"{len(args) + 3} arguments by position"
            )
        kwargs.update(zip(_POSITIONAL, args, strict=False))
        for name, tensor in (("query_mask", query), ("value_mask", value), ("key_mask", key)):
            mask = masks.mask_of(tensor) if kwargs.get(name) is None else None
            if mask is not None:
                kwargs[name] = mask
        kwargs = masks.converted(self, {"query": query, "value": value, "key": key, **kwargs})
        if kwargs.get("cache") is not None and kwargs.get("value_mask") is None:
            kwargs["value_mask"] = masks.all_real(kwargs["cache"].key)  # else Keras would take that of the queries
        return super().__call__(kwargs.pop("query"), kwargs.pop("value"), kwargs.pop("key"), **kwargs)

    def new_cache(self, batch_size, num_slots):
        """An empty `KeyValue`: (B, K, S, H) and (B, K, S, V), zeros in the compute dtype."""
        shape = (batch_size, self.num_key_value_heads, num_slots)
        return caches.KeyValue(
            *[ops.zeros((*shape, size), self.compute_dtype) for size in (self.key_dim, self.value_dim)]
        )

    def new_memory(self, value, key=None):
        """The `Memory` of `value` (B, S, D): its keys and values, to be computed once and used in every step."""
        return caches.Memory(*[ops.swapaxes(x, 1, 2) for x in self._keys_and_values(value, key)])

    def _keys_and_values(self, value, key):
        key = self.key_dense(value if key is None else key)
        return self.key_norm(key) if self.qk_norm else key, self.value_dense(value)

    def call(
        self,
        query,
        value=None,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
        *,
        attention_bias=None,
        positions=None,
        document_ids=None,
        cache=None,
        start=None,
        unpadding=None,
    ):
        is_memory = isinstance(cache, caches.Memory)
        if isinstance(cache, caches.KeyValue) != (start is not None):
            raise ValueError(
                "`start` must be given with a `cache` that grows, and not without. Received: "
                f"start={start}, cache of type {type(cache).__name__}"
            )
        if unpadding is not None and cache is not None:
            raise ValueError(f"`unpadding` does not go with a `cache`. Received: cache of type {type(cache).__name__}")
        gate = self._gate_dense(query) if self.use_gate else None
        key, value = (ops.swapaxes(x, 1, 2) for x in cache) if is_memory else self._keys_and_values(value, key)
        query = self.query_dense(query)
        if self.qk_norm:
            query = self.query_norm(query)
        if unpadding is not None:
            query, key, value = (unpadding.rows(x) for x in (query, key, value))
        if self.rotary is not None:
            query, key = self._rotate(query, key, positions, query_mask, value_mask, start)
        if start is not None:
            key_mask = None  # that of the keys of this call, if Keras filled it; `value_mask` is over all slots
            cache = caches.write(cache, caches.as_stored(key), caches.as_stored(value), start)
            if isinstance(start, int) and start == 0 and not return_attention_scores:
                # An empty cache: nobody looks at other keys than those that this call brings.
                value_mask, attention_mask, attention_bias = (
                    None if x is None else x[..., : ops.shape(key)[1]]
                    for x in (value_mask, attention_mask, attention_bias)
                )
            else:
                key, value = (ops.swapaxes(x, 1, 2) for x in cache)
        axes = folding.attention_axes(self.attention_axes, len(query.shape) - 1)
        visible = masks.for_attention(
            query,
            key,
            axes,
            query_mask,
            value_mask,
            key_mask,
            attention_mask,
            document_ids,
            causally=use_causal_mask or start is not None,
            sliding_window=self.sliding_window,
            start=0 if start is None else start,
        )
        bias = (
            None if attention_bias is None else folding.fold_pairs("attention_bias", attention_bias, query, key, axes)
        )
        if cache is not None and takes_stored(self, query, axes, return_attention_scores or training):
            output = attend_stored(query, cache, visible, bias=bias, scale=self.scale)
            return self.output_dense(output if gate is None else output * gate), cache
        heads = [folding.fold(x, axes) for x in (query, key, value)]
        output, scores = compute_attention(
            self,
            heads,
            visible,
            bias=bias,
            in_blocks=cache is None and not return_attention_scores,
            return_attention_scores=return_attention_scores,
            training=training,
        )
        output = folding.unfold(output, query, axes)
        if unpadding is not None:
            output = unpadding.remove(output)
        outputs = [self.output_dense(output if gate is None else output * gate)]
        if return_attention_scores:
            outputs.append(folding.unfold_scores(scores, query, key, axes))
        if cache is not None:
            outputs.append(cache)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _rotate(self, query, key, positions, query_mask, value_mask, start):
        """Queries and keys, rotated by their positions; with a cache (`start`) these keys are those of the queries."""
        query_positions = key_positions = positions
        if positions is None and start is not None:
            counted = masks.positions(value_mask)
            query_positions = key_positions = ops.slice(counted, (0, start), (ops.shape(counted)[0], query.shape[1]))
        elif positions is None:
            query_positions = None if query_mask is None else masks.positions(query_mask)
            key_positions = None if value_mask is None else masks.positions(value_mask)
        rotated = self.rotary(query, query_positions), self.rotary(key, key_positions)
        return [ops.cast(x, self.compute_dtype) for x in rotated]

    def compute_output_shape(self, query_shape, value_shape, key_shape=None):
        check_aligned(value_shape, value_shape if key_shape is None else key_shape)
        return (*query_shape[:-1], *(self.output_features or query_shape[-1:]))

    def compute_output_spec(self, query, value, key=None, *args, return_attention_scores=False, **kwargs):
        shape = self.compute_output_shape(query.shape, value.shape, None if key is None else key.shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        axes = folding.attention_axes(self.attention_axes, len(query.shape))
        free = [size for axis, size in enumerate(query.shape[:-1]) if axis not in axes]
        sides = [side.shape[axis] for side in (query, value) for axis in axes]
        return output, keras.KerasTensor((*free, self.num_heads, *sides), dtype="float32")

    def get_config(self):
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
            "activity_regularizer": regularizers.serialize(self._activity_regularizer),
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


_POSITIONAL = ("query_mask", "value_mask", "key_mask", "attention_mask")  # what Keras lets stand behind `key`


def _letters(*counts):
    """Runs of different einsum letters, of the given lengths."""
    letters = iter(string.ascii_letters)
    return ["".join(next(letters) for _ in range(count)) for count in counts]

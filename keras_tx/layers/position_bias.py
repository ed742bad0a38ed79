"""Relative position biases: lengths T and S -> (1, N, T, S), to be added to the attention logits.

T queries, S keys, N heads.
AlibiBias: Press et al. 2022, arXiv:2108.12409; RelativePositionBias: Raffel et al. 2020, arXiv:1910.10683 (T5).
"""

import math
from numbers import Integral
from typing import Any

import keras
import numpy as np
from keras import initializers, ops

from keras_tx import checks
from keras_tx.layers.configs import StrictLayer
from keras_tx.layers.ids import check_integers, take_rows
from keras_tx.layers.precision import wide_dtype
from keras_tx.types import Shape, Tensor


class PositionBias(StrictLayer):
    """Base class of position biases. A subclass defines `bias`, from distances (T, S) to a bias (N, T, S).

    Call `layer(query)` or `layer(query, key)` for whole sequences. In a decode step `layer(x, start=..., num_keys=...)`
    gives the same rows, for queries in the slots `start`, `start + 1`, ... of a key-value cache. Only distances matter,
    so padding at either end changes nothing; but padding between tokens, as after prompts that are padded on the right,
    increases distances. Compute the bias once and pass it as `attention_bias` to every layer.
    """

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.autocast = False  # only the lengths of query and key matter, so they need no cast
        self.num_heads = checks.positive_int("num_heads", num_heads)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def call(self, query: Tensor, key: Tensor | None = None, *, start: Any = None, num_keys: Any = None) -> Tensor:
        start, num_keys = _check_slots(query, key, start, num_keys)
        queries = start + ops.arange(ops.shape(query)[1], dtype="int32")
        num_keys = ops.shape(query if key is None else key)[1] if num_keys is None else num_keys
        keys = ops.arange(num_keys, dtype="int32")
        return ops.expand_dims(self.bias(ops.expand_dims(keys, 0) - ops.expand_dims(queries, 1)), 0)

    @property
    def _bias_dtype(self) -> str:
        return wide_dtype(self.compute_dtype)

    def bias(self, relative: Tensor) -> Tensor:
        """Distances (T, S), key position minus query position -> bias (N, T, S)."""
        raise NotImplementedError(f"{type(self).__name__} must have a method `bias`.")

    def compute_output_spec(self, query: Any, key: Any = None, *, start: Any = None, num_keys: Any = None) -> Any:
        _, num_keys = _check_slots(query, key, start, num_keys)
        keys = num_keys or (query if key is None else key).shape[1]
        return keras.KerasTensor((1, self.num_heads, query.shape[1], keys), dtype=self._bias_dtype)

    def compute_output_shape(self, query_shape: Shape, key_shape: Shape | None = None) -> Shape:
        return (1, self.num_heads, query_shape[1], (query_shape if key_shape is None else key_shape)[1])

    def compute_mask(self, inputs: Tensor, previous_mask: Tensor | None = None) -> None:
        return None  # the mask of the query does not fit (1, N, T, S)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "num_heads": self.num_heads}


@keras.saving.register_keras_serializable(package="keras_tx")
class AlibiBias(PositionBias):
    """ALiBi: a bias of minus the distance between query and key, times a fixed slope for each head.

    It has no weights and works for any length. Distances to both sides count alike; with a causal mask, which hides
    later keys, this is the bias of the paper.

    Args:
        num_heads: N, the number of attention heads. The slopes are 2^(-8/N), 2^(-16/N), ... if N is a power of two,
            otherwise those of the code that the paper's authors published.
        alibi_bias_max: the 8 in these slopes: the smallest slope is 2^(-alibi_bias_max).

    Call arguments:
        query: (B, T, D), of which only the length T matters.
        key: (B, S, D), of which only the length S matters; `query` if None.
        start: integer or scalar integer tensor, the index of the first query among the S keys; 0 if None. In a decode
            step also give `num_keys`, otherwise there are only as many keys as queries.
        num_keys: S, the number of slots of a key-value cache, instead of a `key`.

    Returns:
        (1, N, T, S) in float32, or in float64 under such a policy, to be added to the attention logits.

    Raises:
        ValueError: for sizes that are not positive, a `start` that is not a scalar integer, queries outside the slots,
            or both `key` and `num_keys`.

    Reference:
        Press et al. 2022, arXiv:2108.12409.

    Examples:
        >>> bias = keras_tx.layers.AlibiBias(num_heads=8)(keras.ops.ones((1, 3, 16)))
        >>> print(keras.ops.convert_to_numpy(bias)[0, 0])  # of the first head, whose slope is 1/2
        [[-0.  -0.5 -1. ]
         [-0.5 -0.  -0.5]
         [-1.  -0.5 -0. ]]
    """

    def __init__(self, num_heads: int, *, alibi_bias_max: float = 8, **kwargs: Any) -> None:
        super().__init__(num_heads, **kwargs)
        self.alibi_bias_max = checks.positive_float("alibi_bias_max", alibi_bias_max)

    def bias(self, relative: Tensor) -> Tensor:
        slopes = ops.convert_to_tensor(-slopes_of(self.num_heads, self.alibi_bias_max), dtype=self._bias_dtype)
        return slopes[:, None, None] * ops.cast(ops.abs(relative), self._bias_dtype)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "alibi_bias_max": self.alibi_bias_max}


@keras.saving.register_keras_serializable(package="keras_tx")
class RelativePositionBias(PositionBias):
    """T5's relative position bias: a learned value for each head and each bucket of distances.

    Small distances have a bucket each; larger ones share buckets whose size grows with the distance.

    Args:
        num_heads: N, the number of attention heads.
        num_buckets: the number of buckets. If `bidirectional`, half of them are for keys after the query.
        max_distance: all distances from this one on share the last bucket.
        bidirectional: True, for encoders: keys before and after the query have different buckets. False, for decoders:
            keys after the query count as distance 0.
        embeddings_initializer: initializer of the table (num_buckets, N).

    Call arguments:
        query: (B, T, D), of which only the length T matters.
        key: (B, S, D), of which only the length S matters; `query` if None.
        start: integer or scalar integer tensor, the index of the first query among the S keys; 0 if None. In a decode
            step also give `num_keys`, otherwise there are only as many keys as queries.
        num_keys: S, the number of slots of a key-value cache, instead of a `key`.

    Returns:
        (1, N, T, S) in float32, or in float64 under such a policy, to be added to the attention logits.

    Raises:
        ValueError: for sizes that are not positive or too small for the buckets, a `start` that is not a scalar
            integer, queries outside the slots, or both `key` and `num_keys`.

    Reference:
        Raffel et al. 2020 (T5), arXiv:1910.10683, section 2.1.

    Examples:
        >>> layer = keras_tx.layers.RelativePositionBias(num_heads=4, num_buckets=16, max_distance=32)
        >>> x = keras.ops.ones((2, 5, 8))
        >>> bias = layer(x)
        >>> tuple(bias.shape)
        (1, 4, 5, 5)

        In a decode step at slot 3, the bias is row 3 of the full bias:

        >>> step = layer(x[:, :1], start=3, num_keys=5)
        >>> np.array_equal(step[:, :, 0], bias[:, :, 3])
        True
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        embeddings_initializer: Any = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, **kwargs)
        self.num_buckets = checks.positive_int("num_buckets", num_buckets)
        self.max_distance = checks.positive_int("max_distance", max_distance)
        self.bidirectional = checks.flag("bidirectional", bidirectional)
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        least = 4 if bidirectional else 2
        if num_buckets < least:
            raise ValueError(
                f"`num_buckets` must be at least {least}. Received: num_buckets={num_buckets}, "
                f"bidirectional={bidirectional}"
            )
        if max_distance <= num_buckets // least:
            raise ValueError(
                f"`max_distance` must be above {num_buckets // least}, the distances that have a bucket of their own. "
                f"Received: max_distance={max_distance}, num_buckets={num_buckets}, bidirectional={bidirectional}"
            )
        distances = np.arange(-self.max_distance, self.max_distance + 1)
        self._buckets = buckets(distances, self.num_buckets, self.max_distance, bidirectional)

    def build(self, query_shape: Shape) -> None:
        self.embeddings = self.add_weight(
            shape=(self.num_buckets, self.num_heads),
            initializer=self.embeddings_initializer,
            name="embeddings",
            autocast=False,  # float32 under a mixed policy
        )

    def bias(self, relative: Tensor) -> Tensor:
        index = ops.clip(relative + self.max_distance, 0, 2 * self.max_distance)
        by_distance = ops.take(ops.convert_to_tensor(self._buckets, dtype="int32"), index)  # (T, S)
        biases = take_rows(ops.cast(self.embeddings, self._bias_dtype), by_distance)  # (T, S, N)
        return ops.transpose(biases, (2, 0, 1))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "embeddings_initializer": initializers.serialize(self.embeddings_initializer),
        }


def slopes_of(num_heads: int, bias_max: float = 8) -> Any:
    """ALiBi's slopes (N,), float64: those of the power of two below N, then every second one of the next power."""
    below = 2 ** (num_heads.bit_length() - 1)
    first = 2.0 ** (-bias_max / below * np.arange(1, below + 1))
    between = 2.0 ** (-bias_max / (2 * below) * np.arange(1, 2 * (num_heads - below), 2))
    return np.concatenate([first, between])


def buckets(relative: Any, num_buckets: int, max_distance: int, bidirectional: bool) -> Any:
    """T5's bucket of each distance, key position minus query position: integers in [0, num_buckets).

    Each bucket of the first half is for one distance; those of the second half are for ranges that grow up to
    `max_distance`. At the border of two ranges the result is that of `transformers`, which computes in float32.
    """
    if bidirectional:
        num_buckets //= 2
    distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
    exact = num_buckets // 2
    ratio = (np.maximum(distance, 1) / exact).astype("float32")
    share = np.log(ratio.astype("float64")).astype("float32") / np.float32(math.log(max_distance / exact))
    far = exact + (share * np.float32(num_buckets - exact)).astype("int64")
    bucket = np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))
    return bucket + num_buckets * (relative > 0) if bidirectional else bucket


def _check_slots(query: Any, key: Any, start: Any, num_keys: Any) -> tuple[Any, Any]:
    """Returns `start` as an integer or an int32 tensor, and `num_keys`, or raises."""
    is_known = not hasattr(num_keys, "shape") or isinstance(num_keys, Integral)  # else a tensor of a graph
    if is_known:
        num_keys = checks.positive_int("num_keys", num_keys, none=True)
    if key is not None and num_keys is not None:
        raise ValueError(
            "`key` and `num_keys` must not be given together, both say how many keys there are. Received: "
            f"key.shape={tuple(key.shape)}, num_keys={num_keys}"
        )
    if start is None or (isinstance(start, Integral) and not isinstance(start, bool)):
        first, queries = int(start or 0), query.shape[1] or 0
        keys = num_keys if is_known else None
        if num_keys is None and start is not None:  # without either, targets may be longer than their sources
            keys = (query if key is None else key).shape[1]
        if first < 0 or (keys is not None and first + queries > keys):
            sides = f"query.shape={tuple(query.shape)}, key.shape={None if key is None else tuple(key.shape)}"
            raise ValueError(
                "`query` must be in the slots of the keys: 0 <= start and start + T <= S. Give `num_keys`, the number "
                "of slots of a key-value cache, if S is neither the length of `key` nor, without it, of `query`. "
                f"Received: start={start}, {sides}, num_keys={num_keys}"
            )
        return first, num_keys
    if not hasattr(start, "shape") or tuple(start.shape) != ():
        raise ValueError(f"`start` must be an integer or a scalar integer tensor. Received: start={start}")
    check_integers("start", start)
    return start if isinstance(start, keras.KerasTensor) else ops.cast(start, "int32"), num_keys

"""Masks for padding, causality, windows and documents: booleans, True where a query may attend to a key.

B batch, N heads, T queries, S keys. A padding mask is (B, T), True at real tokens, as Keras attaches it to tensors.
Only this file defines what a mask means. `Visible` describes which keys a query may attend to, and all implementations
of attention use it: the dense one for all pairs at once, the blockwise one for blocks and for the pairs within a block,
the fused one to choose the mask or flag that a kernel takes.
"""

from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
from keras import ops

from keras_tx.layers import xla
from keras_tx.layers.extremes import largest, smallest
from keras_tx.layers.ids import values_of
from keras_tx.layers.shapes import size_of
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

LARGEST_WINDOW = 2**31 - 1  # positions are int32
MASKED = -1e30  # replaces masked logits. It is finite, so that a query without keys gives 0 instead of NaN

Range = tuple[Tensor, Tensor]  # the first and the last value of a block
Kind = Literal["nothing", "keys", "causal", "pairs"]


def join(*masks: Tensor | None) -> Any:
    """The conjunction of all `masks`. None allows everything; the result is None if all masks are None."""
    joined = None
    for mask in masks:
        if mask is not None:
            joined = mask if joined is None else ops.logical_and(joined, mask)
    return joined


def checked(name: str, mask: Any, has_bias: bool = True) -> Any:
    """Returns the call argument `name`, a mask of booleans, or of 1 and 0, as booleans.

    A mask of 0 and -1e9, made to be added to the logits, would be inverted as booleans, and token ids would count as
    so many tokens each. `has_bias`: whether the layer has an `attention_bias`, to which the error points.

    Raises:
        ValueError: for numbers other than 1 and 0, and for texts.
        tf.errors.InvalidArgumentError: likewise, when a graph of TensorFlow runs without XLA.
    """
    mask = np.asarray(mask) if isinstance(mask, (list, tuple)) else mask
    dtype = str(getattr(mask, "dtype", None))
    if isinstance(mask, (str, bytes)) or "string" in dtype or dtype[:2] in ("<U", "|S"):
        raise ValueError(f"`{name}` must be boolean, or 1 and 0. Received: {name}={mask!r}")
    if isinstance(mask, keras.KerasTensor) or not ("float" in dtype or "int" in dtype):
        return mask
    hint = "; numbers to add to the logits go into `attention_bias`" if has_bias else ""
    rule = f"`{name}` must be boolean, or 1 and 0{hint}. Received:"
    values = values_of(mask)
    if values is not None:
        wrong = values[(values != 0) & (values != 1)]
        if wrong.size:
            raise ValueError(f"{rule} {name} with the value {wrong.min()}")
    elif keras.backend.backend() == "tensorflow" and not xla.is_traced():
        fits = tf.reduce_all((mask == 0) | (mask == 1))
        with tf.control_dependencies([tf.debugging.Assert(fits, [f"{rule} {name} with other values", mask])]):
            mask = tf.identity(mask)
    return ops.cast(mask, "bool")


def expand_query_mask(mask: Tensor) -> Tensor:
    """(B, T), True at real queries -> (B, 1, T, 1)."""
    return ops.expand_dims(ops.cast(mask, "bool"), (1, 3))


def expand_key_mask(mask: Tensor) -> Tensor:
    """(B, S), True at real keys -> (B, 1, 1, S)."""
    return ops.expand_dims(ops.cast(mask, "bool"), (1, 2))


def allowed_by_bias(bias: Tensor) -> Tensor:
    """False where `bias` is minus infinity, or at most -1e30, which stands for it in additive masks. True for NaN."""
    return ops.logical_not(bias <= MASKED)


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """`logits`, `MASKED` where `mask` is False."""
    # A Python number would be of Keras' `floatx` on PyTorch, and minus infinity in float16.
    return ops.where(mask, logits, ops.convert_to_tensor(MASKED, logits.dtype))


def sees_any_key(mask: Tensor) -> Tensor:
    """A mask that broadcasts to (B, N, T, S) -> (B, N, T, 1), where B, N and T may be 1."""
    mask = ops.any(mask, axis=-1, keepdims=True)
    return mask if len(mask.shape) == 4 else ops.expand_dims(mask, tuple(range(4 - len(mask.shape))))


def count_positions(mask: Tensor) -> Tensor:
    """(..., T), True at real tokens -> (..., T) int32, the number of real tokens before each token."""
    return ops.maximum(ops.cumsum(ops.cast(mask, "int32"), axis=-1) - 1, 0)


@dataclass(frozen=True)
class Visible:
    """Which keys each query may attend to, as separate rules that need no memory of size (T, S). None: no such rule.

    Query i is in row `start + i`, key j in column j. Rules about positions are part of `reach`; rules that compare a
    property of the query with one of the key are part of `labels`.

    Args:
        queries: (B, T), True at real queries. The others attend to nothing.
        keys: several masks (B, S), True at real keys.
        documents: (B, T) integers with T = S, the ids of documents that are packed into one sequence. A query attends
            only to keys of its own document. 0 marks padding.
        causal: whether a query may not attend to keys after its own position.
        window: a query attends only to keys less than this many positions away, on both sides.
        mask: booleans that broadcast to (B, N, T, S), for everything else.
        start: the row of the first query, an integer or a scalar tensor.
    """

    queries: Tensor | None = None
    keys: tuple[Tensor, ...] = ()
    documents: Tensor | None = None
    causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    start: Any = 0

    @property
    def tensors(self) -> dict[str, Any]:
        """{name of an attribute: its value} for those that are tensors, which are those that may be traced."""
        named = {name: getattr(self, name) for name in ("queries", "keys", "documents", "mask", "start")}
        return {name: x for name, x in named.items() if x is not None and not isinstance(x, int)}

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How many positions before and after its own a query may attend to. None: no limit."""
        near = None if self.window is None else self.window - 1
        return near, 0 if self.causal else near

    @property
    def kind(self) -> Kind:
        """The kind of mask for real queries, because fused kernels have special arguments for some kinds.

        "nothing": no mask; "keys": only padding keys are masked; "causal": only a causal mask, from the first key on;
        "pairs": anything else.
        """
        if self.documents is not None or self.mask is not None:
            return "pairs"
        if self.reach == (None, None):
            return "keys" if self.keys else "nothing"
        is_from_first_key = isinstance(self.start, int) and self.start == 0
        return "causal" if self.reach == (None, 0) and is_from_first_key and not self.keys else "pairs"

    def blocks(self, rows: Range, columns: Range, labels: tuple[Range, Range] | None = None) -> Any:
        """Whether some query of a block may attend to some key of a block; None if nothing is masked.

        All rules but `mask` are defined here. For blocks with several labels the result may be True although they have
        no label in common, because only the lowest and the highest labels are compared.

        Args:
            rows, columns: the first and the last row of a block of queries, and column of a block of keys: integer
                tensors that broadcast to each other.
            labels: `label_range` of the queries and of the keys, if there are `labels`.
        """
        (first_row, last_row), (first_column, last_column) = rows, columns
        behind, ahead = self.reach
        parts = []
        if ahead is not None:
            parts.append((first_column - ahead if ahead else first_column) <= last_row)
        if behind is not None:
            parts.append((first_row - behind if behind else first_row) <= last_column)
        if labels is not None:
            (lowest_of_query, highest_of_query), (lowest_of_key, highest_of_key) = labels
            if lowest_of_query is highest_of_query and lowest_of_key is highest_of_key:  # single tokens: `pairs`
                parts.append(lowest_of_query == lowest_of_key)
            else:
                parts += [lowest_of_query <= highest_of_key, lowest_of_key <= highest_of_query]
        return join(*parts)

    def pairs(self, row: Tensor, column: Tensor, labels: tuple[Tensor, Tensor] | None = None) -> Any:
        """Whether the query at `row` may attend to the key at `column`; None if nothing is masked.

        Args:
            row, column: integer tensors that broadcast to each other.
            labels: those of the queries and keys, if there are `labels`.
        """
        ranges = None if labels is None else ((labels[0], labels[0]), (labels[1], labels[1]))
        return self.blocks((row, row), (column, column), ranges)

    def labels(self, batch: Any, num_queries: Any, num_keys: Any, always: bool = False) -> tuple[Tensor, Tensor] | None:
        """Integers (B, T) and (B, S): a query may attend to a key only if both have the same label.

        The label of a real token is its document id, or 1 without documents; padding has `padding_labels`. Returns None
        if there is neither padding nor documents, unless `always` is True.
        """
        if self.documents is None and self.queries is None and not self.keys and not always:
            return None
        documents = None if self.documents is None else ops.convert_to_tensor(self.documents)
        is_wide = documents is not None and keras.backend.standardize_dtype(documents.dtype) == "int64"
        dtype = "int64" if is_wide else "int32"
        found = []
        for length, masks, padding in zip(
            (num_queries, num_keys), ((self.queries,), self.keys), padding_labels(dtype), strict=True
        ):
            numbers = ops.ones((batch, length), dtype) if documents is None else ops.cast(documents, dtype)
            real = [None if mask is None else ops.cast(mask, "bool") for mask in masks]
            is_real = join(None if documents is None else documents != 0, *real)
            if is_real is not None:
                numbers = ops.where(is_real, numbers, ops.convert_to_tensor(padding, dtype=dtype))
            found.append(numbers)
        return found[0], found[1]

    def whole(self, num_queries: Any, num_keys: Any) -> Any:
        """All rules as one mask that broadcasts to (B, N, T, S), or None if nothing is masked."""
        labels, parts = None, [self.mask]
        if self.documents is None:  # padding needs no (T, S) mask, and fused kernels take smaller ones
            parts += [None if self.queries is None else expand_query_mask(self.queries)]
            parts += [expand_key_mask(mask) for mask in self.keys]
        else:
            found = self.labels(None, num_queries, num_keys)
            labels = found and (found[0][:, None, :, None], found[1][:, None, None, :])
        if labels is not None or self.reach != (None, None):
            row = (self.start + ops.arange(num_queries, dtype="int32"))[None, None, :, None]
            column = ops.arange(num_keys, dtype="int32")[None, None, None]
            parts.append(self.pairs(row, column, labels))
        return join(*parts)

    def whole_of(self, query: Tensor, key: Tensor) -> Any:
        """`whole` for queries (B, T, ...) and keys (B, S, ...)."""
        if self.documents is None and self.reach == (None, None):  # no rule about positions asks for the lengths
            return self.whole(None, None)
        return self.whole(size_of(query, 1), size_of(key, 1))

    def whole_of_cache(self, num_queries: Any, key: Tensor) -> Any:
        """`whole` for the keys of a cache (B, K, S, H).

        Each layer has a cache of its own, but all layers have the same key mask. With the size of that mask, and not
        that of the cache, a graph needs only one mask of attention for all layers.
        """
        return self.whole(num_queries, size_of(self.keys[0], 1) if self.keys else size_of(key, 2))


def padding_labels(dtype: str) -> tuple[int, int]:
    """The labels of padding queries and of padding keys. They differ, so that padding does not attend to padding."""
    lowest = int(np.iinfo(dtype).min)
    return lowest, lowest + 1


def label_range(labels: Tensor, axis: int) -> Range:
    """The lowest and highest label of real tokens along `axis`; for padding only, a range that overlaps no other."""
    limits = np.iinfo(keras.backend.standardize_dtype(labels.dtype))
    lowest, highest = int(limits.min), int(limits.max)
    is_padding = labels <= padding_labels(limits.dtype.name)[1]
    highest_label = ops.convert_to_tensor(highest, dtype=labels.dtype)
    first = smallest(ops.where(is_padding, highest_label, labels), highest, axis)
    return first, largest(labels, lowest, axis)

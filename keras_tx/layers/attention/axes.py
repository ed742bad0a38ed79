"""Attention over any axes: (B, ..., N, H) -> (B', T, N, H) and back.

B batch, N heads, H head size. The attended axes are folded into one axis T, all other axes into the batch B', so that
attention itself handles only one shape.
"""

import math
from typing import Any

from keras import ops

from keras_tx.layers.shapes import check_shape
from keras_tx.types import Shape, Tensor

Axes = tuple[int, ...]

# Every function returns early for the ordinary (B, T, N, H), where there is nothing to fold.


def attended_axes(axes: Axes | None, rank: int) -> Axes:
    """The attended axes of an input of `rank`, counted from the front. None means all but batch and features."""
    if axes is None:
        return tuple(range(1, rank - 1))
    counted = tuple(axis if axis >= 0 else rank + axis for axis in axes)
    if not counted or len(set(counted)) < len(counted) or not all(0 < axis < rank - 1 for axis in counted):
        raise ValueError(
            f"`attention_axes` must be different axes of the input, neither batch nor features. Received: "
            f"attention_axes={axes} for an input of rank {rank}"
        )
    return counted


def fold(x: Tensor, axes: Axes) -> Tensor:
    """(B, ..., N, H) -> (B', T, N, H)."""
    if len(x.shape) == 4 and axes == (1,):
        return x
    x = ops.transpose(x, _order(len(x.shape), axes, 2))
    shape = ops.shape(x)
    return ops.reshape(x, (-1, math.prod(shape[-2 - len(axes) : -2]), *shape[-2:]))


def unfold(x: Tensor, like: Tensor, axes: Axes) -> Tensor:
    """(B', T, N, H) -> (B, ..., N, H), undoing `fold(like, axes)`."""
    if len(like.shape) == 4 and axes == (1,):
        return x
    order = _order(len(like.shape), axes, 2)
    shape = ops.shape(like)
    x = ops.reshape(x, (*[shape[axis] for axis in order[:-2]], *ops.shape(x)[-2:]))
    return ops.transpose(x, [order.index(axis) for axis in range(len(order))])


def fold_padding(name: str, mask: Tensor, x: Tensor, axes: Axes) -> Tensor:
    """A padding mask over all axes of `x` (B, ..., N, H) but the last two, or (B, T) for one axis, -> (B', T)."""
    rank = len(x.shape) - 2
    free = [axis for axis in range(1, rank) if axis not in axes]
    if len(mask.shape) == 2 and len(axes) == 1 and free:
        mask = ops.expand_dims(mask, free)
    expected = tuple(1 if axis in free and mask.shape[axis] == 1 else x.shape[axis] for axis in range(rank))
    check_shape(name, mask, expected, exact=True)
    if not free and len(axes) == 1:
        return mask
    shape = ops.shape(x)[:rank]
    mask = ops.transpose(ops.broadcast_to(mask, shape), _order(rank, axes, 0))
    return ops.reshape(mask, (-1, math.prod(shape[axis] for axis in axes)))


def fold_pairs(name: str, pairs: Tensor, query: Tensor, key: Tensor, axes: Axes) -> Tensor:
    """A mask or bias over (B, ..., N, query axes, key axes) -> (B', N or 1, T, S).

    Missing axes are taken to stand before the query axes, as in `keras.layers.MultiHeadAttention`.
    """
    queries = [ops.shape(query)[axis] for axis in axes]
    keys = [ops.shape(key)[axis] for axis in axes]
    batch = [ops.shape(query)[axis] for axis in _free(query, axes)]
    static = [query.shape[axis] for axis in _free(query, axes)]
    sides = [side.shape[axis] for side in (query, key) for axis in axes]
    pairs = with_all_axes(name, pairs, (*static, query.shape[-2], *sides), len(sides))
    if len(batch) == len(axes) == 1:
        return pairs
    heads = ops.shape(pairs)[len(batch)]
    pairs = ops.broadcast_to(pairs, (*batch, heads, *queries, *keys))
    return ops.reshape(pairs, (-1, heads, math.prod(queries), math.prod(keys)))


def with_all_axes(name: str, pairs: Tensor, expected: Shape, num_last: int = 2) -> Tensor:
    """A mask or bias with as many axes as `expected`: missing axes are inserted before the last `num_last` ones.

    Args:
        name: of the call argument.
        pairs: the mask or bias.
        expected: the shape to which it must broadcast.
        num_last: the number of axes of queries and keys, the last ones.
    """
    if len(pairs.shape) < num_last:
        raise ValueError(
            f"`{name}` must have at least {num_last} axes, queries and keys. Received: {name}.shape="
            f"{tuple(pairs.shape)}"
        )
    while len(pairs.shape) < len(expected):
        pairs = ops.expand_dims(pairs, -num_last - 1)
    check_shape(name, pairs, expected)
    return pairs


def unfold_scores(scores: Tensor, query: Tensor, key: Tensor, axes: Axes) -> Tensor:
    """(B', N, T, S) -> (B, ..., N, query axes, key axes)."""
    if len(query.shape) == 4 and axes == (1,):
        return scores
    batch = [ops.shape(query)[axis] for axis in _free(query, axes)]
    sides = [ops.shape(side)[axis] for side in (query, key) for axis in axes]
    return ops.reshape(scores, (*batch, ops.shape(scores)[1], *sides))


def _free(x: Tensor, axes: Axes) -> list[int]:
    """The axes of (B, ..., N, H) that are not attended over, without the last two."""
    return [axis for axis in range(len(x.shape) - 2) if axis not in axes]


def _order(rank: int, axes: Axes, trailing: int) -> list[Any]:
    """All axes: the free ones, the attended ones, then the `trailing` last ones."""
    free = [axis for axis in range(rank - trailing) if axis not in axes]
    return [*free, *axes, *range(rank - trailing, rank)]

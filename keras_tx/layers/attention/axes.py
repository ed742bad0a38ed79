"""Attention over any axes: (B, ..., N, H) -> (B', T, N, H) and back.

B batch, N heads, H head size. Axes of attention become T, all other axes go into the batch B', so that attention itself
knows one shape only.
"""

import math

from keras import ops

# Every function returns early for the ordinary (B, T, N, H), where there is nothing to fold.


def attention_axes(axes, rank):
    """The attended axes of an input of `rank`, counted from the front; None means all but batch and features."""
    if axes is None:
        return tuple(range(1, rank - 1))
    counted = tuple(axis if axis >= 0 else rank + axis for axis in axes)
    if not counted or len(set(counted)) < len(counted) or not all(0 < axis < rank - 1 for axis in counted):
        raise ValueError(
            f"`attention_axes` must be different axes of the input, neither batch nor features. Received: "
            f"attention_axes={axes} for an input of rank {rank}"
        )
    return counted


def fold(x, axes):
    """(B, ..., N, H) -> (B', T, N, H)."""
    if len(x.shape) == 4 and axes == (1,):
        return x
    x = ops.transpose(x, _order(len(x.shape), axes, 2))
    shape = ops.shape(x)
    return ops.reshape(x, (-1, math.prod(shape[-2 - len(axes) : -2]), *shape[-2:]))


def unfold(x, like, axes):
    """(B', T, N, H) -> (B, ..., N, H), undoing `fold(like, axes)`."""
    if len(like.shape) == 4 and axes == (1,):
        return x
    order = _order(len(like.shape), axes, 2)
    shape = ops.shape(like)
    x = ops.reshape(x, (*[shape[axis] for axis in order[:-2]], *ops.shape(x)[-2:]))
    return ops.transpose(x, [order.index(axis) for axis in range(len(order))])


def fold_padding(name, mask, x, axes):
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


def fold_pairs(name, pairs, query, key, axes):
    """A mask or bias over (B, ..., N, query axes, key axes) -> (B', N or 1, T, S).

    Missing axes are taken to stand before the query axes, as in `keras.layers.MultiHeadAttention`.
    """
    queries = [ops.shape(query)[axis] for axis in axes]
    keys = [ops.shape(key)[axis] for axis in axes]
    batch = [ops.shape(query)[axis] for axis in range(len(query.shape) - 2) if axis not in axes]
    if len(pairs.shape) < 2 * len(axes):
        raise ValueError(
            f"`{name}` must have at least {2 * len(axes)} axes, queries and keys. Received: {name}.shape="
            f"{tuple(pairs.shape)}"
        )
    while len(pairs.shape) < len(batch) + 1 + 2 * len(axes):
        pairs = ops.expand_dims(pairs, -2 * len(axes) - 1)
    static = [query.shape[axis] for axis in range(len(query.shape) - 2) if axis not in axes]
    sides = [side.shape[axis] for side in (query, key) for axis in axes]
    check_shape(name, pairs, (*static, query.shape[-2], *sides))
    if len(batch) == len(axes) == 1:
        return pairs
    heads = ops.shape(pairs)[len(batch)]
    pairs = ops.broadcast_to(pairs, (*batch, heads, *queries, *keys))
    return ops.reshape(pairs, (-1, heads, math.prod(queries), math.prod(keys)))


def unfold_scores(scores, query, key, axes):
    """(B', N, T, S) -> (B, ..., N, query axes, key axes)."""
    if len(query.shape) == 4 and axes == (1,):
        return scores
    batch = [ops.shape(query)[axis] for axis in range(len(query.shape) - 2) if axis not in axes]
    sides = [ops.shape(side)[axis] for side in (query, key) for axis in axes]
    return ops.reshape(scores, (*batch, ops.shape(scores)[1], *sides))


def check_shape(name, tensor, expected, exact=False):
    """Raises unless the static shape of `tensor` is `expected`, or broadcasts to it; None is any size."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(expected) and all(
        a == b or None in (a, b) or (a == 1 and not exact) for a, b in zip(shape, expected, strict=True)
    )
    if not fits:
        rule = "have the shape" if exact else "broadcast to"
        raise ValueError(f"`{name}` must {rule} {tuple(expected)}. Received: {name}.shape={shape}")


def _order(rank, axes, trailing):
    free = [axis for axis in range(rank - trailing) if axis not in axes]
    return [*free, *axes, *range(rank - trailing, rank)]

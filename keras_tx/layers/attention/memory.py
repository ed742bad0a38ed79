"""Cross-attention of several rows, such as beams, to one row of a source, whose keys and values are not repeated.

B rows of sources, W rows of queries for each, T queries, S keys, N heads, H head. As cross-attention has no order of
queries, W rows of T queries are one row of W * T queries.
"""

from keras import ops

from keras_tx.layers.cache import Memory, SharedMemory, repeat_rows
from keras_tx.types import Tensor

Masks = tuple[Tensor | None, ...]


def side_by_side(
    query: Tensor, cache: Memory | SharedMemory, query_mask: Tensor | None, key_masks: Masks, can_share: bool
) -> tuple[Tensor, Memory, Tensor | None, Masks]:
    """Queries, keys and values, and their masks, all of the same number of rows.

    Args:
        query: (B, T, N, H), or for a `SharedMemory` (B * W, T, N, H).
        cache: of B rows.
        query_mask: of as many rows as `query`, or None.
        key_masks: likewise; for a `SharedMemory`, each is the same in all W rows of a source.
        can_share: whether no other argument has rows. Otherwise keys and values are repeated.

    Returns:
        The queries (B, W * T, N, H), a `Memory` of B rows and the masks (B, W * T) and (B, S); or, if they cannot share
        it, a `Memory` of B * W rows and the rest as it was.
    """
    if isinstance(cache, Memory):
        return query, cache, query_mask, key_masks
    count, memory = cache.rows.shape[0], Memory(cache.key, cache.value)
    if not can_share or query.shape[1] is None:
        return query, Memory(*[repeat_rows(x, count) for x in memory]), query_mask, key_masks
    length = count * query.shape[1]
    query = ops.reshape(query, (-1, length, *query.shape[2:]))
    query_mask = None if query_mask is None else ops.reshape(query_mask, (-1, length))
    return query, memory, query_mask, tuple(None if mask is None else mask[::count] for mask in key_masks)

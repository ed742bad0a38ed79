"""Random attention for tests that compare two ways of computing it."""

import numpy as np
from hypothesis import strategies as st

from keras_tx.layers.masks import Visible
from tests.tools import normal

ARGUMENTS = (
    st.tuples(st.integers(1, 3), st.integers(1, 29), st.integers(1, 31)),
    st.sampled_from([(1, 1), (3, 1), (3, 3), (6, 2)]),
    st.integers(0, 2**16),
)


def random_attention(shape, head_counts, seed, value_size):
    """A `Visible`, and query, key, value of heads of 5 and `value_size`, in half of the cases with a bias."""
    rng = np.random.default_rng(seed)
    (batch, queries, keys), (heads, key_heads) = shape, head_counts
    maybe = lambda value: value if rng.random() < 0.5 else None
    documents = maybe(np.sort(rng.integers(-1, 4, (batch, queries)), axis=1).astype("int32"))
    keys = queries if documents is not None else keys
    sides = [size if rng.random() < 0.5 else 1 for size in (batch, heads)]
    visible = Visible(
        queries=maybe(rng.random((batch, queries)) < 0.8),
        keys=tuple(rng.random((batch, keys)) < 0.7 for _ in range(rng.integers(0, 3))),
        documents=documents,
        causal=rng.random() < 0.5,
        window=maybe(int(rng.integers(1, 12))),
        mask=maybe(rng.random((*sides, queries, maybe(keys) or 1)) < 0.9),
        start=int(rng.integers(0, 5)),
    )
    tensors = [normal(batch, queries, heads, 5, seed=seed), normal(batch, keys, key_heads, 5, seed=seed + 1)]
    tensors.append(normal(batch, keys, key_heads, value_size, seed=seed + 2))
    if rng.random() < 0.5:
        tensors.append(normal(*sides, maybe(queries) or 1, maybe(keys) or 1, seed=seed + 3))
    return visible, tensors

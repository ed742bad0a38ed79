"""`Visible` against its rules written out in NumPy, for all pairs and for blocks, and in every way of attention."""

import ast
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_tx
from keras_tx.layers.attention.blockwise import attend_blockwise
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.attention.fused import attend_fused
from keras_tx.layers.masks import Visible, label_range
from tests.layers.cases import ARGUMENTS, random_attention
from tests.tools import assert_close, normal, to_numpy


def by_the_rules(visible, batch, queries, keys):
    """(B, T, S), one pair after the other; without `mask`."""
    seen = np.ones((batch, queries, keys), "bool")
    for b, i, j in np.ndindex(seen.shape):
        row = visible.start + i
        parts = [
            visible.queries is None or visible.queries[b, i],
            all(real[b, j] for real in visible.keys),
            visible.documents is None or visible.documents[b, i] == visible.documents[b, j] != 0,
            not visible.causal or j <= row,
            visible.window is None or abs(row - j) < visible.window,
        ]
        seen[b, i, j] = all(parts)
    return seen


@given(*ARGUMENTS)
def test_the_mask_of_all_pairs_is_what_the_rules_say(shape, head_counts, seed):
    visible, (query, key, *_) = random_attention(shape, head_counts, seed, value_size=5)
    (batch, queries, heads), keys = query.shape[:3], key.shape[1]
    expected = np.broadcast_to(by_the_rules(visible, batch, queries, keys)[:, None], (batch, heads, queries, keys))
    if visible.mask is not None:
        expected = expected & visible.mask
    whole = visible.whole(queries, keys)
    found = np.broadcast_to(True if whole is None else to_numpy(whole), expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_causality_and_windows_by_hand():
    causal, window = Visible(causal=True, start=2), Visible(window=2)
    assert to_numpy(causal.whole(2, 5))[0, 0].astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert to_numpy(window.whole(3, 4))[0, 0].astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    assert to_numpy(Visible(window=2, start=3).whole(1, 4))[0, 0].astype(int).tolist() == [[0, 0, 1, 1]]


@given(
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([None, "documents", "gaps"]),
    st.tuples(*[st.integers(0, 11)] * 2, *[st.integers(1, 7)] * 2),
    st.integers(0, 2**16),
)
def test_a_pair_of_blocks_is_open_where_any_pair_in_it_is(causal, window, kind, ranges, seed):
    row, column, rows, columns = ranges
    visible, rng = Visible(causal=causal, window=window), np.random.default_rng(seed)
    labels = edges = None
    if kind:
        steps = rng.integers(0, 2 if kind == "documents" else 3, 24)
        documents = np.cumsum(steps).astype("int32")[None] * (rng.random((1, 24)) < 0.8)
        by_number = Visible(documents=documents)
        own, others = (to_numpy(x)[0] for x in by_number.labels(1, 24, 24))
        labels = own[row : row + rows][:, None], others[column : column + columns][None]
        edges = tuple(label_range(keras.ops.convert_to_tensor(x.ravel()), axis=0) for x in labels)
    numbers = [np.arange(first, first + count, dtype="int32") for first, count in ((row, rows), (column, columns))]
    pairs = visible.pairs(numbers[0][:, None], numbers[1][None], labels)
    block = visible.blocks(*[(side[0], side[-1]) for side in numbers], edges)
    assert (pairs is None) == (block is None) == (not causal and window is None and kind is None)
    if pairs is not None:
        is_open, is_any = bool(to_numpy(block)), bool(to_numpy(pairs).any())
        assert is_open or not is_any  # nothing that may be seen is skipped
        if kind is None:
            assert is_open == is_any


class TwoAhead(Visible):
    """Another rule: a query sees the keys before it, and two after it."""

    @property
    def reach(self):
        return None, 2


def test_every_way_of_attention_follows_a_rule_that_is_changed_in_one_place():
    query, key, value = (normal(2, 13, 3, 8, seed=seed) for seed in range(3))
    distance = np.arange(13)[None] - np.arange(13)[:, None]
    expected, _ = attend(query, key, value, mask=distance <= 2)
    visible = TwoAhead()
    assert_close(attend(query, key, value, mask=visible.whole(13, 13))[0], expected, atol=0)
    assert_close(attend_blockwise(query, key, value, visible, block_size=4), expected, atol=2e-6)
    if keras.backend.backend() != "tensorflow":
        assert_close(attend_fused(query, key, value, visible), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("visible", "kind"),
    [
        (Visible(), "nothing"),
        (Visible(queries=np.ones((1, 3), "bool")), "nothing"),
        (Visible(keys=(np.ones((1, 3), "bool"),)), "keys"),
        (Visible(causal=True), "causal"),
        (Visible(causal=True, start=1), "pairs"),
        (Visible(causal=True, keys=(np.ones((1, 3), "bool"),)), "pairs"),
        (Visible(window=2), "pairs"),
        (Visible(documents=np.ones((1, 3), "int32")), "pairs"),
        (Visible(mask=np.ones((1, 1, 3, 3), "bool")), "pairs"),
    ],
)
def test_the_kind_says_what_a_kernel_must_be_told(visible, kind):
    assert visible.kind == kind


def test_only_masks_py_knows_the_rules():
    """Other files ask `Visible`; only the dense mask of padding queries, which is no rule, is read elsewhere."""
    folder = Path(keras_tx.__file__).parent / "layers"
    for path in [*folder.glob("attention/*.py"), *folder.glob("*.py")]:
        read = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, (ast.Name, ast.Attribute))
            and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) == "visible"
        }
        assert not read & {"causal", "window", "documents", "keys"}, path

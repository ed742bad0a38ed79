"""Attention over a key-value cache, stored with the heads first, equals attention over keys in the usual order."""

import numpy as np
import pytest
from keras import ops

from keras_tx.layers import cache as caches
from keras_tx.layers import masks, xla
from keras_tx.layers.attention.dense import attend, attend_cached
from tests.tools import assert_close, normal

B, S, H, VALUE = 3, 7, 5, 11
pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 6), (6, 3), (6, 1)])
@pytest.mark.parametrize(("of_heads", "length"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_few_queries_get_what_attend_gives(heads, key_heads, of_heads, length):
    query = ops.convert_to_tensor(normal(B, length, heads, H))
    key, value = (ops.convert_to_tensor(normal(B, key_heads, S, size)) for size in (H, VALUE))
    seen = normal(B, heads if of_heads else 1, length if of_heads else 1, S) > 0
    seen[1] = False  # looks at nothing: zeros
    bias = ops.convert_to_tensor(normal(1, heads, length, S, seed=2)) if of_heads else None
    visible = masks.Visible(mask=ops.convert_to_tensor(seen), causal=True, start=S - 2)
    found = attend_cached(query, caches.KeyValue(key, value), visible, bias=bias, scale=0.4)
    usual = [ops.swapaxes(x, 1, 2) for x in (key, value)]
    expected, _ = attend(query, *usual, mask=visible.whole(length, S), bias=bias, scale=0.4)
    assert_close(found, expected, atol=1e-6)
    assert found.shape == (B, length, heads, VALUE) and not np.any(found[1])


def test_half_precision_stays_half():
    query = ops.cast(normal(B, 1, 6, H), "bfloat16")
    key, value = (ops.cast(normal(B, 3, S, size), "bfloat16") for size in (H, VALUE))
    found = attend_cached(query, caches.Memory(key, value), masks.Visible())
    expected, _ = attend(query, *[ops.swapaxes(x, 1, 2) for x in (key, value)])
    assert found.dtype == "bfloat16"
    assert_close(ops.cast(found, "float32"), ops.cast(expected, "float32"), atol=2e-2)


def test_keys_are_stored_alike_with_and_without_xla():
    for length in (1, 4):
        x = ops.convert_to_tensor(normal(B, length, 6, H))
        with xla.tracing(True):
            by_xla = caches.heads_first(x)
        assert_close(caches.heads_first(x), by_xla, atol=0)
        assert_close(by_xla, normal(B, length, 6, H).swapaxes(1, 2), atol=0)


def test_a_graph_writes_into_a_cache_of_any_size():
    import tensorflow as tf

    specs = (
        [tf.TensorSpec([None, 2, None, H])] * 2 + [tf.TensorSpec([None, 2, None, H])] * 2 + [tf.TensorSpec([], "int32")]
    )

    @tf.function(input_signature=specs)
    def write(key, value, new_key, new_value, start):
        cache = caches.write(caches.KeyValue(key, value), new_key, new_value, start)
        return *cache, caches.num_slots(cache)

    for length, start in ((1, 6), (3, 2), (7, 0)):
        buffers = [normal(B, 2, S, H, seed=seed) for seed in (1, 2)]
        new = [normal(B, 2, length, H, seed=seed) for seed in (3, 4)]
        *found, slots = write(*buffers, *new, start)
        for x, buffer, part in zip(found, buffers, new, strict=True):
            buffer[:, :, start : start + length] = part
            np.testing.assert_array_equal(x, buffer)
        assert slots == S

"""Attention in parts, without padding, gives to each text what attention gives to the text alone."""

import keras
import numpy as np
import pytest

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.attention import parts as parts_module
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.attention.parts import Parts, attend_in_parts, can_attend_in_parts
from keras_tx.layers.exported_weights import exported_weights
from tests.tools import assert_close, gradients, normal, to_numpy

pytestmark = pytest.mark.tensorflow
H, VALUE = 5, 3
BATCHES = {"texts": [4, 0, 9, 1, 2, 6], "one": [7], "equal": [3, 3], "nothing": [0, 0], "empty": []}


def tensors(lengths, heads, key_heads):
    real = sum(lengths)
    sizes = (heads, H), (key_heads, H), (key_heads, VALUE)
    return [normal(1, real, *size, seed=number) for number, size in enumerate(sizes)]


def parts_of(lengths, heads, key_heads, length=200, copies=0):
    mask = np.arange(max(lengths, default=0) + 2) < np.array(lengths)[:, None]
    return Parts(keras.ops.convert_to_tensor(mask), heads, key_heads, length, num_rows=int(mask.sum()) + copies)


@pytest.mark.parametrize("length", [200, 9])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("name", BATCHES)
def test_each_text_gets_what_it_gets_alone(name, heads, key_heads, length):
    lengths, given = BATCHES[name], tensors(BATCHES[name], heads, key_heads)

    def alone(*heads):
        ends = np.cumsum(lengths)
        texts = [[x[:, end - length : end] for x in heads] for length, end in zip(lengths, ends, strict=True)]
        return keras.ops.concatenate([attend(*text, scale=0.7)[0] for text in texts], axis=1)

    def in_parts(*given):
        return attend_in_parts(*given, parts_of(lengths, heads, key_heads, length), scale=0.7)

    found = gradients(in_parts, given)
    assert found[0].shape == (1, sum(lengths), heads, VALUE)
    if sum(lengths):
        for got, expected in zip(found, gradients(alone, given), strict=True):
            assert_close(got, expected, atol=2e-6)


@pytest.mark.parametrize("length", [200, None])
@pytest.mark.parametrize("name", sorted({*BATCHES} - {"empty"}))
def test_copies_of_tokens_after_the_real_ones_change_nothing(name, length):
    lengths, given = BATCHES[name], tensors(BATCHES[name], 6, 2)
    real = sum(lengths)
    longer = [np.pad(x, [(0, 0), (0, 3), (0, 0), (0, 0)], mode="edge" if real else "constant") for x in given]
    parts = parts_of(lengths, 6, 2, length, copies=3)
    assert to_numpy(parts.positions).shape == (real + 3,)
    found = to_numpy(attend_in_parts(*longer, parts))
    assert found.shape == (1, real + 3, 6, VALUE) and np.isfinite(found).all()
    assert_close(found[:, :real], attend_in_parts(*given, parts_of(lengths, 6, 2)), atol=2e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BATCHES)
def test_few_tokens_of_an_export_get_the_same_without_onednn(name, dtype, monkeypatch):
    import tensorflow as tf

    lengths, seen = BATCHES[name], []
    given = [tf.cast(x, dtype) for x in tensors(lengths, 6, 2)]
    mask = np.arange(max(lengths, default=0) + 2) < np.array(lengths)[:, None]
    expected = attend_in_parts(*given, parts_of(lengths, 6, 2, None))
    few = parts_module._attend_few

    def noted(*given):
        outputs = few(*given)
        nothing = tf.numpy_function(lambda: seen.append(1) or np.float32(0), [], "float32")
        return outputs + tf.cast(tf.ensure_shape(nothing, []), dtype)

    monkeypatch.setattr(parts_module, "_attend_few", noted)
    for most in (0, sum(lengths), parts_module._MOST_FEW):
        monkeypatch.setattr(parts_module, "_MOST_FEW", most)
        sizes = [tf.TensorSpec([1, None, *x.shape[2:]], dtype) for x in given]

        @tf.function(input_signature=[*sizes, tf.TensorSpec([None, None], "bool")])
        def function(query, key, value, mask):
            return attend_in_parts(query, key, value, Parts(mask, 6, 2, None, num_rows=tf.shape(query)[1]))

        with exported_weights():
            function.get_concrete_function()
        seen.clear()
        assert_close(function(*given, mask), expected, atol=2e-6 if dtype == "float32" else 0.02)
        assert bool(seen) == (sum(lengths) <= most)


def test_the_default_scale_and_half_precision():
    given, parts = tensors([4, 7], 2, 2), parts_of([4, 7], 2, 2)
    expected = attend_in_parts(*given, parts, scale=H**-0.5)
    assert_close(attend_in_parts(*given, parts), expected, atol=0)
    halves = [keras.ops.cast(x, "bfloat16") for x in given]
    found = attend_in_parts(*halves, parts)
    assert found.dtype == "bfloat16"
    assert_close(keras.ops.cast(found, "float32"), expected, atol=2e-2)
    doubles = [keras.ops.cast(x, "float64") for x in given]
    assert_close(attend_in_parts(*doubles, parts), expected, atol=1e-6)


def test_parts_are_equally_many_pairs_in_order_of_length():
    lengths = [5, 1, 8, 3, 2, 2]
    parts = parts_of(lengths, 2, 2)
    real = [(to_numpy(one)[:, 0] == 0).tolist() for one in parts.masks]
    assert [[sum(pair) for pair in part] for part in real] == [[1, 1, 2], [2, 2, 2], [3, 3, 5], [5, 8, 8]]
    assert [len(part[0]) for part in real] == [2, 2, 5, 8]
    assert to_numpy(parts.positions).tolist() == [*range(5), *range(1), *range(8), *range(3), *range(2), *range(2)]


def test_longer_rows_have_more_parts():
    counts = {length: len(parts_of([3], 1, 1, length).masks) for length in (None, 5, 127, 128, 511, 512, 2048)}
    assert counts == {None: 1, 5: 1, 127: 1, 128: 4, 511: 4, 512: 8, 2048: 8}


def test_a_text_of_nan_changes_no_other_text():
    lengths, (query, key, value) = [3, 5, 2], tensors([3, 5, 2], 2, 2)
    expected = attend_in_parts(query, key, value, parts_of(lengths, 2, 2))
    for x in (query, key, value):
        x[0, 3:8] = np.nan
    found = to_numpy(attend_in_parts(query, key, value, parts_of(lengths, 2, 2)))
    np.testing.assert_array_equal(found[0, [0, 1, 2, 8, 9]], to_numpy(expected)[0, [0, 1, 2, 8, 9]])
    assert np.isnan(found[0, 3:8]).all()


def test_only_softmax_over_whole_texts_goes_in_parts():
    def can(training=False, **options):
        return can_attend_in_parts(MultiHeadAttention(2, 4, **options), training)

    assert can() and can(num_key_value_heads=1, rotary=True, blockwise=False, flash_attention=False)
    assert not (can(sliding_window=3) or can(blockwise=True) or can(flash_attention=True) or can(hard_attention=True))
    assert can(training=True, hard_attention=True)

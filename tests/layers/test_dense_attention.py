"""The function `attend` against the equation, written out in NumPy float64."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.masks import Visible
from tests.tools import assert_close, gradients, normal, to_numpy


def by_the_equation(query, key, value, mask, bias, scale):
    """One query, one head at a time."""
    query, key, value = (x.astype("float64") for x in (query, key, value))
    (batch, queries, heads, _), keys, group = query.shape, key.shape[1], query.shape[2] // key.shape[2]
    mask = np.broadcast_to(mask, (batch, heads, queries, keys))
    bias = np.broadcast_to(bias, (batch, heads, queries, keys))
    output = np.zeros((batch, queries, heads, value.shape[3]))
    scores = np.zeros((batch, heads, queries, keys))
    for b, t, n in np.ndindex(batch, queries, heads):
        may = mask[b, n, t]
        if may.any():
            products = np.exp(scale * key[b, :, n // group] @ query[b, t, n] + bias[b, n, t]) * may
            scores[b, n, t] = products / products.sum()
            output[b, t, n] = scores[b, n, t] @ value[b, :, n // group]
    return output, scores


shapes = st.tuples(*[st.integers(1, 7)] * 4, st.sampled_from([(1, 1), (3, 1), (3, 3), (6, 2)]), st.integers(1, 5))


@given(shapes, st.integers(0, 2**16), st.floats(0.05, 2.0))
def test_attention_is_the_equation_for_every_shape_mask_and_bias(shape, seed, scale):
    batch, queries, keys, head, (heads, key_heads), value_head = shape
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(batch, queries, heads, head)).astype("float32")
    key = rng.normal(size=(batch, keys, key_heads, head)).astype("float32")
    value = rng.normal(size=(batch, keys, key_heads, value_head)).astype("float32")
    sides = [size if rng.random() < 0.5 else 1 for size in (batch, heads, queries, keys)]
    mask = rng.random(sides) < 0.6
    bias = rng.normal(size=[size if rng.random() < 0.5 else 1 for size in (batch, heads, queries, keys)])
    bias = bias.astype("float32") if rng.random() < 0.5 else None
    real = rng.random((batch, queries)) < 0.7 if rng.random() < 0.5 else None
    output, scores = attend(query, key, value, mask=mask, queries=real, bias=bias, scale=scale)
    mask = mask if real is None else mask & real[:, None, :, None]
    expected_output, expected_scores = by_the_equation(query, key, value, mask, 0 if bias is None else bias, scale)
    assert_close(output, expected_output, atol=3e-6)
    assert_close(scores, expected_scores, atol=1e-6)
    alone, no_scores = attend(query, key, value, mask=mask, bias=bias, scale=scale, with_scores=False)
    assert_close(alone, expected_output, atol=3e-6)
    assert no_scores is None


def test_the_default_scale_is_one_over_the_root_of_the_head_size():
    query, key, value = normal(2, 3, 5, 7), normal(2, 11, 5, 7, seed=1), normal(2, 11, 5, 2, seed=2)
    assert_close(attend(query, key, value)[0], by_the_equation(query, key, value, True, 0, 7**-0.5)[0])


def test_a_query_that_may_look_at_nothing_gets_zeros_and_zero_scores():
    mask = np.ones((2, 1, 3, 5), "bool")
    mask[1, 0, 2] = False
    output, scores = attend(normal(2, 3, 1, 4), normal(2, 5, 1, 4), normal(2, 5, 1, 4), mask=mask)
    assert not to_numpy(output)[1, 2].any() and not to_numpy(scores)[1, :, 2].any()
    assert to_numpy(output)[1, 1].all()


def test_what_a_masked_key_holds_cannot_be_seen():
    query, key, value = normal(1, 3, 2, 4), normal(1, 5, 2, 4), normal(1, 5, 2, 4)
    mask = np.array([True, True, False, True, False])[None, None, None]
    other_key, other_value = key.copy(), value.copy()
    other_key[:, [2, 4]], other_value[:, [2, 4]] = 1e4, -1e4
    assert_close(attend(query, other_key, other_value, mask=mask)[0], attend(query, key, value, mask=mask)[0], atol=0)


def test_hard_attention_takes_the_value_of_the_best_allowed_key():
    query, key, value = normal(2, 3, 6, 4), normal(2, 5, 2, 4, seed=1), normal(2, 5, 2, 7, seed=2)
    mask = np.array([True, False, True, True, False])
    output, scores = attend(query, key, value, mask=mask[None, None, None], hard=True)
    for b, t, n in np.ndindex(2, 3, 6):
        best = max(np.flatnonzero(mask), key=lambda s: key[b, s, n // 3] @ query[b, t, n])
        assert_close(to_numpy(output)[b, t, n], value[b, best, n // 3], atol=0)
        assert to_numpy(scores)[b, n, t].tolist() == [float(s == best) for s in range(5)]


def test_a_bias_of_minus_infinity_hides_keys_as_a_mask_does():
    query, key, value = normal(2, 3, 2, 4), normal(2, 5, 2, 4), normal(2, 5, 2, 4)
    mask = np.random.default_rng(0).random((2, 1, 3, 5)) < 0.5
    mask[1, 0, 2] = False
    hidden, scores = attend(query, key, value, bias=np.where(mask, 0.0, -np.inf).astype("float32"))
    expected, expected_scores = attend(query, key, value, mask=mask)
    assert_close(hidden, expected, atol=0)
    assert_close(scores, expected_scores, atol=0)


@pytest.mark.parametrize("floatx", ["float16", "float64"])
def test_a_query_without_keys_has_finite_gradients_whatever_floatx_is(floatx):
    x, bias = normal(2, 3, 1, 4), normal(2, 1, 3, 3)
    bias[0, :, 1] = -np.inf
    expected = gradients(lambda x: attend(x, x, x, bias=bias, scale=0.5)[0], [x])
    assert all(np.isfinite(to_numpy(one)).all() for one in expected)
    keras.config.set_floatx(floatx)
    try:
        found = gradients(lambda x: attend(x, x, x, bias=bias, scale=0.5)[0], [x])
    finally:
        keras.config.set_floatx("float32")
    for one, wanted in zip(found, expected, strict=True):
        assert_close(one, wanted, atol=1e-6)


def test_dropout_weighs_the_values_but_not_the_returned_scores():
    query, key, value = normal(1, 3, 2, 4), normal(1, 5, 2, 4), normal(1, 5, 2, 4)
    plain, scores = attend(query, key, value)
    dropped, same_scores = attend(query, key, value, dropout=lambda x: x * 2)
    assert_close(dropped, to_numpy(plain) * 2)
    assert_close(same_scores, scores, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scores_are_float32_and_large_products_do_not_overflow(dtype):
    import keras

    query = keras.ops.cast(np.full((1, 2, 1, 64), 100.0), dtype)  # 100 * 100 * 64 / 8 is over the largest float16
    output, scores = attend(query, query, query)
    assert keras.backend.standardize_dtype(scores.dtype) == "float32"
    assert keras.backend.standardize_dtype(output.dtype) == dtype
    assert_close(scores, np.full((1, 1, 2, 2), 0.5))


@pytest.mark.tensorflow
def test_the_graph_of_attention_over_unknown_lengths_has_few_operations():
    """What is traced, saved, optimized and started for every layer; 77 of them with products over one batch axis."""
    import tensorflow as tf

    heads, rows = tf.TensorSpec([None, None, 3, 5]), tf.TensorSpec([None, None], tf.bool)

    @tf.function(input_signature=[heads, heads, heads, rows, rows])
    def attention(query, key, value, queries, keys):
        visible = Visible(keys=(keys,))
        return attend(query, key, value, mask=visible.whole_of(query, key), queries=queries, with_scores=False)[0]

    operations = attention.get_concrete_function().graph.get_operations()
    made = [one for one in operations if one.type not in ("Const", "Placeholder")]
    assert 10 < len(made) <= 25, [one.type for one in made]


def test_attention_to_a_single_key_has_gradients_of_zero_and_no_warning():
    """Such as to a memory of one vector. Keras warns of variables without gradients, which is an error in tests."""
    x, memory = keras.Input((5, 6)), keras.Input((1, 3))
    model = keras.Model([x, memory], MultiHeadAttention(2, 3, name="one")(x, memory))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    before = [to_numpy(weight) for weight in model.get_layer("one").query_dense.weights]
    model.train_on_batch([normal(2, 5, 6), normal(2, 1, 3)], np.ones((2, 5, 6)))
    # PyTorch's kernel computes the gradient of a logit as a difference of two sums, which may be rounded differently.
    atol = 1e-7 if keras.backend.backend() == "torch" else 0
    for weight, old in zip(model.get_layer("one").query_dense.weights, before, strict=True):
        assert_close(weight, old, atol=atol)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="about JAX")
def test_a_program_of_jax_for_any_batch_and_length_does_as_the_layer():
    """As `model.export` makes it; the sizes are symbols that cannot be compared with numbers."""
    import jax

    layer = MultiHeadAttention(3, 5)
    layer.build((None, None, 6), (None, None, 6))
    sizes = jax.export.symbolic_shape("batch, length")
    program = jax.export.export(jax.jit(lambda x: layer(x, x)))(jax.ShapeDtypeStruct((*sizes, 6), "float32"))
    for shape in ((2, 11, 6), (3, 1, 6)):
        x = normal(*shape)
        assert_close(program.call(x), to_numpy(layer(x, x)), atol=1e-5)

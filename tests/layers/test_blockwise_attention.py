"""Attention block by block against attention as a whole, gradients too; and what it skips."""

import keras
import numpy as np
import pytest
from hypothesis import given
from keras import ops

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.attention import dispatch
from keras_tx.layers.attention.blocks import Blocks
from keras_tx.layers.attention.blockwise import attend_blockwise
from keras_tx.layers.attention.dense import attend
from keras_tx.layers.masks import Visible
from tests.layers.cases import ARGUMENTS, random_attention
from tests.tools import assert_close, gradients, hessian_products, normal, randomize, to_numpy


@given(*ARGUMENTS)
def test_blocks_give_what_the_whole_gives_with_every_mask_bias_and_size(shape, head_counts, seed):
    visible, tensors = random_attention(shape, head_counts, seed, value_size=7)
    queries, keys = (x.shape[1] for x in tensors[:2])
    size = 2 + seed % 15

    def by_blocks(query, key, value, bias=None):
        return attend_blockwise(query, key, value, visible, bias=bias, block_size=size)

    def as_a_whole(query, key, value, bias=None):
        return attend(query, key, value, mask=visible.whole(queries, keys), bias=bias)[0]

    output, *slopes = gradients(by_blocks, tensors)
    expected, *expected_slopes = gradients(as_a_whole, tensors)
    assert_close(output, expected, atol=2e-6)
    for slope, expected_slope in zip(slopes, expected_slopes, strict=True):
        assert_close(slope, expected_slope, atol=1e-5)


def test_a_bias_of_minus_infinity_hides_a_key():
    query, key, value = normal(2, 7, 3, 5), normal(2, 11, 3, 5, seed=1), normal(2, 11, 3, 5, seed=2)
    bias = np.zeros((1, 1, 7, 11), "float32")
    bias[..., 3:] = -np.inf
    alone = attend(query, key[:, :3], value[:, :3])[0]
    assert_close(attend_blockwise(query, key, value, Visible(), bias=bias, block_size=4), alone, atol=2e-6)
    for hiding in (-np.inf, np.finfo("float32").min, -1e30):
        bias[..., 3:] = hiding
        assert_close(attend(query, key, value, bias=bias)[0], alone, atol=2e-6)
        assert_close(attend_blockwise(query, key, value, Visible(), bias=bias, block_size=4), alone, atol=2e-6)
    bias[...] = -np.inf
    assert not to_numpy(attend_blockwise(query, key, value, Visible(), bias=bias, block_size=4)).any()


def test_half_precision_stays_near_float32_and_keeps_its_dtype():
    query, key, value = normal(2, 13, 3, 5), normal(2, 13, 3, 5, seed=1), normal(2, 13, 3, 7, seed=2)
    halves = [ops.cast(x, "bfloat16") for x in (query, key, value)]
    visible = Visible(causal=True)
    output = attend_blockwise(*halves, visible, block_size=4)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    exact = attend_blockwise(*[ops.cast(x, "float32") for x in halves], visible, block_size=4)
    assert_close(ops.cast(output, "float32"), exact, atol=0.02)


def test_dropout_is_the_same_for_a_seed_keeps_the_mean_and_has_the_gradient_of_what_it_kept():
    query, key = normal(1, 9, 2, 5), normal(1, 9, 2, 5, seed=1)
    value = np.eye(9, dtype="float32")[None, :, None] * np.ones((1, 9, 2, 9), "float32")  # the output: the scores
    rate, options = 0.3, {"block_size": 4, "dropout": 0.3}
    scores = to_numpy(attend_blockwise(query, key, value, Visible(), block_size=4))
    batch = [np.repeat(x, 51, axis=0) for x in (query, key, value)]  # each example drops other scores
    dropped, same, others = (
        to_numpy(attend_blockwise(*batch, Visible(), seed=np.array([seed, 5], "uint32"), **options))
        for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(dropped, same)
    for kept in (dropped, others):
        assert_close(kept[kept != 0], np.repeat(scores, 51, axis=0)[kept != 0] / (1 - rate), atol=1e-6)
        assert abs(np.mean(kept != 0) - (1 - rate)) < 0.02
        assert_close(np.mean(kept, axis=0), scores[0], atol=0.15)
    assert 0.3 < np.mean((dropped != 0) != (others != 0)) < 0.5  # 2 * 0.3 * 0.7

    def with_dropout(query, key, value):
        return attend_blockwise(query, key, value, Visible(), seed=np.array([3, 5], "uint32"), **options)

    kept = to_numpy(with_dropout(query, key, value)) != 0

    def with_those_kept(query, key, value):
        factor = ops.convert_to_tensor(np.swapaxes(kept, 1, 2) / np.float32(1 - rate))
        return attend(query, key, value, dropout=lambda scores: scores * factor)[0]

    both = [gradients(function, [query, key, value]) for function in (with_dropout, with_those_kept)]
    for got, expected in zip(*both, strict=True):
        assert_close(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("visible", "has_bias", "rate"),
    [(Visible(causal=True), False, 0.0), (Visible(window=3), False, 0.0), (Visible(), True, 0.4)],
    ids=["block by block", "all keys of a window at once", "bias and dropout"],
)
def test_second_derivatives_are_those_of_the_whole(visible, has_bias, rate):
    tensors = [normal(2, 7, 6, 5), normal(2, 11, 3, 5, seed=1), normal(2, 11, 3, 3, seed=2)]
    tensors += [normal(1, 6, 7, 11, seed=3)] if has_bias else []
    options = {"block_size": 4, "dropout": rate, "seed": np.array([3, 5], "uint32") if rate else None}
    factors = 1.0
    if rate:  # with values that are unit vectors, the output is the scores after dropout
        unit = np.broadcast_to(np.eye(11, dtype="float32")[None, :, None], (2, 11, 3, 11))
        dropped = to_numpy(attend_blockwise(*tensors[:2], unit, visible, **options))
        factors = np.swapaxes(dropped != 0, 1, 2).astype("float32") / np.float32(1 - rate)

    def by_blocks(query, key, value, bias=None):
        return attend_blockwise(query, key, value, visible, bias=bias, **options)

    def as_a_whole(query, key, value, bias=None):
        dropout = lambda scores: scores * ops.reshape(ops.convert_to_tensor(factors), scores.shape) if rate else scores
        return attend(query, key, value, mask=visible.whole(7, 11), bias=bias, dropout=dropout, with_scores=False)[0]

    found, expected = (hessian_products(function, tensors) for function in (by_blocks, as_a_whole))
    for product, expected_product in zip(found, expected, strict=True):
        assert_close(product, expected_product, atol=2e-5 * max(1.0, np.abs(expected_product).max()))


def open_pairs(visible, length, size):
    """How many pairs of blocks are computed, as each loop bounds them."""
    query = normal(1, length, 1, 3)
    blocks = Blocks(query, query, query, visible=visible, scale=1.0, dropout=0.0, seed=None, size=size)
    counts = [sum(to_numpy(end) - to_numpy(begin)) for begin, end in (blocks.bounds(1), blocks.bounds(0))]
    assert counts[0] == counts[1]
    return counts[0]


@pytest.mark.parametrize(
    ("visible", "pairs"),
    [
        (Visible(), 64),
        (Visible(causal=True), 36),  # 8 * 9 / 2
        (Visible(causal=True, window=4), 15),  # each block and the one before
        (Visible(window=5), 22),  # and the one behind
        (Visible(keys=(np.arange(32)[None] < 9,)), 24),
        (Visible(queries=np.arange(32)[None] >= 27), 16),
        (Visible(documents=np.repeat(np.int32([1, 2, 3, 0]), 8)[None]), 12),  # documents of two blocks each
        (Visible(documents=np.repeat(np.int32([1, 2, 3, 0]), 8)[None], causal=True), 9),
        (Visible(keys=(np.zeros((1, 32), "bool"),)), 0),
    ],
)
def test_blocks_that_no_query_may_look_at_are_skipped_forward_and_backward(visible, pairs):
    assert open_pairs(visible, 32, 4) == pairs


@pytest.mark.parametrize(
    ("visible", "blocks"),
    [
        (Visible(window=5), 3),
        (Visible(window=4, causal=True), 2),
        (Visible(window=6, start=1), 1),  # the window is in up to 6 blocks, too many
        (Visible(window=5, start=1), 4),
        (Visible(window=5, start=4), 3),
        (Visible(causal=True), 1),
    ],
)
def test_the_blocks_of_a_small_window_are_taken_at_once(visible, blocks):
    query = normal(1, 32, 1, 3)
    options = {"visible": visible, "scale": 1.0, "dropout": 0.0, "seed": None, "size": 4}
    assert Blocks(query, query, query, **options).span == blocks
    assert Blocks(query, query, query, normal(1, 1, 32, 32), **options).span == 1  # with a bias


def test_a_window_over_padding_is_not_computed():
    query = normal(1, 32, 1, 3)
    visible = Visible(window=5, keys=(np.arange(32)[None] < 9,))
    blocks = Blocks(query, query, query, visible=visible, scale=1.0, dropout=0.0, seed=None, size=4)
    begin, end = (to_numpy(x) for x in blocks.key_bounds())
    assert (end - begin).tolist() == [1, 1, 1, 1, 0, 0, 0, 0] and begin.max() <= 8 - 3


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "parts", [{"window": 5}, {"causal": True, "documents": np.repeat([[1, 2, 0, 3]], 6, 1)[:, :23]}]
)
def test_lengths_may_be_unknown_and_xla_computes_the_same(parts):
    import tensorflow as tf

    query = normal(2, 23, 3, 5)
    if "documents" in parts:
        parts = {**parts, "documents": np.repeat(parts["documents"], 2, 0)}

    def slopes(query):
        with tf.GradientTape() as tape:
            tape.watch(query)
            output = attend_blockwise(query, query, query, Visible(**parts), block_size=8)
        return output, tape.gradient(output, query)

    expected = [x.numpy() for x in slopes(tf.constant(query))]
    unknown = tf.function(slopes, input_signature=[tf.TensorSpec((None, None, 3, 5))])
    for function in (unknown, tf.function(slopes, jit_compile=True)):
        for got, wanted in zip(function(tf.constant(query)), expected, strict=True):
            assert_close(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 2, "rotary": True, "sliding_window": 3},
        {"value_dim": 7, "scale": 0.3, "use_gate": True, "qk_norm": True},
        {"attention_axes": (1, 2)},
        {"attention_axes": (2,)},
    ],
)
def test_the_layer_gives_the_same_in_blocks(options):
    axes = options.get("attention_axes")
    x = normal(2, 5, 13, 11) if axes else normal(2, 13, 11)
    whole, in_blocks = (MultiHeadAttention(6, 4, blockwise=blockwise, **options) for blockwise in (False, True))
    for layer in (whole, in_blocks):
        layer.build(x.shape, x.shape)
    randomize(whole)
    in_blocks.set_weights(whole.get_weights())
    masks = {"query_mask": np.arange(13)[None] < [[13], [9]], "value_mask": np.arange(13)[None] >= [[4], [0]]}
    extra = {} if axes else {**masks, "use_causal_mask": True, "attention_bias": normal(1, 6, 13, 13, seed=3)}
    assert_close(in_blocks(x, x, **extra), whole(x, x, **extra), atol=1e-5)


def test_documents_see_themselves_alone_whole_and_in_blocks():
    x, numbers = normal(2, 13, 12), np.array([[1] * 4 + [2] * 6 + [0] * 3, [1] * 13], "int32")
    by_mask, whole, in_blocks = (MultiHeadAttention(3, 5, blockwise=blockwise) for blockwise in (False, False, True))
    expected = by_mask(x, x, attention_mask=(numbers[:, :, None] == numbers[:, None]) & (numbers != 0)[:, None])
    for layer in (whole, in_blocks):
        layer.build(x.shape, x.shape)
        layer.set_weights(by_mask.get_weights())
        # Padding, which sees nothing by `attention_mask` either, gives zeros before the projection.
        assert_close(layer(x, x, document_ids=numbers), expected, atol=2e-6)
    with pytest.raises(ValueError, match=r"`document_ids` must have the shape \(2, 13\)\. Received: .*\(2, 7\)"):
        whole(x, x, document_ids=numbers[:, :7])


@pytest.mark.parametrize(("dtype", "shift"), [("int32", 0), ("int64", 2**40), ("int64", -(2**40))])
def test_documents_may_have_any_numbers_but_0(dtype, shift):
    if dtype == "int64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no int64")
    x = normal(1, 5, 3, 5)
    numbers = np.array([[-7, -7, 0, -1, -1]], dtype) + shift
    mask = (numbers[:, None, :, None] == numbers[:, None, None]) & (numbers != 0)[:, None, None]
    expected = attend(x, x, x, mask=ops.convert_to_tensor(mask))[0]
    visible = Visible(documents=ops.convert_to_tensor(numbers))
    assert_close(attend_blockwise(x, x, x, visible, block_size=2), expected, atol=2e-6)


@pytest.mark.parametrize("axes", [(2,), (1, 2)])
def test_documents_go_along_any_axes(axes):
    x = normal(2, 5, 13, 12)
    numbers = np.sort(np.random.default_rng(3).integers(0, 3, (2, 13) if axes == (2,) else (2, 5, 13)), axis=-1)
    whole, in_blocks = (
        MultiHeadAttention(3, 5, attention_axes=axes, blockwise=blockwise) for blockwise in (False, True)
    )
    expected = whole(x, x, document_ids=numbers)
    in_blocks.build(x.shape, x.shape)
    in_blocks.set_weights(whole.get_weights())
    assert_close(in_blocks(x, x, document_ids=numbers), expected, atol=2e-6)
    if axes == (2,):
        one_by_one = MultiHeadAttention(3, 5)
        one_by_one.build(x.shape[1:], x.shape[1:])
        one_by_one.set_weights(whole.get_weights())
        rows = [one_by_one(x[:, i], x[:, i], document_ids=numbers) for i in range(5)]
        assert_close(expected, np.stack([to_numpy(row) for row in rows], axis=1), atol=2e-6)


@pytest.mark.parametrize("floatx", ["float16", "float64"])
def test_it_does_not_depend_on_floatx(floatx):
    x = normal(2, 13, 3, 5)
    expected = gradients(lambda x: attend_blockwise(x, x, x, Visible(causal=True), block_size=4), [x])
    keras.config.set_floatx(floatx)
    try:
        got = gradients(lambda x: attend_blockwise(x, x, x, Visible(causal=True), block_size=4), [x])
    finally:
        keras.config.set_floatx("float32")
    for one, wanted in zip(got, expected, strict=True):
        assert_close(one, wanted, atol=0)


@pytest.mark.parametrize("blockwise", [None, False, True])
def test_the_config_keeps_it(blockwise):
    config = MultiHeadAttention(3, 5, blockwise=blockwise).get_config()
    assert MultiHeadAttention.from_config(config).blockwise is blockwise


def test_blockwise_is_none_or_a_boolean():
    with pytest.raises(TypeError, match="`blockwise` must be True, False or None. Received: blockwise='off'"):
        MultiHeadAttention(3, 5, blockwise="off")


def test_long_inputs_go_in_blocks_by_themselves_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(dispatch, "LONG", 30)
    whole = dispatch.attend_blockwise
    monkeypatch.setattr(
        dispatch, "attend_blockwise", lambda *args, **options: seen.append(1) or whole(*args, **options)
    )
    layer = MultiHeadAttention(3, 5, flash_attention=False)
    for length, expected in ((5, 0), (6, 1)):
        layer(normal(2, length, 12), normal(2, length, 12))
        assert len(seen) == expected
    layer(normal(2, 6, 12), normal(2, 6, 12), return_attention_scores=True)
    MultiHeadAttention(3, 5, blockwise=False)(normal(2, 6, 12), normal(2, 6, 12))
    MultiHeadAttention(3, 5, hard_attention=True, blockwise=True)(normal(2, 6, 12), normal(2, 6, 12))
    assert len(seen) == 1


def test_the_layer_drops_scores_in_training_alone():
    x = normal(2, 13, 12)
    layer = MultiHeadAttention(3, 5, dropout=0.5, blockwise=True)
    first, second, still = (to_numpy(layer(x, x, training=training)) for training in (True, True, False))
    assert np.abs(first - second).max() > 1e-2
    assert_close(still, layer(x, x), atol=0)


def test_rates_next_to_one_keep_the_scale_of_what_stays():
    seed = ops.convert_to_tensor(np.array([3, 5], "uint32" if keras.backend.backend() == "jax" else "int32"))
    same = np.zeros((1, 512, 1, 3), "float32")
    output = to_numpy(attend_blockwise(same, same, same + 1, Visible(), dropout=1 - 1e-7, seed=seed))
    stayed = output[0, :, 0, 0] * 512 / 2**16  # of each query's scores of 1 / 512
    np.testing.assert_allclose(stayed, np.round(stayed), atol=1e-5)
    assert 0 < stayed.sum() < 20

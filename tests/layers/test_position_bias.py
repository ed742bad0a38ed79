"""Position biases by hand, and against `transformers` for every distance."""

from fractions import Fraction

import keras
import numpy as np
import pytest

from keras_tx.internals.keras_models import get_keras_mask, set_keras_mask
from keras_tx.layers import Decoder, Encoder
from keras_tx.layers.position_bias import AlibiBias, RelativePositionBias, buckets, slopes_of
from tests.tools import assert_close, normal, randomize, to_numpy

DISTANCES = np.arange(-600, 601)


def biases():
    relative = RelativePositionBias(3, num_buckets=10, max_distance=6)
    causal = RelativePositionBias(3, num_buckets=5, max_distance=4, bidirectional=False)
    for layer in (relative, causal):
        layer(normal(1, 1, 4))
        randomize(layer, scale=1.0)
    return {"alibi": AlibiBias(3), "relative": relative, "causal": causal}


each_bias = pytest.mark.parametrize("kind", list(biases()))


def test_slopes_of_the_paper():
    """Section 3: "For our models with 8 heads, the slopes are 1/2, 1/4, ... 1/256"; with 16, 2^-0.5, 2^-1, ... 2^-8."""
    assert_close(slopes_of(8), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    assert_close(slopes_of(16), [2 ** (-i / 2) for i in range(1, 17)])
    assert_close(slopes_of(1), [1 / 256])


@pytest.mark.parametrize("num_heads", [*range(1, 34), 40, 64, 71, 112])
def test_slopes_and_biases_are_those_of_bloom_and_mpt(num_heads):
    pytest.importorskip("transformers")
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    whole = to_numpy(AlibiBias(num_heads)(normal(2, 7, 4)))
    assert whole.shape == (1, num_heads, 7, 7)
    bloom = build_alibi_tensor(torch.ones(1, 7), num_heads, torch.float32).numpy()  # (N, 1, S)
    mpt = build_mpt_alibi_tensor(num_heads, 7).numpy()
    for i in range(7):  # theirs is 0 at the first or last key, ours where a query looks at itself
        for theirs in (bloom, mpt):
            expected = theirs[:, 0, : i + 1] - theirs[:, 0, i : i + 1]
            assert_close(whole[0, :, i, : i + 1], expected, rtol=2e-6)


@pytest.mark.parametrize("num_heads", [1, 3, 8, 12])
@pytest.mark.parametrize("bias_max", [4, 8, 11.5])
def test_the_largest_exponent_of_slopes_is_that_of_mpt(num_heads, bias_max):
    pytest.importorskip("transformers")
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    layer = AlibiBias(num_heads, alibi_bias_max=bias_max)
    mpt = build_mpt_alibi_tensor(num_heads, 7, alibi_bias_max=bias_max).numpy()
    last = to_numpy(layer(normal(2, 7, 4)))[0, :, -1]
    assert_close(last, mpt[:, 0], rtol=3e-6)
    assert AlibiBias.from_config(layer.get_config()).alibi_bias_max == bias_max


def test_alibi_is_minus_the_distance_to_both_sides_times_the_slope():
    bias = to_numpy(AlibiBias(6)(normal(2, 5, 4), normal(2, 7, 3)))
    assert bias.shape == (1, 6, 5, 7)
    slopes = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]  # of 4 heads, then the first and third of 8
    for n, i, j in np.ndindex(6, 5, 7):
        assert bias[0, n, i, j] == -slopes[n] * abs(i - j)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("max_distance", [17, 20, 127, 128, 300, 1000])
def test_buckets_are_those_of_transformers(max_distance, bidirectional):
    pytest.importorskip("transformers")
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    for num_buckets in (4, 5, 7, 12, 31, 32):
        expected = T5Attention._relative_position_bucket(
            torch.tensor(DISTANCES), bidirectional, num_buckets, max_distance
        )
        found = buckets(DISTANCES, num_buckets, max_distance, bidirectional)
        np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (20, 50), (6, 9)])
def test_buckets_are_the_formula_in_whole_numbers(num_buckets, max_distance):
    """Bucket e + k begins where log(d / e) / log(m / e) * (n - e) >= k, so where (d / e)^(n - e) >= (m / e)^k."""
    exact = num_buckets // 2
    for distance in range(601):
        bucket = distance
        if distance >= exact:
            ranges = num_buckets - exact
            reached = [
                k for k in range(ranges) if Fraction(distance, exact) ** ranges >= Fraction(max_distance, exact) ** k
            ]
            bucket = exact + max(reached)
        assert buckets(np.array(-distance), num_buckets, max_distance, False) == bucket
        assert buckets(np.array(-distance), 2 * num_buckets, max_distance, True) == bucket
        if distance:
            assert buckets(np.array(distance), num_buckets, max_distance, False) == 0
            assert buckets(np.array(distance), 2 * num_buckets, max_distance, True) == num_buckets + bucket


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_relative_bias_is_the_one_of_t5(bidirectional):
    pytest.importorskip("transformers")
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=12,
        d_kv=4,
        num_heads=3,
        relative_attention_num_buckets=14,
        relative_attention_max_distance=11,
        is_decoder=not bidirectional,
    )
    reference = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    layer = RelativePositionBias(3, num_buckets=14, max_distance=11, bidirectional=bidirectional)
    layer.build((2, 5, 12))
    layer.set_weights([reference.relative_attention_bias.weight.detach().numpy()])
    expected = reference.compute_bias(17, 19).detach().numpy()
    np.testing.assert_array_equal(to_numpy(layer(normal(2, 17, 4), normal(2, 19, 4))), expected)
    expected = reference.compute_bias(2, 23, past_seen_tokens=13).detach().numpy()
    np.testing.assert_array_equal(to_numpy(layer(normal(2, 2, 4), start=13, num_keys=23)), expected)


@each_bias
def test_a_step_is_a_row_of_the_whole(kind):
    layer = biases()[kind]
    whole = to_numpy(layer(normal(2, 11, 4)))
    assert whole.shape == (1, 3, 11, 11) and whole.dtype == "float32"
    for start, length in ((0, 1), (4, 1), (10, 1), (3, 5)):
        x = normal(2, length, 4)
        rows = whole[:, :, start : start + length]
        np.testing.assert_array_equal(to_numpy(layer(x, start=start, num_keys=11)), rows)
        np.testing.assert_array_equal(to_numpy(layer(x, start=np.int64(start), num_keys=11)), rows)
        np.testing.assert_array_equal(to_numpy(layer(x, normal(2, 11, 3), start=start)), rows)
    np.testing.assert_array_equal(to_numpy(layer(normal(2, 5, 4), num_keys=11)), whole[:, :, :5])


@each_bias
@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_the_steps_of_a_compiled_loop_are_the_rows_of_the_whole(kind, jit_compile):
    import tensorflow as tf

    layer = biases()[kind]

    @tf.function(jit_compile=jit_compile)
    def rows(x):
        def step(start, found):
            return start + 1, found.write(start, layer(x, start=start, num_keys=11)[0, :, 0])

        found = tf.TensorArray("float32", 11, element_shape=(3, 11))
        return tf.while_loop(lambda start, found: start < 11, step, (0, found))[1].stack()

    assert_close(keras.ops.transpose(rows(normal(2, 1, 4)), (1, 0, 2))[None], layer(normal(2, 11, 4)))


@each_bias
def test_only_differences_count_however_long_the_sequence(kind):
    layer = biases()[kind]
    whole = to_numpy(layer(normal(1, 40, 4)))
    np.testing.assert_array_equal(whole[..., 29:, 29:], to_numpy(layer(normal(1, 11, 4))))
    assert to_numpy(layer(normal(2, 0, 4))).shape == (1, 3, 0, 0)


@each_bias
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_bias_is_single_precision_under_any_policy(kind, policy):
    exact = biases()[kind]
    layer = type(exact).from_config({**exact.get_config(), "dtype": policy})
    layer.build((2, 300, 4))
    layer.set_weights(exact.get_weights())
    bias = layer(normal(1, 300, 4))
    assert keras.backend.standardize_dtype(bias.dtype) == "float32"
    np.testing.assert_array_equal(to_numpy(bias), to_numpy(exact(normal(1, 300, 4))))


def test_the_table_learns_from_every_distance_in_its_bucket():
    layer = RelativePositionBias(2, num_buckets=4, max_distance=3, bidirectional=False, embeddings_initializer="zeros")
    query = keras.Input((None, 3))
    model = keras.Model(query, layer(query))
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, bias: keras.ops.sum(y * bias))
    weight = normal(1, 2, 5, 5)
    model.fit(normal(1, 5, 3), weight, verbose=0)
    expected = np.zeros((4, 2))
    for n, i, j in np.ndindex(2, 5, 5):
        expected[min(max(i - j, 0), 3), n] -= weight[0, n, i, j]
    assert_close(layer.embeddings, expected, atol=3e-6)


@each_bias
def test_the_mask_of_the_query_is_not_handed_on(kind):
    x = keras.ops.convert_to_tensor(normal(2, 5, 4))
    set_keras_mask(x, keras.ops.ones((2, 5), "bool"))
    assert get_keras_mask(biases()[kind](x)) is None  # and no warning that a mask was lost


@each_bias
def test_symbolic_lengths(kind):
    query, key, start = keras.Input((None, 4)), keras.Input((7, 3)), keras.Input(batch_shape=(), dtype="int32")
    layer = biases()[kind]
    assert layer(query).shape == (1, 3, None, None)
    assert layer(query, key).shape == (1, 3, None, 7)
    steps = keras.Model([query, start], layer(query, start=start, num_keys=11))
    assert steps.output_shape == (1, 3, None, 11)
    found = steps([normal(2, 2, 4), np.array(5, "int32")])
    assert_close(found, layer(normal(2, 2, 4), start=5, num_keys=11))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AlibiBias(3, alibi_bias_max=0), "`alibi_bias_max` must be .* Received: alibi_bias_max=0"),
        (lambda: AlibiBias(0), "`num_heads` must be a positive integer. Received: num_heads=0"),
        (lambda: RelativePositionBias(2.5), "`num_heads` must be a positive integer. Received: num_heads=2.5"),
        (lambda: RelativePositionBias(2, num_buckets=0), "`num_buckets` must be a positive integer. .*num_buckets=0"),
        (
            lambda: RelativePositionBias(2, max_distance=-1),
            "`max_distance` must be a positive integer. .*max_distance=-1",
        ),
        (lambda: RelativePositionBias(2, num_buckets=3), "must be at least 4. .*num_buckets=3, bidirectional=True"),
        (
            lambda: RelativePositionBias(2, num_buckets=1, bidirectional=False),
            "must be at least 2. .*num_buckets=1, bidirectional=False",
        ),
        (
            lambda: RelativePositionBias(2, max_distance=8),
            "`max_distance` must be above 8, .* Received: max_distance=8, num_buckets=32, bidirectional=True",
        ),
        (
            lambda: RelativePositionBias(2, max_distance=16, bidirectional=False),
            "`max_distance` must be above 16, .* Received: max_distance=16, num_buckets=32, bidirectional=False",
        ),
    ],
)
def test_constructors_refuse_what_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"start": 7, "num_keys": 11},
            r"in the slots .* start=7, query.shape=\(2, 5, 4\), key.shape=None, num_keys=11",
        ),
        (
            {"start": -1, "num_keys": 11},
            r"in the slots .* start=-1, query.shape=\(2, 5, 4\), key.shape=None, num_keys=11",
        ),
        ({"num_keys": 4}, r"in the slots .* start=None, query.shape=\(2, 5, 4\), key.shape=None, num_keys=4"),
        ({"start": 1}, r"in the slots .* Give `num_keys`, .* start=1, .* key.shape=None, num_keys=None"),
        ({"key": normal(2, 7, 3), "start": 3}, r"in the slots .* start=3, .* key.shape=\(2, 7, 3\), num_keys=None"),
        ({"num_keys": 0}, "`num_keys` must be a positive integer or None. Received: num_keys=0"),
        ({"key": normal(2, 7, 3), "num_keys": 9}, r"not be given together, .* key.shape=\(2, 7, 3\), num_keys=9"),
        ({"start": 1.5}, "`start` must be an integer or a scalar integer tensor. Received: start=1.5"),
        ({"start": True}, "`start` must be an integer or a scalar integer tensor. Received: start=True"),
        (
            {"start": np.array([1, 2])},
            r"`start` must be an integer or a scalar integer tensor. Received: start=.*\[1,? 2\]",
        ),
        ({"start": np.array(1.0, "float32")}, "`start` must be integers; .* Received: start of dtype float32"),
    ],
)
def test_slots_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AlibiBias(3)(normal(2, 5, 4), **arguments)


@each_bias
def test_whole_sequences_may_have_more_queries_than_keys(kind):
    query, layer = normal(2, 5, 4), biases()[kind]
    assert_close(layer(query, normal(2, 3, 4)), layer(query)[..., :3])


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (
            np.ones((2, 5, 5), "bool"),
            "`attention_bias` must be of floats, .* `attention_mask`. Received: .* dtype bool",
        ),
        (np.ones((2, 5, 5), "int32"), "`attention_bias` must be of floats, .* Received: attention_bias of dtype int32"),
        (
            np.ones(5, "float32"),
            r"`attention_bias` must have at least 2 axes, .* Received: attention_bias.shape=\(5,\)",
        ),
        (normal(2, 7, 5, 5), r"`attention_bias` must broadcast to \(2, 3, 5, 5\). Received: .*=\(2, 7, 5, 5\)"),
        (normal(2, 5, 11), r"`attention_bias` must broadcast to \(2, 3, 5, 5\). Received: .*=\(2, 1, 5, 11\)"),
    ],
)
@pytest.mark.parametrize("stack", [Encoder, Decoder])
def test_a_bias_is_checked_with_and_without_a_position_bias(stack, bias, text):
    for position_bias in (None, "alibi", "relative"):
        with pytest.raises(ValueError, match=text):
            stack(1, 17, 3, position_bias=position_bias)(normal(2, 5, 6), attention_bias=bias)


@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5), (2, 1, 5, 5), (1, 3, 5, 5)])
def test_a_bias_of_few_axes_is_added_to_the_position_bias(shape):
    x, bias = normal(2, 5, 6), normal(*shape)
    layer = Encoder(1, 17, 3, position_bias="alibi")
    alone = Encoder(1, 17, 3)
    alone(x)
    expected = layer(x, attention_bias=bias)
    alone.set_weights(layer.get_weights())
    whole = bias if len(shape) != 3 else bias[:, None]
    assert_close(alone(x, attention_bias=whole + to_numpy(AlibiBias(3)(x))), expected)

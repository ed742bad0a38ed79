"""In float64 everything is computed in float64, by every way of attention; against NumPy at 1e-12."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import layers
from keras_tx.layers.attention.blockwise import attend_blockwise
from keras_tx.layers.attention.dense import attend, attend_cached
from keras_tx.layers.attention.fused import prefers_fused
from keras_tx.layers.cache import KeyValue
from keras_tx.layers.masks import Visible
from keras_tx.layers.positions import sinusoids
from keras_tx.layers.precision import wide_dtype
from keras_tx.layers.residual import make_norm
from keras_tx.models.pooling import TokenPooling
from tests.layers import test_dense_attention as dense_attention
from tests.tools import gradients, randomize, to_numpy
from tests.tools import normal as float32_normal

BACKEND = keras.backend.backend()
rounded_by_keras = pytest.mark.skipif(BACKEND == "jax", reason="Keras' sine of float64 is float32 on JAX")
B, T, S, N, K, H, V = 2, 9, 11, 6, 2, 5, 7


@pytest.fixture(autouse=True)
def float64_on_jax():
    """JAX has float64 only on request."""
    if BACKEND == "jax":
        import jax

        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            yield
    else:
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def assert_exact(actual, expected, atol=1e-12):
    assert wide_dtype(actual) == "float64"
    np.testing.assert_allclose(to_numpy(actual), to_numpy(expected), atol=atol, rtol=1e-12)


def some_attention():
    query, key, value = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, V, seed=2)
    real = np.random.default_rng(3).random((B, S)) < 0.7
    return query, key, value, real, normal(1, N, T, S, seed=4)


def by_the_equation(query, key, value, real, bias):
    mask, scale = real[:, None, None], 1 / np.sqrt(query.shape[3])
    return dense_attention.by_the_equation(query, key, value, mask, bias, scale)


def test_the_wider_dtype():
    assert wide_dtype("float16", "bfloat16") == wide_dtype(np.ones(2, "float32")) == "float32"
    assert wide_dtype("float32", np.ones(2)) == "float64"


@pytest.mark.parametrize("with_bias", [False, True])
def test_every_way_of_attention_is_exact(with_bias):
    query, key, value, real, bias = some_attention()
    expected, expected_scores = by_the_equation(query, key, value, real, bias if with_bias else np.zeros((1, 1, 1, 1)))
    bias = bias if with_bias else None
    visible = Visible(keys=(real,))
    output, scores = attend(query, key, value, mask=visible.whole(T, S), bias=bias)
    assert_exact(output, expected)
    assert_exact(scores, expected_scores)
    for size in (4, 16):
        assert_exact(attend_blockwise(query, key, value, visible, bias=bias, block_size=size), expected)
    tensors = [ops.convert_to_tensor(x) for x in (query, key, value)]
    assert not prefers_fused(*tensors, visible, bias=bias, training=False, long=False)  # Keras' kernels would round
    if BACKEND == "tensorflow":
        cache = KeyValue(*[ops.swapaxes(x, 1, 2) for x in tensors[1:]])
        of_first = None if bias is None else bias[:, :, :1]
        assert_exact(attend_cached(tensors[0][:, :1], cache, visible, bias=of_first), expected[:, :1])


def test_the_best_key_in_float64():
    query, key, value, real, _ = some_attention()
    _, scores = by_the_equation(query, key, value, real, np.zeros((1, 1, 1, 1)))
    best = np.repeat(value, N // K, axis=2)[np.arange(B)[:, None, None], scores.argmax(-1), np.arange(N)[None, :, None]]
    output, _ = attend(query, key, value, mask=real[:, None, None], hard=True)
    assert_exact(output, np.swapaxes(best, 1, 2))


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_of_blocks_are_exact(window):
    query, key, value = normal(B, S, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, V, seed=2)
    visible = Visible(causal=True, window=window)
    by_blocks = lambda *x: attend_blockwise(*x, visible, block_size=4)
    as_a_whole = lambda *x: attend(*x, mask=visible.whole(S, S))[0]
    for one, other in zip(
        gradients(by_blocks, [query, key, value]), gradients(as_a_whole, [query, key, value]), strict=True
    ):
        assert_exact(one, other)


@rounded_by_keras
def test_positions_are_exact():
    positions = np.array([[0, 1, 5, 4099]])
    frequencies = 100.0 ** (-np.arange(4) / 4)
    angles = positions[..., None] * frequencies
    both = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    encoding = sinusoids(positions, 8, max_wavelength=100, layout="concatenated", dtype="float64")
    assert_exact(encoding, both)
    x = normal(1, 4, 8)
    layer = layers.SinusoidalPositionalEncoding(max_wavelength=100, layout="concatenated", dtype="float64")
    assert_exact(layer(x, positions=positions), x + both)
    heads = normal(1, 4, 3, 8)
    turned = (heads[..., :4] + 1j * heads[..., 4:]) * np.exp(1j * angles)[:, :, None]
    turned = np.concatenate([turned.real, turned.imag], axis=-1)
    assert_exact(layers.RotaryEmbedding(base=100, dtype="float64")(heads, positions=positions), turned)
    distances = np.abs(np.arange(4)[:, None] - np.arange(4)[None])
    bias = layers.AlibiBias(num_heads=3, dtype="float64")(x)
    assert_exact(bias, -np.array([2.0**-4, 2.0**-8, 2.0**-2])[None, :, None, None] * distances)


@rounded_by_keras
def test_dynamic_positions_are_exact():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}
    x, positions = normal(1, 7, 3, 8), np.arange(7)
    given, counted = (
        layers.RotaryEmbedding(scaling=scaling, dtype="float64")(x, positions=p) for p in (positions, None)
    )
    assert_exact(given, counted)  # of a tensor, and of a number


@rounded_by_keras
@pytest.mark.parametrize("blockwise", [False, True])
def test_attention_in_layers_is_exact(blockwise):
    layer = layers.MultiHeadAttention(N, 4, V, num_key_value_heads=K, rotary=True, blockwise=blockwise, dtype="float64")
    x, real = normal(B, S, 12), np.random.default_rng(3).random((B, S)) < 0.7
    layer.build(x.shape, x.shape)
    randomize(layer)
    weights = [to_numpy(w) for w in layer.weights]
    query, key, value = (np.einsum("btd,dnh->btnh", x, weights[i]) + weights[i + 1] for i in (0, 2, 4))
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    query, key = (to_numpy(layer.rotary(one, positions=positions)) for one in (query, key))
    expected = by_the_equation(query, key, value, real, np.zeros((1, 1, 1, 1)))[0]
    expected = np.einsum("btnh,nhd->btd", expected, weights[6]) + weights[7]
    output = layer(x, x, query_mask=real, value_mask=real)
    assert_exact(output[0][real[0]], expected[0][real[0]])


@rounded_by_keras
def test_attention_of_stacks_is_exact():
    x = normal(B, S, 12)
    for bias in ("alibi", "relative", layers.AlibiBias(3), layers.RelativePositionBias(3)):
        options = {"position_bias": bias, "normalization": "layer_norm", "dtype": "float64"}
        dense = layers.Encoder(2, 17, 3, attention_options={"blockwise": False}, **options)
        output, scores = dense(x, return_attention_scores=True)
        assert {keras.backend.standardize_dtype(y.dtype) for y in (output, scores)} == {"float64"}
        assert wide_dtype(dense.position_bias(x)) == "float64"
        blocks = layers.Encoder.from_config({**dense.get_config(), "attention_options": {"blockwise": True}})
        blocks.build(x.shape)
        blocks.set_weights(dense.get_weights())
        assert_exact(blocks(x), output)


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_no_bias", "rms_norm"])
def test_norms_and_their_gradients_are_exact(name):
    layer = make_norm(name, 0.03, dtype="float64")
    layer.build((None, None, 5))
    weights = [to_numpy(w) for w in randomize(layer).weights]
    x = 2.0 + normal(B, T, 5)
    centred = x if name == "rms_norm" else x - x.mean(-1, keepdims=True)
    root = np.sqrt((centred**2).mean(-1, keepdims=True) + 0.03)
    output, slope = gradients(layer, [x])
    assert_exact(output, centred / root * weights[0] + (weights[1] if len(weights) > 1 else 0.0))
    assert slope.dtype == np.float64
    upstream = float32_normal(*x.shape, seed=99) * weights[0]  # with the fixed numbers of `gradients`
    expected = (upstream - centred * (upstream * centred).mean(-1, keepdims=True) / root**2) / root
    assert_exact(slope, expected if name == "rms_norm" else expected - expected.mean(-1, keepdims=True))


def test_pooling_is_exact():
    x, real = normal(B, T, 5), np.random.default_rng(3).random((B, T)) < 0.7
    expected = (x * real[..., None]).sum(1) / real.sum(1, keepdims=True)
    assert_exact(TokenPooling("mean", dtype="float64")(x, mask=real), expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "float64"])
def test_symbolic_outputs_have_the_dtype_of_the_computed_ones(policy):
    x, heads = np.ones((B, T, 12), "float32"), np.ones((B, T, 3, 4), "float32")
    for make, given, options in (
        (lambda: layers.RotaryEmbedding(dtype=policy), heads, {}),
        (lambda: layers.AlibiBias(3, dtype=policy), x, {}),
        (lambda: layers.EncoderLayer(17, 3, dtype=policy), x, {"return_attention_scores": True}),
        (lambda: layers.Decoder(2, 17, 3, dtype=policy), x, {"return_attention_scores": True}),
        (lambda: layers.Encoder(2, 17, 3, dtype=policy), x, {"return_attention_scores": True}),
    ):
        layer = make()
        computed = keras.tree.flatten(layer(given, **options))
        specs = keras.tree.flatten(layer.compute_output_spec(keras.KerasTensor(given.shape, "float32"), **options))
        assert [y.dtype for y in specs] == [keras.backend.standardize_dtype(y.dtype) for y in computed]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.MultiHeadAttention(N, 4, rotary=True, dtype="float32"),
        lambda: layers.Encoder(1, 7, N, position_bias="relative", dtype="float32"),
        lambda: layers.Encoder(1, 7, N, attention_options={"rotary": True}, dtype="float32"),
        lambda: layers.TokenEmbedding(9, 12, position_encoding=layers.SinusoidalPositionalEncoding(), dtype="float32"),
    ],
    ids=["rotary", "bias", "rotary of a stack", "positions"],
)
def test_a_float32_layer_is_one_under_a_policy_of_half_precision(make, policy):
    made = []
    for one in ("float32", policy):
        keras.config.set_dtype_policy(one)
        try:
            keras.utils.set_random_seed(1)
            layer = make()
            x = (
                np.arange(18).reshape(2, 9) % 9
                if isinstance(layer, layers.TokenEmbedding)
                else float32_normal(2, 9, 12)
            )
            arguments = (x, x) if isinstance(layer, layers.MultiHeadAttention) else (x,)
            layer(*arguments)
            made.append(to_numpy(randomize(layer)(*arguments)))
        finally:
            keras.config.set_dtype_policy("float32")
    np.testing.assert_array_equal(*made)

"""LoRA: what it computes, learns and saves, of whole and of quantized layers, against the equation in float64.

Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.projection import HeadProjection, Projection, TiedEmbedding
from tests.tools import assert_close, gradients, normal, to_numpy

pytestmark = pytest.mark.filterwarnings("ignore:The use of `x.T`:UserWarning")  # of Keras on PyTorch
D, N, H, F, V, RANK = 32, 3, 6, 11, 17, 2
MODES = {
    "float": None,
    "int8": {"mode": "int8"},
    "int4": {"mode": "int4", "config": keras.quantizers.Int4QuantizationConfig(block_size=None)},
    "int4 in blocks": {"mode": "int4", "config": keras.quantizers.Int4QuantizationConfig(block_size=8)},
}
KINDS = ("dense", "to heads", "from heads", "gate", "table", "logits")
modes = pytest.mark.parametrize("mode", MODES)
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind, mode="float", seed=0, dtype="float32"):
    """A layer of a kind, built and quantized, and inputs for it."""
    keras.utils.set_random_seed(seed)
    if kind == "dense":
        layer, x = Projection(F, bias_initializer="normal", dtype=dtype), normal(5, D)
    elif kind == "from heads":
        layer, x = HeadProjection("abcd,cde->abe", (None, F), bias_axes="e", dtype=dtype), normal(2, 5, N, H)
    elif kind in ("table", "logits"):
        layer = TiedEmbedding(V, D, embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0), dtype=dtype)
        x = np.arange(V)[None] if kind == "table" else normal(2, 5, D)
    else:
        activation = "sigmoid" if kind == "gate" else None
        layer = HeadProjection("abc,cde->abde", (None, N, H), bias_axes="de", activation=activation, dtype=dtype)
        x = normal(2, 5, D)
    layer.build(np.shape(x)[:1] + (None,) * (np.ndim(x) - 2) + np.shape(x)[-1:] if kind != "from heads" else x.shape)
    if MODES[mode]:
        layer.quantize(**MODES[mode])
    return layer, x


def called(layer, kind, x):
    return layer(x, reverse=True) if kind == "logits" else layer(x)


def with_lora(layer, seed=1, **kwargs):
    """Enables LoRA and gives A and B random numbers; returns what they add to the kernel, in float64."""
    layer.enable_lora(RANK, **kwargs)
    random = np.random.default_rng(seed)
    first, second = layer.lora_matrices()
    for one in (first, second):
        one.assign(0.3 * random.normal(size=one.shape))
    product = np.tensordot(*(to_numpy(one).astype("float64") for one in (first, second)), 1)
    return layer.lora_alpha / RANK * product


def product_with(kind, x, update):
    """What a kernel or table adds to the outputs, in float64."""
    x = np.asarray(x)
    if kind == "table":
        return update[x]
    if kind == "logits":
        return x.astype("float64") @ update.T
    return np.tensordot(x.astype("float64"), update, 2 if kind == "from heads" else 1)


@modes
@kinds
def test_outputs_change_by_alpha_over_rank_times_a_b(kind, mode):
    layer, x = made(kind, mode)
    before = to_numpy(called(layer, kind, x)).astype("float64")
    update = with_lora(layer, lora_alpha=3.0)
    if kind == "gate":  # sums before the activation
        before = np.log(before / (1 - before))
    expected = before + product_with(kind, x, update)
    if kind == "gate":
        expected = 1 / (1 + np.exp(-expected))
    assert_close(called(layer, kind, x), expected, atol=2e-5)


@modes
@kinds
def test_in_mixed_bfloat16_outputs_and_gradients_stay_near_those_in_float32(kind, mode):
    found = []
    for dtype in ("float32", "mixed_bfloat16"):
        layer, x = made(kind, mode, dtype=dtype)
        with_lora(layer)
        if kind == "table" or (mode != "float" and kind != "logits"):  # Keras' own layers fail in eager TensorFlow
            found.append([to_numpy(ops.cast(called(layer, kind, x), "float32"))])
        else:
            found.append(gradients(lambda x, layer=layer: ops.cast(called(layer, kind, x), "float32"), [x]))
    for one, two in zip(*found, strict=True):
        assert_close(two, one, atol=0.04 * np.abs(one).max())


@modes
@kinds
def test_new_lora_changes_nothing_and_its_gradients_are_those_of_the_equation(kind, mode):
    layer, x = made(kind, mode)
    before = to_numpy(called(layer, kind, x))
    layer.enable_lora(RANK)
    assert_close(called(layer, kind, x), before, atol=0)
    first, second = layer.lora_matrices()
    assert {id(one) for one in layer.trainable_variables} == {
        id(one) for one in (first, second, getattr(layer, "bias", None)) if one is not None
    }


@modes
@kinds
def test_saved_weights_contain_what_lora_adds(kind, mode, tmp_path):
    layer, x = made(kind, mode)
    with_lora(layer)
    expected = to_numpy(called(layer, kind, x))
    store = {}
    layer.save_own_variables(store)
    other, _ = made(kind, mode, seed=4)
    other.load_own_variables({name: to_numpy(value) for name, value in store.items()})
    scale = np.abs(expected).max()
    atol = {"float": 1e-5, "int8": 0.03 * scale, "int4": 0.3 * scale, "int4 in blocks": 0.25 * scale}[mode]
    assert_close(called(other, kind, x), expected, atol=atol)


@modes
@kinds
def test_a_product_of_zero_leaves_saved_weights_as_they_are(kind, mode):
    layer, _ = made(kind, mode)
    before, after = {}, {}
    layer.save_own_variables(before)
    layer.enable_lora(RANK)
    layer.save_own_variables(after)
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(to_numpy(after[name]), to_numpy(before[name]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gate"])
def test_blocks_of_one_sign_are_saved_as_quantize_rounds_them(kind):
    layer, x = made(kind)
    variable = layer.weights[0]
    variable.assign(1 + np.abs(to_numpy(variable)))
    expected = to_numpy(called(layer, kind, x))
    layer.quantize(**MODES["int4 in blocks"])
    error = np.abs(to_numpy(called(layer, kind, x)) - expected).max()
    first, second = (layer.enable_lora(RANK), layer.lora_matrices())[1]
    first.assign(ops.ones(first.shape))
    second.assign(ops.ones(second.shape) * 1e-6)
    store = {}
    layer.save_own_variables(store)
    other, _ = made(kind, "int4 in blocks", seed=4)
    other.load_own_variables({name: to_numpy(value) for name, value in store.items()})
    assert np.abs(to_numpy(called(other, kind, x)) - expected).max() < 1.5 * error


@modes
@kinds
def test_loading_weights_lets_lora_learn_on(kind, mode):
    layer, x = made(kind, mode)
    store = {}
    layer.save_own_variables(store)
    expected = to_numpy(called(layer, kind, x))
    with_lora(layer)
    layer.load_own_variables({name: to_numpy(value) for name, value in store.items()})
    first, second = layer.lora_matrices()
    assert np.abs(to_numpy(first)).max() > 0 and np.abs(to_numpy(second)).max() == 0
    assert_close(called(layer, kind, x), expected, atol=1e-6)


def test_a_matrix_to_heads_learns_any_update_of_the_rank():
    """Keras' form reaches a part of it, as all heads share B."""
    layer, _ = made("to heads")
    target = np.tensordot(normal(D, RANK), normal(RANK, N, H, seed=3), 1)
    layer.enable_lora(RANK)
    first, second = layer.lora_matrices()
    assert (tuple(first.shape), tuple(second.shape)) == ((D, RANK), (RANK, N, H))
    left, sizes, right = np.linalg.svd(target.reshape(D, -1), full_matrices=False)
    first.assign(left[:, :RANK] * sizes[:RANK])
    second.assign(right[:RANK].reshape(RANK, N, H))
    assert_close(layer.lora_update(), target, atol=1e-4)


def test_a_begins_as_he_draws_it_for_the_inputs_of_the_matrix():
    layer = HeadProjection("abc,cde->abde", (None, 8, 32))
    layer.build((None, None, 256))
    layer.enable_lora(4)
    limit = np.sqrt(6 / 256)
    first = to_numpy(layer.lora_kernel_a)
    assert 0.9 * limit < np.abs(first).max() <= limit and first.std() == pytest.approx(limit / np.sqrt(3), rel=0.1)


@pytest.mark.parametrize("mode", ["int8", "int4", "int4 in blocks"])
@pytest.mark.parametrize("kind", ["dense", "to heads", "from heads", "logits"])
def test_inputs_of_quantized_layers_have_the_gradient_of_the_weights(kind, mode):
    layer, x = made(kind, mode)
    table = to_numpy(layer(np.arange(V)[None]))[0] if kind == "logits" else None
    layer.enable_lora(RANK)
    output, found = gradients(lambda x: called(layer, kind, x), [x])
    weights = normal(*output.shape, seed=99)  # of the sum whose gradient it is
    if kind == "logits":
        expected = weights @ table
    else:
        size = D if kind != "from heads" else N * H
        unit = np.eye(size, dtype="float32").reshape(size, 1, *x.shape[-1 if kind != "from heads" else -2 :])
        unit = unit[:, 0] if kind == "dense" else unit
        zero = to_numpy(called(layer, kind, np.zeros_like(unit)))
        kernel = (to_numpy(called(layer, kind, unit)) - zero).reshape(size, -1)
        expected = (weights.reshape(-1, kernel.shape[1]) @ kernel.T).reshape(x.shape)
    assert_close(found, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("rank", [0, -1, 1.5, None])
def test_a_rank_that_is_no_positive_integer_is_refused(rank):
    for kind in ("dense", "to heads", "table"):
        with pytest.raises(ValueError, match="`rank` must be a positive integer. Received: rank="):
            made(kind)[0].enable_lora(rank)


def test_other_wrong_uses_are_keras_own_errors():
    layer = MultiHeadAttention(2, 3, kernel_constraint="non_neg")
    layer(normal(2, 5, 4), normal(2, 5, 4))
    with pytest.raises(ValueError, match="Lora is incompatible with kernel constraints"):
        layer.query_dense.enable_lora(2)
    layer, _ = made("to heads")
    layer.enable_lora(2)
    with pytest.raises(ValueError, match="lora is already enabled"):
        layer.enable_lora(2)
    with pytest.raises(ValueError, match="isn't yet built"):
        HeadProjection("abc,cde->abde", (None, 2, 3)).enable_lora(2)

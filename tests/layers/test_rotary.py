"""Rotary positions against complex numbers in float64, and against `transformers` for every kind of scaling."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.internals.keras_models import get_keras_mask, set_keras_mask
from keras_tx.layers.rotary import RotaryEmbedding, rotate
from keras_tx.layers.rotary_scaling import attention_factor, check_scaling, frequencies
from tests.tools import assert_close, normal, to_numpy

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 11}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
SCALINGS = [
    {"rope_type": "linear", "factor": 2.5},
    DYNAMIC,
    {**DYNAMIC, "original_max_position_embeddings": 2048},  # longer than any sequence here: nothing changes
    LLAMA3,
    {**LLAMA3, "factor": 32, "original_max_position_embeddings": 8192, "high_freq_factor": 1.5},
    YARN,
    {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.7},
    {**YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "mscale": 0.7, "factor": 40, "original_max_position_embeddings": 4096},  # alone it does not count
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0, "attention_factor": None},
    {**YARN, "truncate": False, "beta_fast": 2, "beta_slow": 2},  # a step
    {**YARN, "original_max_position_embeddings": 3},  # shorter than one turn
]


def by_complex_numbers(x, positions, fraction=1.0, base=10000, layout="half"):
    """Section 3.2: the pair (a, b) as a + ib, times e^(i position theta_j) with theta_j = base^(-2j / R)."""
    x = x.astype("float64")
    size = int(x.shape[-1] * fraction)
    first, second = {
        "half": (slice(0, size // 2), slice(size // 2, size)),
        "interleaved": (slice(0, size, 2), slice(1, size, 2)),
    }[layout]
    theta = np.array([base ** (-2 * j / size) for j in range(size // 2)])
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.asarray(positions)[..., None, None] * theta)
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def transformers_rotary(size, scaling, base=10000, fraction=1.0):
    """GPT-NeoX's rotary layer: the one that takes both a fraction and every kind of scaling."""
    pytest.importorskip("transformers")
    from transformers.models.gpt_neox import configuration_gpt_neox, modeling_gpt_neox

    parameters = {**scaling, "rope_theta": base, "partial_rotary_factor": fraction}
    length = scaling.get("original_max_position_embeddings", 64)
    config = configuration_gpt_neox.GPTNeoXConfig(
        hidden_size=2 * size, num_attention_heads=2, max_position_embeddings=length, rope_parameters=parameters
    )
    return modeling_gpt_neox.GPTNeoXRotaryEmbedding(config), modeling_gpt_neox.apply_rotary_pos_emb


@given(
    pairs=st.integers(1, 7),
    rest=st.integers(0, 3),
    positions=st.lists(st.integers(0, 900), max_size=5),
    base=st.sampled_from([10000, 500000.0, 1.5]),
    layout=st.sampled_from(["half", "interleaved"]),
)
def test_pairs_turn_as_complex_numbers_do(pairs, rest, positions, base, layout):
    size = 2 * pairs + rest
    x, positions = normal(2, len(positions), 3, size), np.array(positions, "int32")
    fraction = min(1.0, (2 * pairs + 0.5) / size)
    layer = RotaryEmbedding(base=base, layout=layout, fraction=fraction)
    expected = by_complex_numbers(x, positions, fraction, base, layout)
    assert_close(layer(x, positions=positions), expected, atol=5e-4)  # an ulp of an angle of 900 is 6e-5
    np.testing.assert_array_equal(to_numpy(layer(x))[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_positions_are_counted_or_given_for_all_or_for_each(layout):
    x = normal(2, 5, 3, 14)
    layer = RotaryEmbedding(layout=layout)
    assert_close(layer(x), by_complex_numbers(x, np.arange(5), layout=layout), atol=3e-6)
    assert_close(layer(x, positions=np.arange(5)), layer(x))
    each = np.array([[4, 3, 2, 1, 0], [7, 7, 7, 0, 13]])
    assert_close(layer(x, positions=each), by_complex_numbers(x, each, layout=layout), atol=3e-6)


@pytest.mark.parametrize("scaling", [None, YARN, DYNAMIC, LLAMA3], ids=lambda x: x and x["rope_type"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_products_see_only_differences_and_lengths_stay(layout, scaling):
    layer = RotaryEmbedding(layout=layout, scaling=scaling, fraction=0.8)
    query, key = normal(1, 1, 3, 10), normal(1, 1, 3, 10, seed=1)
    factor = attention_factor(scaling)

    def product(i, j):
        turned = [to_numpy(layer(x, positions=np.array([p]))).astype("float64") for x, p in ((query, i), (key, j))]
        for before, after in zip((query, key), turned, strict=True):
            assert_close(np.linalg.norm(after[..., :8]), factor * np.linalg.norm(before[..., :8]), rtol=1e-5)
        return np.sum(turned[0] * turned[1], axis=-1)

    shifts = (0, 5) if scaling is DYNAMIC else (0, 5, 301)  # there a later call has other frequencies
    for difference in (0, 1, 4):
        first, *others = [product(shift + difference, shift) for shift in shifts]
        for other in others:
            assert_close(other, first, atol=2e-4)
    assert np.abs(product(4, 0) - product(0, 0)).max() > 0.01


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_frequencies_and_factor_are_those_of_transformers(scaling):
    layer, _ = transformers_rotary(64, scaling, base=5000.0, fraction=0.5)
    assert layer.inv_freq.shape == (16,)
    checked = check_scaling(scaling, 5000.0, 0.5)
    assert_close(frequencies(32, base=5000.0, scaling=checked), layer.inv_freq.numpy(), atol=0, rtol=2e-6)
    assert attention_factor(checked) == pytest.approx(layer.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, *SCALINGS], ids=str)
@pytest.mark.parametrize(("size", "fraction"), [(10, 1.0), (17, 0.5)])
def test_the_layer_is_the_one_of_transformers(scaling, size, fraction):
    reference, apply = transformers_rotary(size, scaling, fraction=fraction)
    import torch

    x = normal(2, 29, 3, size)
    positions = np.stack([np.arange(29), np.arange(29)[::-1] + 2])
    cos, sin = reference(torch.tensor(x), torch.tensor(positions))
    expected, _ = apply(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)
    layer = RotaryEmbedding(scaling={**scaling, "rope_theta": 10000}, fraction=fraction)
    assert_close(layer(x, positions=positions), expected.numpy(), atol=1e-5)


def test_the_interleaved_layout_is_the_one_of_gpt_j():
    pytest.importorskip("transformers")
    import torch
    from transformers.models.gptj import modeling_gptj

    x = normal(2, 13, 3, 10)
    sin, cos = modeling_gptj.create_sinusoidal_positions(13, 6).chunk(2, dim=-1)
    expected = modeling_gptj.apply_rotary_pos_emb(torch.tensor(x[..., :6]), sin[None], cos[None]).numpy()
    layer = RotaryEmbedding(layout="interleaved", fraction=0.6)
    assert_close(layer(x), np.concatenate([expected, x[..., 6:]], axis=-1), atol=3e-6)


def test_dynamic_frequencies_grow_with_the_longest_position_of_the_batch():
    x = normal(2, 5, 3, 8)
    layer, plain = RotaryEmbedding(scaling=DYNAMIC), RotaryEmbedding()
    assert_close(layer(x), plain(x))  # 5 positions are within the 11 that the model has seen
    positions = np.array([[0, 1, 2, 3, 4], [9, 10, 11, 12, 19]])
    stretched = 10000 * (3.0 * 20 / 11 - 2.0) ** (8 / 6)
    assert_close(layer(x, positions=positions), by_complex_numbers(x, positions, base=stretched), atol=1e-5)
    long = normal(1, 20, 3, 8)
    assert_close(layer(long), by_complex_numbers(long, np.arange(20), base=stretched), atol=1e-5)


@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("scaling", [YARN, DYNAMIC], ids=lambda x: x["rope_type"])
def test_a_graph_of_unknown_lengths_equals_the_eager_call(scaling, jit_compile):
    import tensorflow as tf

    layer = RotaryEmbedding(layout="interleaved", scaling=scaling)
    spec = [tf.TensorSpec((None, None, 3, 8)), tf.TensorSpec((None, None), "int32")]
    counted = tf.function(lambda x: layer(x), input_signature=spec[:1], jit_compile=jit_compile)
    placed = tf.function(lambda x, p: layer(x, positions=p), input_signature=spec, jit_compile=jit_compile)
    for length in (0, 1, 13):
        x, positions = normal(2, length, 3, 8), np.tile(np.arange(length, dtype="int32"), (2, 1))
        assert_close(counted(x), layer(x), atol=3e-6)
        assert_close(placed(x, positions + 6), layer(x, positions=positions + 6), atol=3e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_steps_with_their_positions_equal_the_whole_sequence(layout):
    x = normal(2, 5, 3, 14)
    layer = RotaryEmbedding(layout=layout, scaling=LLAMA3, fraction=0.75)
    whole = to_numpy(layer(x))
    for t in range(5):
        assert_close(layer(x[:, t : t + 1], positions=np.full((2, 1), t)), whole[:, t : t + 1])


def test_angles_and_products_are_single_precision_under_any_policy():
    positions = np.array([0, 1023, 4095, 30011, 65535])  # bfloat16 knows no number between 65280 and 65536
    x = to_numpy(keras.ops.cast(keras.ops.cast(normal(2, 5, 3, 14), "bfloat16"), "float32"))
    output = RotaryEmbedding(dtype="mixed_bfloat16")(x, positions=positions)
    assert keras.backend.standardize_dtype(output.dtype) == "bfloat16"
    rough, exact = to_numpy(keras.ops.cast(output, "float32")), by_complex_numbers(x, positions)
    assert (np.abs(rough - exact) <= 0.01 + 2**-8 * np.abs(exact)).all()  # of bfloat16 and of float32 angles of 65535
    assert_close(rotate(keras.ops.cast(x, "bfloat16"), positions, frequencies(14)), output, atol=0, rtol=0)


@pytest.mark.parametrize("scaling", [None, DYNAMIC])
def test_nothing_gives_nothing(scaling):
    layer = RotaryEmbedding(scaling=scaling, fraction=0.5)
    for shape in ((0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8)):
        assert to_numpy(layer(np.zeros(shape))).shape == shape
        assert to_numpy(layer(np.zeros(shape), positions=np.zeros(shape[:2], "int32"))).shape == shape


def test_the_mask_passes():
    x, mask = keras.ops.convert_to_tensor(normal(2, 5, 3, 8)), np.arange(10).reshape(2, 5) % 3 > 0
    set_keras_mask(x, keras.ops.convert_to_tensor(mask))
    assert_close(get_keras_mask(RotaryEmbedding()(x)), mask)


def test_scaling_is_read_in_all_its_spellings():
    given = {**YARN, "type": "yarn", "rope_theta": 500, "partial_rotary_factor": 0.5, "mscale": None, "truncate": False}
    layer = RotaryEmbedding(base=500.0, fraction=0.5, scaling=given)
    assert layer.get_config()["scaling"] == {**YARN, "truncate": False}
    assert given["mscale"] is None and len(given) == 8  # not touched
    old = {("type" if key == "rope_type" else key): value for key, value in YARN.items()}
    assert RotaryEmbedding(scaling=old).scaling == YARN
    for nothing in (None, {"rope_type": "default"}, {"type": "default", "rope_theta": 10000}):
        assert RotaryEmbedding(scaling=nothing).scaling is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": 0}, "`base` must be a positive finite number. Received: base=0"),
        ({"base": 1}, "`base` must be above 1. Received: base=1"),
        ({"layout": "x"}, r"`layout` must be one of \['half', 'interleaved'\]. Received: layout='x'"),
        ({"fraction": 0}, r"`fraction` must be a number in \(0, 1\]. Received: fraction=0"),
        ({"fraction": 1.5}, r"`fraction` must be a number in \(0, 1\]. Received: fraction=1.5"),
        ({"scaling": 2.0}, "`scaling` must be None or a dict. Received: scaling=2.0"),
        ({"scaling": {"factor": 2.0}}, r"scaling\['rope_type'\]` must be one of .* Received: .*=None"),
        ({"scaling": {"type": "longrope"}}, r"one of \['default', 'linear', 'dynamic', .* Received: .*='longrope'"),
        (
            {"scaling": {**YARN, "type": "linear"}},
            "must have the same 'type' and 'rope_type'. Received: .*'yarn'.*'type': 'linear'",
        ),
        (
            {"scaling": {"rope_type": "default", "rope_theta": 5}},
            r"\['rope_theta'\] must equal `base`. .*base=10000.* 5",
        ),
        (
            {"scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"\['partial_rotary_factor'\] must equal `fraction`. Received: fraction=1.0, .*0.5",
        ),
        (
            {"scaling": {"rope_type": "default", "mrope_section": [1]}},
            r"of type 'default' must have no further keys. Received: .*'mrope_section': \[1",
        ),
        (
            {"scaling": {"rope_type": "yarn", "factor": 2}},
            r"type 'yarn' must have the keys \['factor', 'o.*'\], may have \['beta_fast', .*\], and no others. ",
        ),
        (
            {"scaling": {"rope_type": "linear"}},
            r"type 'linear' must have the keys \['factor'\] and no others. Received: scaling={'rope_type': 'l",
        ),
        ({"scaling": {**DYNAMIC, "factor": None}}, r"type 'dynamic' must have the keys \['factor', .*'factor': None"),
        ({"scaling": {**LLAMA3, "beta_fast": 2}}, r"type 'llama3' .* and no others. Received: .*'beta_fast': 2"),
        ({"scaling": {**YARN, "factor": "4"}}, r"scaling\['factor'\]` must be a positive finite .*='4'"),
        ({"scaling": {**YARN, "factor": 0.5}}, r"scaling\['factor'\]` must be at least 1. .*=0.5"),
        ({"scaling": {**YARN, "mscale": -1}}, r"scaling\['mscale'\]` must be a positive finite number.*=-1"),
        ({"scaling": {**YARN, "truncate": None}}, r"scaling\['truncate'\]` must be one of \[True, False\].*=None"),
        (
            {"scaling": {**DYNAMIC, "original_max_position_embeddings": 8.5}},
            "embeddings'\\]` must be a positive int.*8.5",
        ),
        ({"scaling": {**LLAMA3, "low_freq_factor": 4}}, r"'low_freq_factor'\] must be below 'high_freq_factor'.*: 4"),
        ({"scaling": {**YARN, "beta_slow": 40}}, r"'beta_slow'\] must not be above 'beta_fast'. .*'beta_slow': 40"),
    ],
)
def test_the_constructor_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(**arguments)


def test_inputs_that_do_not_fit_are_refused():
    for layer, size, message in (
        (
            RotaryEmbedding(),
            7,
            r"even number of features to rotate, .*at least 2. Received: inputs.shape=\(2, 5, 3, 7\)",
        ),
        (RotaryEmbedding(fraction=0.5), 6, r"at least 2. Received: inputs.shape=\(2, 5, 3, 6\), fraction=0.5"),
        (RotaryEmbedding(fraction=0.1), 6, r"at least 2. Received: inputs.shape=\(2, 5, 3, 6\), fraction=0.1"),
        (RotaryEmbedding(scaling=DYNAMIC), 2, r"at least 4. Received: .* scaling={'rope_type': 'dynamic'"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(normal(2, 5, 3, size))
    with pytest.raises(ValueError, match=r"at least 2. Received: inputs.shape=\(None, 5, 3, None\)"):
        RotaryEmbedding()(keras.Input((5, 3, None)))


def test_positions_that_do_not_fit_are_refused_called_or_symbolic():
    layer, shape = RotaryEmbedding(), (5, 3, 8)
    with pytest.raises(ValueError, match=r"`positions` must have the shape .*Received: positions.shape=\(2, 4\)"):
        layer(normal(2, *shape), positions=np.zeros((2, 4), "int32"))
    with pytest.raises(ValueError, match=r"`positions` must have the shape .*Received: positions.shape=\(None, 4\)"):
        layer(keras.Input(shape), positions=keras.Input((4,), dtype="int32"))
    with pytest.raises(ValueError, match="`positions` must be integers; .* Received: positions of dtype float32"):
        layer(keras.Input(shape), positions=keras.Input((5,)))

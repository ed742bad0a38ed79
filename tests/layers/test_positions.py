"""Positional encodings against the paper's formula in float64."""

import json

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.layers import LearnedPositionalEncoding, SinusoidalPositionalEncoding
from keras_tx.layers.positions import sinusoids
from tests.tools import assert_close, normal, to_numpy


def by_the_paper(positions, dim, wavelength, layout):
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(the same)."""
    table = np.zeros((len(positions), dim))
    for row, position in enumerate(positions):
        for column in range(dim):
            if layout == "interleaved":
                pair, function = column // 2, (np.sin, np.cos)[column % 2]
            else:
                sines = (dim + 1) // 2
                pair, function = column % sines, (np.sin, np.cos)[column // sines]
            table[row, column] = function(position / wavelength ** (2 * pair / dim))
    return table


@given(
    st.lists(st.integers(0, 512), min_size=1, max_size=9),
    st.integers(1, 19),
    st.sampled_from([100, 10000, 500000.0]),
    st.sampled_from(["interleaved", "concatenated"]),
)
def test_sinusoids_are_the_formula_for_every_width_even_odd(positions, dim, wavelength, layout):
    encoding = sinusoids(np.array(positions), dim, max_wavelength=wavelength, layout=layout)
    assert_close(encoding, by_the_paper(positions, dim, wavelength, layout), atol=5e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
def test_positions_stay_apart_in_half_precision(policy):
    x = np.zeros((1, 600, 64), "float32")
    rough = to_numpy(keras.ops.cast(SinusoidalPositionalEncoding(dtype=policy)(x), "float32"))[0]
    exact = by_the_paper(range(600), 64, 10000, "interleaved")
    assert np.abs(rough - exact).max() < 0.005  # half an ulp of bfloat16 below 1; computing in it gives 2.0
    assert len(np.unique(rough, axis=0)) == 600


def test_the_layer_adds_and_explicit_positions_replace_the_count():
    x = normal(2, 5, 8)
    positions = np.array([[4, 3, 2, 1, 0], [7, 7, 7, 0, 1]])
    expected = np.stack([by_the_paper(row, 8, 10000, "interleaved") for row in positions])
    layer = SinusoidalPositionalEncoding()
    assert_close(layer(x, positions=positions), x + expected, atol=3e-6)
    assert_close(layer(x), x + by_the_paper(range(5), 8, 10000, "interleaved"), atol=3e-6)
    assert_close(layer(x, positions=np.arange(5)), layer(x))


def test_learned_positions_are_rows_of_the_table():
    layer = LearnedPositionalEncoding(7, embeddings_initializer="normal")
    x = normal(2, 5, 8)
    layer(x)
    table = to_numpy(layer.embeddings)
    assert table.shape == (7, 8)
    assert_close(layer(x), x + table[:5])
    positions = np.array([[6, 3, 2, 1, 0], [0, 1, 0, 1, 0]])
    assert_close(layer(x, positions=positions), x + table[positions])
    assert_close(layer(x[:, :0]), x[:, :0])


FREQUENCIES = [1.0, 0.3, 0.02, -0.7]


@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("width", [7, 8])
def test_frequencies_may_be_given(layout, width):
    layer = SinusoidalPositionalEncoding(frequencies=np.array(FREQUENCIES), layout=layout)
    angles = np.arange(5)[:, None] * np.array(FREQUENCIES)
    if layout == "interleaved":
        expected = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(5, 8)[:, :width]
    else:
        expected = np.concatenate([np.sin(angles), np.cos(angles)[:, : width // 2]], axis=-1)
    x = normal(2, 5, width)
    assert_close(layer(x), x + expected, atol=3e-6)
    again = SinusoidalPositionalEncoding.from_config(json.loads(json.dumps(layer.get_config())))
    assert again.frequencies == tuple(FREQUENCIES)
    assert_close(again(x), layer(x), atol=0)


def test_the_frequencies_of_the_paper_give_its_encoding():
    frequencies = [10000 ** (-2 * pair / 8) for pair in range(4)]
    x = normal(2, 5, 8)
    assert_close(SinusoidalPositionalEncoding(frequencies=frequencies)(x), SinusoidalPositionalEncoding()(x), atol=1e-6)


def test_frequencies_that_are_too_few_for_the_inputs_are_refused():
    layer = SinusoidalPositionalEncoding(frequencies=FREQUENCIES)
    with pytest.raises(ValueError, match="`frequencies` must .*Received: 4 frequencies, last axis of size 9"):
        layer(normal(2, 5, 9))


LAYERS = {"sinusoidal": SinusoidalPositionalEncoding, "learned": lambda: LearnedPositionalEncoding(7)}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_leading_axes_are_as_many_rows(name, leading):
    layer, x = LAYERS[name](), normal(*leading, 5, 8)
    rows = x.reshape(-1, 5, 8)
    expected = to_numpy(layer(rows)).reshape(x.shape)
    assert_close(layer(x), expected, atol=0)
    rng = np.random.default_rng(3)
    positions = rng.integers(0, 7, (*leading, 5)).astype("int32")
    assert_close(
        layer(x, positions=positions), to_numpy(layer(rows, positions=positions.reshape(-1, 5))).reshape(x.shape)
    )
    mask = rng.random((*leading, 5)) < 0.7
    assert_close(layer(x, mask=mask), to_numpy(layer(rows, mask=mask.reshape(-1, 5))).reshape(x.shape))
    assert layer(keras.Input(batch_shape=x.shape)).shape == x.shape


def test_a_mask_or_positions_that_do_not_fit_leading_axes_are_refused():
    x = normal(2, 3, 5, 8)
    with pytest.raises(ValueError, match=r"`mask` must have the shape \(2, 3, 5\). Received: mask.shape=\(2, 5\)"):
        SinusoidalPositionalEncoding()(x, mask=np.ones((2, 5), "bool"))
    with pytest.raises(ValueError, match=r"must have the shape \(2, 3, 5\) or \(5,\). Received: .*shape=\(2, 5\)"):
        SinusoidalPositionalEncoding()(x, positions=np.zeros((2, 5), "int32"))


@pytest.mark.parametrize("layer", [SinusoidalPositionalEncoding(), LearnedPositionalEncoding(7)])
def test_positions_of_a_wrong_shape_or_dtype_are_refused(layer):
    x = normal(2, 5, 8)
    with pytest.raises(ValueError, match=r"`positions` must have the shape .*Received: positions.shape=\(2, 4\)"):
        layer(x, positions=np.zeros((2, 4), "int32"))
    with pytest.raises(ValueError, match="`positions` must be integers; .* Received: positions of dtype float32"):
        layer(x, positions=np.zeros((2, 5), "float32"))


def test_a_learned_table_refuses_longer_inputs_and_positions_outside_it():
    layer = LearnedPositionalEncoding(4)
    with pytest.raises(ValueError, match=r"longer than `max_length`. Received: inputs.shape=\(2, 5, 8\), max_length=4"):
        layer(normal(2, 5, 8))
    with pytest.raises(ValueError, match=r"`positions` must be in \[0, 4\). Received: 4 in positions of shape \(3,\)"):
        layer(normal(2, 3, 8), positions=np.array([0, 1, 4]))
    with pytest.raises(ValueError, match=r"`positions` must be in \[0, 4\). Received: -1"):
        layer(normal(2, 3, 8), positions=np.array([0, 1, -1]))


@pytest.mark.tensorflow
def test_a_graph_refuses_positions_outside_a_learned_table():
    import tensorflow as tf

    layer = LearnedPositionalEncoding(4)
    layer(normal(2, 3, 8))
    graph = tf.function(layer, input_signature=[tf.TensorSpec((None, None, 8))])
    assert_close(graph(normal(2, 4, 8)), layer(normal(2, 4, 8)))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"4 is not in \[0, 4\)"):
        graph(normal(2, 5, 8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SinusoidalPositionalEncoding(max_wavelength=0), "`max_wavelength` must be .* max_wavelength=0"),
        (lambda: SinusoidalPositionalEncoding(layout="x"), "`layout` must be one of .*Received: layout='x'"),
        (lambda: SinusoidalPositionalEncoding(frequencies=[]), r"list of finite numbers. Received: frequencies=\[\]"),
        (lambda: SinusoidalPositionalEncoding(frequencies=[1, float("nan")]), r"Received: frequencies=\[1, nan\]"),
        (lambda: SinusoidalPositionalEncoding(frequencies="half"), "Received: frequencies='half'"),
        (
            lambda: SinusoidalPositionalEncoding(frequencies=[1.0], max_wavelength=50),
            r"`max_wavelength` must be left out .* Received: max_wavelength=50, frequencies=\[1.0\]",
        ),
        (lambda: LearnedPositionalEncoding(0), "`max_length` must be a positive integer. Received: max_length=0"),
    ],
)
def test_constructors_refuse_what_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()

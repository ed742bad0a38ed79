"""Dropout: shares, scale and seeds."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.layers.dropout import Dropout, _is_raised, random_keep
from tests.tools import to_numpy

ONES = np.ones((101, 53, 7), "float32")


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.9])
def test_the_share_that_is_dropped_is_the_rate_and_the_mean_stays(rate):
    outputs = to_numpy(Dropout(rate, seed=3)(ONES, training=True))
    assert set(np.unique(outputs > 0)) == {False, True}
    error = 4 * np.sqrt(rate * (1 - rate) / ONES.size)
    assert abs((outputs == 0).mean() - rate) < error
    np.testing.assert_allclose(outputs[outputs > 0], 1 / (1 - rate), rtol=1e-6)


def test_nothing_is_dropped_at_inference_and_other_calls_drop_others():
    layer = Dropout(0.5, seed=3)
    assert (to_numpy(layer(ONES)) == 1).all() and (to_numpy(Dropout(0.0)(ONES, training=True)) == 1).all()
    one, two = (to_numpy(layer(ONES, training=True)) for _ in range(2))
    assert 0.45 < (one != two).mean() < 0.55
    again = Dropout(0.5, seed=3)
    np.testing.assert_array_equal(to_numpy(again(ONES, training=True)), one)


def test_a_noise_shape_drops_whole_slices_also_in_half_precision():
    outputs = to_numpy(
        keras.ops.cast(Dropout(0.5, noise_shape=(None, 1, 7), seed=1, dtype="bfloat16")(ONES, training=True), "float32")
    )
    assert (outputs == outputs[:, :1]).all() and 0.3 < (outputs == 0).mean() < 0.7


@pytest.mark.tensorflow
def test_graphs_drop_as_eager_calls_do_whatever_the_length():
    import tensorflow as tf

    inputs = [ONES[:, :size] for size in (1, 5, 8)] + [np.ones((3, 5, size), "float32") for size in (16, 24)]
    eager = [Dropout(0.4, seed=5)(x, training=True) for x in inputs]
    for x, expected in zip(inputs, eager, strict=True):
        for shape in ((None, None, x.shape[2]), (None, None, None)):
            layer = Dropout(0.4, seed=5)
            call = tf.function(lambda x, layer=layer: layer(x, training=True), [tf.TensorSpec(shape, "float32")])
            np.testing.assert_array_equal(to_numpy(call(x)), to_numpy(expected))
    for jit_compile in (False, True):
        layers = [Dropout(0.4, seed=5) for _ in inputs]
        call = lambda *inputs, layers=layers: [one(x, training=True) for one, x in zip(layers, inputs, strict=True)]
        for found, expected in zip(tf.function(call, jit_compile=jit_compile)(*inputs), eager, strict=True):
            np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


@pytest.mark.tensorflow
def test_the_seeds_are_those_of_keras():
    layer, generator = Dropout(0.4, seed=5), keras.random.SeedGenerator(5)
    for _ in range(3):
        np.testing.assert_array_equal(to_numpy(layer.next_seed()), to_numpy(generator.next()))


@pytest.mark.tensorflow
def test_a_dropout_adds_few_operations():
    """Each time that a model is traced, for each of its dropouts; the last size is known."""
    import tensorflow as tf

    layer = Dropout(0.1)
    call = tf.function(lambda x: layer(x, training=True), [tf.TensorSpec((None, None, 16))])
    operations = call.get_concrete_function().graph.get_operations()
    assert len([one for one in operations if one.type not in ("Const", "Placeholder", "Identity", "NoOp")]) <= 20


def over_seeds(function, calls):
    """What `function` gives for each of several drawn seeds, stacked, in one call of a graph."""
    import tensorflow as tf

    generator = keras.random.SeedGenerator(5)
    seeds = np.stack([to_numpy(generator.next()) for _ in range(calls)])
    rows = tf.function(lambda seeds: tf.map_fn(lambda seed: tf.cast(function(seed), "int32"), seeds, "int32"))
    return rows(tf.constant(seeds, "int32")).numpy()


@pytest.mark.tensorflow
@pytest.mark.parametrize("part", [0.0, 0.01, 0.25, 0.6, 0.99])
def test_thresholds_share_themselves_out_evenly_over_indices_and_calls(part):
    """From 8 bits 0.1 is 25/256 or 26/256, the latter for 0.6 of all numbers."""
    more = over_seeds(lambda seed: _is_raised(211, part, seed), 1009)
    assert np.abs(more.mean(axis=0) - part).max() < 0.01  # random ones would be off by up to 0.05
    assert np.abs(more.mean(axis=1) - part).max() < 0.03


@pytest.mark.tensorflow
@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.9])
def test_the_share_that_is_dropped_is_not_rounded_to_8_bits(rate):
    dropped = 1 - random_keep([8191, 1021], rate, [3, 5]).numpy()
    error = 5 * np.sqrt(rate * (1 - rate) / dropped.size)
    assert abs(dropped.mean() - rate) < error < min(rate * 256 % 1, 1 - rate * 256 % 1) / 256


@pytest.mark.tensorflow
@pytest.mark.parametrize("rate", [0.01, 0.1, 1 / 3, 0.5, 0.95, 0.999])
def test_each_number_is_dropped_as_often_as_any_other(rate):
    calls, rows, columns = 211, 47, 13
    kept = over_seeds(lambda seed: random_keep([rows, columns], rate, seed), calls)
    for axes, size in (((0, 1), columns), ((1, 2), calls), ((0, 2), rows)):
        dropped = 1 - kept.mean(axes)
        assert dropped.shape == (size,)
        assert np.abs(dropped - rate).max() < 5 * np.sqrt(rate * (1 - rate) * size / kept.size)
    neighbours = [(kept[:, :, 1:], kept[:, :, :-1]), (kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])]
    for one, other in neighbours:
        both = (1 - one) * (1 - other)
        assert abs(both.mean() - rate**2) < 5 * np.sqrt(rate**2 * (1 - rate**2) / both.size)


def test_rates_next_to_one_keep_the_mean():
    """2^-16 of the numbers at least stay on TensorFlow, scaled by what that makes."""
    outputs = to_numpy(Dropout(1 - 1e-7, seed=3)(np.ones((64, 65536), "float32"), training=True))
    if keras.backend.backend() == "tensorflow":
        assert set(np.unique(outputs)) == {0, 2**16}
        assert 0.5 < outputs.mean() < 1.5
    assert np.isfinite(outputs).all()


def test_a_single_number_is_dropped_or_not():
    layer = Dropout(0.4, seed=3)
    outputs = [to_numpy(layer(ops.ones(()), training=True)) for _ in range(97)]
    assert {one.shape for one in outputs} == {()}
    np.testing.assert_allclose(np.unique(outputs), [0, 1 / 0.6], rtol=1e-6)

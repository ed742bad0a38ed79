"""Sampling functions against the warpers of transformers and exact distributions, and the noise of `Sample`."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_tx.generation.constraints import Constraints
from keras_tx.generation.greedy import Greedy
from keras_tx.generation.sample import Sample
from keras_tx.generation.sampling import at_temperature, draw, min_p, top_k, top_p
from tests.generation.driver import drive, markov
from tests.tools import assert_close, normal, to_numpy

SIZE = 31


def warped(logits, *warpers):
    """`logits` through warpers of transformers, as NumPy."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    scores = torch.tensor(logits)
    for name, value in warpers:
        scores = getattr(transformers.generation.logits_process, name)(value)(None, scores)
    return scores.numpy()


@pytest.mark.parametrize(
    ("filtered", "warper", "values"),
    [
        (top_k, "TopKLogitsWarper", (1, 2, 7, SIZE, 50)),
        (top_p, "TopPLogitsWarper", (1e-6, 0.3, 0.55, 0.9, 0.999, 1.0)),
        (min_p, "MinPLogitsWarper", (0.0, 0.01, 0.3, 1.0)),
    ],
)
def test_filters_are_the_warpers_of_transformers(filtered, warper, values):
    logits = 3 * normal(5, SIZE)
    logits[:, 4] = -np.inf
    for value in values:
        np.testing.assert_array_equal(to_numpy(filtered(logits, value)), warped(logits, (warper, value)))


def test_top_k_keeps_equals_of_the_last_and_the_others_keep_them_all():
    logits = np.log([[4.0, 1.0, 2.0, 2.0, 1.0], [3.0, 3.0, 1.0, 2.0, 1.0]]).astype("float32")
    assert np.isfinite(to_numpy(top_k(logits, 2))).tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert np.isfinite(to_numpy(top_p(logits, 0.5))).tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert np.isfinite(to_numpy(min_p(logits, 0.5))).tolist() == [[1, 0, 1, 1, 0], [1, 1, 0, 1, 0]]


def test_filters_take_a_value_for_each_row():
    logits, values = normal(3, SIZE), np.array([[0.2], [0.8], [1.0]], "float32")
    for function in (top_p, min_p, at_temperature):
        rows = [to_numpy(function(logits[i : i + 1], float(values[i, 0]))) for i in range(3)]
        np.testing.assert_array_equal(to_numpy(function(logits, values)), np.concatenate(rows))


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=40), st.floats(0.001, 0.999))
def test_top_p_keeps_what_has_less_than_p_before_it(logits, p):
    logits = np.array([logits], "float32")
    chances = np.exp(logits[0].astype("float64") - logits.max())
    chances /= chances.sum()
    before = np.array([chances[logits[0] > logit].sum() for logit in logits[0]])
    kept = np.isfinite(to_numpy(top_p(logits, p)))[0]
    clear = np.abs(before - p) > 1e-6
    np.testing.assert_array_equal(kept[clear], (before < p)[clear])


def test_the_coldest_temperature_leaves_the_best_and_nothing_overflows():
    logits = np.array([[3e38, -3e38, 0.0, -np.inf]], "float32")
    for temperature in (1e-45, 1e-30, 1e-3):
        assert to_numpy(at_temperature(logits, temperature)).tolist() == [[0.0, -np.inf, -np.inf, -np.inf]]
    assert_close(at_temperature(normal(2, 5), 0.7), (normal(2, 5) - normal(2, 5).max(1, keepdims=True)) / 0.7)
    assert at_temperature(keras.ops.cast(normal(2, 5), "float16"), 2.0).dtype in ("float32", keras.ops.ones(1).dtype)


@pytest.mark.parametrize("temperature", [1e37, 1e38, 1e39, 1e300])
def test_the_hottest_temperature_makes_the_tokens_that_are_left_equally_likely(temperature):
    logits = np.array([[3.0, -np.inf, 0.0, -7.0]], "float32")
    for given_temperature in (temperature, np.array([[min(temperature, 3e38)]], "float32")):
        assert to_numpy(ops.exp(at_temperature(logits, given_temperature))).tolist() == [[1.0, 0.0, 1.0, 1.0]]
    sample, run = Sample(temperature, seed=2), {"ids": [[3, 4]], "new": 9, "size": SIZE}
    ids, _, _ = drive(sample, markov(SIZE), constraints=Constraints(forbidden_tokens=range(3, SIZE)), **run)
    assert set(ids[0, 0]) == {0, 1, 2}


@given(st.integers(1, 60), st.integers(0, 99), st.floats(0, 1 - 2**-24, width=32))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(size, seed, noise):
    generator = np.random.default_rng(seed)
    logits = (2 * generator.normal(size=(1, size))).astype("float32")
    logits[0, generator.permutation(size)[: size // 2]] = -np.inf
    reached = np.cumsum(np.exp(logits[0].astype("float64")))
    expected = np.searchsorted(reached, noise * reached[-1], side="right")
    found = int(draw(logits, np.array([noise], "float32"))[0])
    assert np.isfinite(logits[0, found])
    if np.abs(reached / reached[-1] - noise).min() > 1e-5:
        assert found == expected


def frequencies(strategy, logits, noise):
    """How often each token of `logits` (V,) comes when every number of `noise` is drawn once."""
    noise = noise.reshape(1, -1).astype("float32")
    count = noise.size
    state = strategy.initial_state(np.zeros((count, 1)), np.ones((count, 1)), 1, 1, len(logits), noise=noise)
    _, tokens, _ = strategy.advance(np.tile(logits, (count, 1)), state, Constraints(), ())
    return np.bincount(to_numpy(tokens), minlength=len(logits)) / count


@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6, "top_p": 0.8}, [("TemperatureLogitsWarper", 0.6), ("TopPLogitsWarper", 0.8)]),
        (
            {"temperature": 1.7, "top_k": 11, "top_p": 0.85, "min_p": 0.1},
            [
                *[("TemperatureLogitsWarper", 1.7), ("TopKLogitsWarper", 11)],
                *[("TopPLogitsWarper", 0.85), ("MinPLogitsWarper", 0.1)],
            ],
        ),
    ],
)
def test_what_is_drawn_has_the_probabilities_of_transformers(options, warpers):
    logits = 2 * normal(1, SIZE)
    scores = warped(logits, *warpers)[0].astype("float64")
    expected = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    even = (np.arange(5000) + 0.5) / 5000
    assert_close(frequencies(Sample(**options), logits[0], even), expected, atol=1.01 / 5000)
    # Pearson: with noise of its own, the sum of (found - expected)^2 / expected has as many degrees as free tokens.
    sample = Sample(**options, seed=13)
    noise = sample.noise(50, 100)
    likely = expected > 1e-3
    found, rest = frequencies(sample, logits[0], noise), 1 - expected[likely].sum()
    chi_square = 5000 * ((found - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < likely.sum() + 4 * np.sqrt(2 * likely.sum()), (chi_square, likely.sum(), rest)


def test_noise_depends_on_the_seed_and_the_row_and_nothing_else():
    noise = Sample(seed=5).noise(7, 11)
    assert noise.shape == (11, 7) and noise.dtype == "float32" and 0 <= noise.min() and noise.max() < 1
    assert len(np.unique(noise)) == noise.size
    np.testing.assert_array_equal(Sample(0.3, top_k=2, seed=5).noise(3, 4), noise[:4, :3])
    assert not (Sample(seed=6).noise(7, 11) == noise).any()
    assert Sample(seed=-1).noise(1, 1) == Sample(seed=2**64 - 1).noise(1, 1)


def test_without_a_seed_every_call_differs_and_keras_seed_repeats_them():
    keras.utils.set_random_seed(3)
    first, second = Sample().noise(2, 5), Sample().noise(2, 5)
    assert not (first == second).any()
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(Sample().noise(2, 5), first)
    np.testing.assert_array_equal(Sample().noise(2, 5), second)


def test_a_sample_does_not_depend_on_the_batch_or_the_limit():
    sample, ids = Sample(1.3, top_k=9, seed=2), [[3, 4], [3, 4], [5, 6]]
    run = {"size": SIZE, "stop": (2,), "padding": 1}
    together, scores, _ = drive(sample, markov(SIZE), ids, new=6, **run)
    assert (together[0] != together[1]).any()  # the same prompt twice, two samples
    alone, score, _ = drive(sample, markov(SIZE), ids[:1], new=8, limit=5, **run)
    np.testing.assert_array_equal(alone[0, 0, :5], together[0, 0, :5])
    again, _, _ = drive(Sample(1.3, top_k=9, seed=2), markov(SIZE), ids, new=6, **run)
    np.testing.assert_array_equal(again, together)


def test_one_candidate_or_no_heat_is_greedy_and_scores_are_the_model_s_own():
    run = {"ids": [[3, 4], [7, 8]], "new": 4, "size": SIZE, "stop": (2,)}
    expected, scores, _ = drive(Greedy(), markov(SIZE), **run)
    for sample in (Sample(top_k=1), Sample(5.0, top_p=1e-9), Sample(1e-6), Sample(3, min_p=1)):
        ids, totals, _ = drive(sample, markov(SIZE), **run)
        np.testing.assert_array_equal(ids, expected)
        assert_close(totals, scores)


def test_constraints_come_before_the_filters():
    rules = Constraints(forbidden_tokens=range(3, SIZE), forced_tokens={0: 7})
    ids, _, _ = drive(Sample(top_k=5, seed=1), markov(SIZE), [[3, 4]], new=9, size=SIZE, constraints=rules)
    assert ids[0, 0, 0] == 7 and set(ids[0, 0, 1:]) <= {0, 1, 2}


def test_the_seed_is_no_part_of_what_is_compiled():
    assert Sample(0.7, top_k=5, seed=1) == Sample(0.7, top_k=5, seed=2) != Sample(0.7, top_k=6, seed=1)
    assert len({Sample(seed=1), Sample(seed=2), Sample(top_p=0.5)}) == 2
    assert repr(Sample(0.7, top_k=5, seed=1)) == "Sample(temperature=0.7, top_k=5, top_p=None, min_p=None, seed=1)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sample(0), "`temperature` must be a positive finite number. Received: temperature=0"),
        (lambda: Sample(float("nan")), "`temperature` must be a positive finite number. Received: temperature=nan"),
        (lambda: Sample(top_k=0), "`top_k` must be a positive integer or None. Received: top_k=0"),
        (lambda: Sample(top_p=0.0), r"`top_p` must be a number in \(0, 1\] or None. Received: top_p=0.0"),
        (lambda: Sample(top_p=1.5), r"`top_p` must be a number in \(0, 1\] or None. Received: top_p=1.5"),
        (lambda: Sample(top_p=float("nan")), r"`top_p` must be a number in \(0, 1\] or None. Received: top_p=nan"),
        (lambda: Sample(min_p=-0.1), r"`min_p` must be a number in \[0, 1\] or None. Received: min_p=-0.1"),
        (lambda: Sample(min_p="x"), r"`min_p` must be a number in \[0, 1\] or None. Received: min_p='x'"),
        (lambda: Sample(seed=1.5), "`seed` must be an integer or None. Received: seed=1.5"),
        (
            lambda: Sample().initial_state(np.ones((2, 3)), np.ones((2, 3)), 5, 5, 7),
            r"`noise` must have the shape \(5, 2\), .*Received: noise.shape=None",
        ),
        (
            lambda: Sample().initial_state(np.ones((2, 3)), np.ones((2, 3)), 5, 5, 7, noise=np.zeros((5, 3))),
            r"`noise` must have the shape \(5, 2\), .*Received: noise.shape=\(5, 3\)",
        ),
    ],
)
def test_samples_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""The rule that keeps or replaces samples of a draft model, and the distributions of the strategies."""

import itertools

import numpy as np
import pytest
from keras import ops

from keras_tx.generation import Sample
from keras_tx.generation.acceptance import kept_or_replaced
from keras_tx.generation.per_row import PerRowStrategy
from keras_tx.generation.sampling import draw
from tests.tools import assert_close, normal, to_numpy


def distributions(rows, size, seed):
    """Two of them for each row, float64, with zeros in both; they are multiples of 2**-20, so exact in float32."""
    generator = np.random.default_rng(seed)
    weights = generator.random((2, rows, size)) ** 3 * (generator.random((2, rows, size)) < 0.7)
    weights[..., seed % size] += 0.1
    counts = np.floor(weights / weights.sum(axis=-1, keepdims=True) * 2**20)
    counts[..., seed % size] += 2**20 - counts.sum(axis=-1)
    return counts / 2**20


def reference(p, q, draft, chance, noise):
    """Algorithm 1 of Leviathan et al. 2023 for one row, in float64; a row of q that is zero has no draft."""
    if q[draft] > 0 and chance < min(1.0, p[draft] / q[draft]):
        return draft
    rest = np.maximum(p - q, 0)
    return int(np.searchsorted(np.cumsum(rest), noise * rest.sum(), side="right"))


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_is_that_of_numpy(seed):
    rows, size = 200, 7
    p, q = distributions(rows, size, seed)
    q[::9] = 0  # without a draft
    generator = np.random.default_rng(seed + 50)
    drafts = np.array([generator.choice(size, p=row) if row.any() else 3 for row in q], "int32")
    chances, noise = (generator.random(rows).astype("float32") for _ in range(2))
    arrays = [ops.convert_to_tensor(x) for x in (p.astype("float32"), q.astype("float32"), drafts, chances, noise)]
    found = to_numpy(kept_or_replaced(*arrays))
    expected = np.array([reference(*row) for row in zip(p, q, drafts, chances, noise, strict=True)])
    assert (found == expected).mean() > 0.98  # rounding moves the bounds between tokens by 1e-7
    assert 0.2 < (found == drafts).mean() < 0.95


def test_tokens_have_the_distribution_of_the_model_whatever_the_drafts_have():
    """The sum over all drafts, and over a grid of the two random numbers."""
    size, points = 5, 150
    p, q = (x[0] for x in distributions(1, size, seed=3))
    grid = ((np.arange(points) + 0.5) / points).astype("float32")
    chances, noise = (x.ravel() for x in np.meshgrid(grid, grid))
    found = np.zeros(size)
    for draft in range(size):
        given = (np.tile(x.astype("float32"), (points**2, 1)) for x in (p, q))
        arrays = (*given, np.full(points**2, draft, "int32"), chances, noise)
        tokens = to_numpy(kept_or_replaced(*[ops.convert_to_tensor(x) for x in arrays]))
        found += q[draft] * np.bincount(tokens, minlength=size) / points**2
        if q[draft]:
            assert_close((tokens == draft).mean(), min(1.0, p[draft] / q[draft]), atol=1 / points)
    assert_close(found, p, atol=2 / points)
    assert np.abs(q - p).max() > 0.1


def test_a_draft_of_the_same_distribution_is_kept():
    rows, size = 300, 9
    p = distributions(rows, size, 1)[0].astype("float32")
    generator = np.random.default_rng(2)
    drafts = p.argmax(axis=1).astype("int32")
    chances, noise = (generator.random(rows).astype("float32") for _ in range(2))
    found = kept_or_replaced(*[ops.convert_to_tensor(x) for x in (p, p, drafts, chances, noise)])
    np.testing.assert_array_equal(to_numpy(found), drafts)


OPTIONS = [
    dict(zip(("temperature", "top_k", "top_p"), values, strict=True))
    for values in itertools.product((0.7, 1.6), (None, 4), (None, 0.8))
]


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 1.0, "min_p": 0.1}])
def test_probabilities_are_those_of_the_draws(options):
    rows, points = normal(3, 13, seed=4) * 2, 2000
    rows[:, 5] = -np.inf
    strategy = Sample(**options)
    found = to_numpy(strategy.probabilities(ops.convert_to_tensor(rows)))
    assert_close(found.sum(axis=1), np.ones(3), atol=1e-6)
    noise = ((np.arange(points) + 0.5) / points).astype("float32")
    for row, probabilities in zip(rows, found, strict=True):
        state = {"noise": ops.convert_to_tensor(noise[None]), "step": ops.convert_to_tensor(0, "int32")}
        drawn = strategy.choose(ops.convert_to_tensor(np.tile(row, (points, 1))), state)
        assert_close(np.bincount(to_numpy(drawn), minlength=13) / points, probabilities, atol=2 / points)
        again = draw(ops.log(ops.convert_to_tensor(np.tile(probabilities, (points, 1)))), ops.convert_to_tensor(noise))
        assert_close(np.bincount(to_numpy(again), minlength=13) / points, probabilities, atol=2 / points)


@pytest.mark.tensorflow
def test_each_row_has_the_probabilities_of_a_strategy_of_its_own():
    import tensorflow as tf

    options = [*OPTIONS, {"temperature": 0.0, "top_k": 3, "top_p": 0.5}]
    scores = normal(len(options), 13, seed=6) * 2
    strategy = PerRowStrategy(
        tf.constant([one["temperature"] for one in options], "float32"),
        tf.constant([one["top_k"] or 0 for one in options], "int32"),
        tf.constant([one["top_p"] or 1.0 for one in options], "float32"),
    )
    found = strategy.probabilities(tf.constant(scores)).numpy()
    for row, probabilities, one in zip(scores, found, options, strict=True):
        expected = np.eye(13)[row.argmax()]
        if one["temperature"]:
            own = Sample(one["temperature"], top_k=one["top_k"], top_p=one["top_p"])
            expected = to_numpy(own.probabilities(tf.constant(row[None])))[0]
        assert_close(probabilities, expected, atol=1e-6)

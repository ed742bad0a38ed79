"""Under strategies a `LossScaleOptimizer` ends with the weights and the loss scale that it has on one device."""

import contextlib

import keras
import numpy as np
import pytest

from keras_tx.models.checked_data import CheckedModel

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tensorflow, pytest.mark.process]

FEATURES, TOO_LARGE = 3, 1e30  # whose square is infinite in float32


def compiled(strategy, optimizer, eager=False):
    """A model with a `LossScaleOptimizer` around `optimizer()`."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        x = keras.Input((FEATURES,))
        model = CheckedModel(x, keras.layers.Dense(2)(x))
        scaled = keras.optimizers.LossScaleOptimizer(optimizer(), initial_scale=8.0, dynamic_growth_steps=2)
        model.compile(scaled, "mse", run_eagerly=eager)
    return model


def state_of(model, strategy):
    """The weights, the loss scale and the number of updates, in each replica."""
    optimizer = model.optimizer
    kept = [*model.variables, optimizer.dynamic_scale, optimizer.step_counter, optimizer.inner_optimizer.iterations]
    local = strategy.experimental_local_results if strategy else lambda value: (value,)
    return [[np.asarray(copy).tolist() for copy in local(one.value)] for one in kept]


def batches_of(sizes, too_large=()):
    """Batches of these numbers of rows, with numbers that are too large in the rows `too_large` of all of them."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(sum(sizes), FEATURES)).astype("float32")
    y = generator.normal(size=(sum(sizes), 2)).astype("float32")
    for row in too_large:
        x[row] = TOO_LARGE
    ends = np.cumsum(sizes)
    return [(x[end - size : end], y[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def trained(strategy, optimizer, batches, eager=False):
    """The state of a model after batches of any sizes."""
    model = compiled(strategy, optimizer, eager)

    def rows():
        yield from batches

    specs = tuple(tf.TensorSpec((None, width), "float32") for width in (FEATURES, 2))
    model.fit(tf.data.Dataset.from_generator(rows, output_signature=specs), verbose=0)
    return state_of(model, strategy)


def assert_same_in_all_replicas(found, expected):
    for copies, (one,) in zip(found, expected, strict=True):
        for copy in copies:
            np.testing.assert_allclose(copy, one, atol=2e-6, rtol=0)


def sgd(**options):
    return lambda: keras.optimizers.SGD(0.1, **options)


# A batch with an infinite gradient is skipped.


def overflow(strategy, row, eager=False):
    return trained(strategy, sgd(), batches_of([5, 3, 4], too_large=[row]), eager)


# The row lies in the first replica, in the last one, or in the last one of the second batch.
@pytest.mark.parametrize(("row", "eager"), [(0, False), (4, False), (7, False), (4, True)])
def test_a_gradient_that_overflows_in_one_replica_is_skipped_by_all(row, eager, devices):
    """Two of three batches are finite, and are all that the model learns from."""
    batches = batches_of([5, 3, 4], too_large=[row])
    finite = [one for one in batches if np.abs(one[0]).max() < TOO_LARGE]
    assert len(finite) == 2
    skipping = overflow(None, row)
    assert_same_in_all_replicas(skipping[:2], trained(None, sgd(), finite)[:2])
    assert skipping[-1] == [2]
    for replicas in (1, 2, 3):
        found = devices(overflow, replicas=replicas, row=row, eager=eager)
        assert [len(copies) for copies in found] == [replicas] * len(found)
        assert_same_in_all_replicas(found, skipping)


def overflow_in_workers(strategy, row):
    return [copies[:1] for copies in overflow(strategy, row)]


def test_a_gradient_that_overflows_in_one_worker_is_skipped_by_all(workers):
    for found in workers(overflow_in_workers, row=4):
        assert_same_in_all_replicas(found, overflow(None, 4))

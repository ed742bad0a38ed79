"""Under strategies, a loss scale and gradient accumulation lead to the weights that they lead to on one device."""

import contextlib

import keras
import numpy as np
import pytest

from keras_tx.models.checked_data import CheckedModel

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tensorflow, pytest.mark.process]

WEIGHTS = ["kernel", "bias"]
FEATURES, TOO_LARGE = 3, 1e30  # whose square is infinite in float32


def compiled(strategy, optimizer, eager=False):
    """A model that `optimizer()` trains."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        x = keras.Input((FEATURES,))
        model = CheckedModel(x, keras.layers.Dense(2, name="dense")(x))
        model.compile(optimizer(), "mse", run_eagerly=eager)
    return model


def state_of(model, strategy):
    """The variables of a model and of its optimizer by their paths, in each replica."""
    local = strategy.experimental_local_results if strategy else lambda value: (value,)
    variables = [(one.name, one) for one in model.variables]
    variables += [(f"optimizer/{one.path.split('/')[-1]}", one) for one in model.optimizer.variables]
    return {name: [np.asarray(copy).tolist() for copy in local(one.value)] for name, one in variables}


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
    data = tf.data.Dataset.from_generator(rows, output_signature=specs)
    # Where the number of batches is unknown, Keras begins a step too many.
    model.fit(data.apply(tf.data.experimental.assert_cardinality(len(batches))), verbose=0)
    return state_of(model, strategy)


def assert_same_in_all_replicas(found, expected, names=None, replicas=1):
    """Compares the variables called `names`, or all, with those of one device."""
    assert found.keys() == expected.keys()
    for name in names or expected:
        assert len(found[name]) == replicas
        for copy in found[name]:
            np.testing.assert_allclose(copy, expected[name][0], atol=2e-6, rtol=0, err_msg=name)


def scaled(optimizer, scale=8.0):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale, dynamic_growth_steps=2)


# A batch with an infinite gradient is skipped.


def scaled_sgd():
    return scaled(keras.optimizers.SGD(0.1))


def overflow(strategy, row, eager=False):
    return trained(strategy, scaled_sgd, batches_of([5, 3, 4], too_large=[row]), eager)


# The row lies in the first replica, in the last one, or in the last one of the second batch.
@pytest.mark.parametrize(("row", "eager"), [(0, False), (4, False), (7, False), (4, True)])
def test_a_gradient_that_overflows_in_one_replica_is_skipped_by_all(row, eager, devices):
    """Two of three batches are finite, and are all that the model learns from."""
    batches = batches_of([5, 3, 4], too_large=[row])
    finite = [one for one in batches if np.abs(one[0]).max() < TOO_LARGE]
    assert len(finite) == 2
    skipping = overflow(None, row)
    assert_same_in_all_replicas(skipping, trained(None, scaled_sgd, finite), WEIGHTS)
    for replicas in (1, 2, 3):
        found = devices(overflow, replicas=replicas, row=row, eager=eager)
        assert_same_in_all_replicas(found, skipping, replicas=replicas)


def test_a_gradient_that_overflows_in_one_worker_is_skipped_by_all(workers):
    for found in workers(overflow, row=4):
        assert_same_in_all_replicas(found, overflow(None, 4))


# Batches of one update.

OPTIMIZERS = {
    "sgd": lambda **options: keras.optimizers.SGD(0.1, **options),
    "adamw": lambda **options: keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.7, **options),
    "ema": lambda **options: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.6, **options),
}
SIZES = [5, 3, 4, 1, 2]  # two updates, and one that is not complete
STOCK = ["sgd", "adamw"]  # those for which two batches with accumulation are as one without


def accumulate(strategy, name, scale=None, too_large=(), eager=False):
    def optimizer():
        inner = OPTIMIZERS[name](gradient_accumulation_steps=2)
        return inner if scale is None else scaled(inner, scale)

    return trained(strategy, optimizer, batches_of(SIZES, too_large), eager)


def in_whole_batches(name, pairs):
    """The weights after updates with all examples of two batches in one."""
    batches = batches_of(SIZES)
    whole = [[np.concatenate(parts) for parts in zip(batches[i], batches[j], strict=True)] for i, j in pairs]
    return trained(None, OPTIMIZERS[name], [tuple(one) for one in whole])


def assert_equal_weights(found, expected):
    for name in WEIGHTS:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize(("name", "scale"), [("sgd", None), ("adamw", None), ("ema", None), ("sgd", 8), ("adamw", 8)])
def test_replicas_accumulate_as_one_device(name, scale, devices):
    """The updates are those of whole batches, with a loss scale and without one."""
    expected = accumulate(None, name, scale)
    if name in STOCK:
        assert_equal_weights(expected, in_whole_batches(name, [(0, 1), (2, 3)]))
    for replicas, eager in [(1, False), (2, False), (2 if scale else 1, True)]:
        found = devices(accumulate, replicas=replicas, name=name, scale=scale, eager=eager)
        assert_same_in_all_replicas(found, expected, replicas=replicas)


@pytest.mark.parametrize("row", [5, 7])  # in the first replica and in the last one, of the second batch
def test_a_batch_that_overflows_is_no_part_of_an_update(row, devices):
    """The updates are those of the first with the third batch, and of the fourth with the fifth."""
    arguments = {"name": "adamw", "scale": 8.0, "too_large": [row]}
    expected = accumulate(None, **arguments)
    assert_equal_weights(expected, in_whole_batches("adamw", [(0, 2), (3, 4)]))
    for replicas in (1, 2):
        assert_same_in_all_replicas(devices(accumulate, replicas=replicas, **arguments), expected, replicas=replicas)


def test_workers_accumulate_as_one_device(workers):
    expected = accumulate(None, "sgd", 8.0, [7])
    for found in workers(accumulate, name="sgd", scale=8.0, too_large=[7]):
        assert_same_in_all_replicas(found, expected)


def on_the_only_device(strategy, **arguments):
    return accumulate(tf.distribute.OneDeviceStrategy("CPU:1"), **arguments)


@pytest.mark.parametrize("scale", [None, 8.0])
def test_a_strategy_of_one_device_accumulates_as_no_strategy(scale, devices):
    found = devices(on_the_only_device, name="adamw", scale=scale)
    assert_same_in_all_replicas(found, accumulate(None, "adamw", scale))

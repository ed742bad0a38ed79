"""What is used of Keras' private parts for training on several devices and with gradient accumulation.

A test that fails here because Keras has changed says so, with the version.
"""

import keras
import numpy as np
import pytest

from keras_tx import training_internals
from tests.test_keras_internals import TRAINING_DOOR as DOOR
from tests.test_keras_internals import still

X, Y = np.ones((4, 2), "float32"), np.arange(4.0, dtype="float32")[:, None]


def compiled(**options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    options = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"], **options}
    model.compile("sgd", run_eagerly=True, **options)
    return model


@pytest.mark.parametrize("is_built", [False, True])
@still("calls the losses and metrics that a model was compiled with one by one", door=DOOR)
def test_wrap_losses_and_metrics(is_built):
    model = compiled()
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    model = compiled()
    if is_built:
        model.evaluate(X, Y, verbose=0)
    for _ in range(2):  # the second time changes nothing
        training_internals.wrap_losses(model, lambda loss: lambda *args: 3 * loss(*args))
        training_internals.wrap_metrics(model, _tripled)
        training_internals.wrap_loss_trackers(model, lambda update: lambda v, sample_weight: update(7 * v, 1))
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert found == {"loss": 21 * expected["loss"], "mae": 3 * expected["mae"], "mse": expected["mse"]}


def _tripled(update, is_weighted):
    factor = 1 if is_weighted else 3
    return lambda y, y_pred, sample_weight=None: update(factor * y, factor * y_pred, sample_weight)


def test_a_model_without_losses_and_metrics_is_left_alone():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd")
    training_internals.wrap_losses(model, None)
    training_internals.wrap_metrics(model, None)


@still("keeps the gradients of the batches of an update, and averages them", door=DOOR)
def test_weigh_micro_batches():
    """Gradients 1 and 5 with the weights 1 and 3; with the weight 1 and a divisor of 1/2 each; and as in Keras."""
    variable = keras.Variable([0.0])
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    shares = iter([(1.0, 1.0), (3.0, 3.0), (1.0, 0.5), (1.0, 0.5), None, None])
    for _ in range(2):
        training_internals.weigh_micro_batches(optimizer, lambda: next(shares), lambda: 1)
    assert [one.name for one in optimizer.variables].count("accumulated_weight") == 1
    optimizer.build([variable])
    values = []
    for gradient in (1.0, 5.0) * 3:
        optimizer.apply([keras.ops.convert_to_tensor([gradient])])
        values.append(-float(keras.ops.convert_to_numpy(variable)[0]))
    assert values == [0, 4, 4, 10, 10, 13]
    training_internals.weigh_micro_batches(keras.optimizers.SGD(), None, None)


@still("makes batches of all kinds of data, which a data adapter may hand on", door=DOOR)
def test_map_batches():
    def of_dataset(dataset):
        return dataset.map(lambda x, y, weights: (x, y + 1, weights))

    def of_batch(batch):
        return batch[0], batch[1] + 1, batch[2]

    options = {"y": Y, "batch_size": 3, "class_weight": {0: 1, 1: 2, 2: 3, 3: 4}}
    if keras.backend.backend() == "torch":
        pytest.skip("No devices share batches on this backend.")
    data = training_internals.map_batches(of_dataset, of_batch, X, **options)
    assert training_internals.is_prepared(data) and not training_internals.is_prepared(X)
    assert data.num_batches == 2
    model = compiled()
    expected = model.evaluate(X, Y + 1, sample_weight=Y[:, 0] + 1, batch_size=3, verbose=0)
    np.testing.assert_allclose(compiled().evaluate(data, verbose=0), expected, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([y for _, y, _ in data.get_numpy_iterator()]), Y + 1)


@pytest.mark.tensorflow
@still("weighs the classes of a data set, and splits arrays for validation", door=DOOR)
def test_class_weights_and_validation():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y[:, 0])).batch(4)
    weights = next(iter(training_internals.with_class_weight(dataset, {0: 1.0, 1: 5.0, 3: 2.0})))[2]
    np.testing.assert_array_equal(weights, [1, 5, 1, 2])
    (x, y, weights), (_, last, _) = training_internals.split_for_validation((X, Y, Y), 0.25)
    np.testing.assert_array_equal(y, Y[:3])
    np.testing.assert_array_equal(last, Y[3:])


@pytest.mark.tensorflow
@pytest.mark.parametrize("options", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}, {"clipvalue": 0.5}, {}])
@still("clips the gradients of an optimizer in one function", door=DOOR)
def test_clip_whole_gradients(options):
    """Rows of a gradient that are added to the same row of a table are clipped as their sum."""
    import tensorflow as tf

    rows = tf.constant([[3.0, 4.0], [-3.0, -3.5], [1.0, 0.0]])
    gradient = tf.IndexedSlices(rows, tf.constant([2, 2, 0]), tf.constant([4, 2]))
    results = []
    for one in (gradient, tf.convert_to_tensor(gradient)):
        table, optimizer = keras.Variable(np.zeros((4, 2))), keras.optimizers.SGD(1.0, **options)
        for _ in range(2):
            training_internals.clip_whole_gradients(optimizer)
        optimizer.apply([one], [table])
        results.append(table.numpy())
    np.testing.assert_allclose(*results, rtol=1e-6)


def batches(count, size=None):
    """`count` batches of a data set that says `size`, if anything, about itself."""
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)] * count), output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1)))
    )
    return dataset if size is None else dataset.apply(tf.data.experimental.assert_cardinality(size))


@still("tells with `_interrupted_warning` that data ran out", door=DOOR)
def test_let_data_end(monkeypatch):
    """Data of unknown size end without a warning, and the epochs are whole; data that are too short are still told."""
    training_internals.let_data_end()
    training_internals.let_data_end()  # changes nothing more
    model = compiled()
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    steps = []
    model.fit(batches(3), epochs=2, shuffle=False, verbose=0, callbacks=[seen], validation_data=batches(2))
    assert steps == [0, 1, 2, 0, 1, 2]
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        model.fit(batches(3), steps_per_epoch=5, shuffle=False, verbose=0)


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return X, Y


@still("can say which data it does not shuffle", door=DOOR)
def test_is_never_shuffled():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    for data in (batches(1), (batch for batch in [(X, Y)]), loader, Endless()):
        assert training_internals.is_never_shuffled(data)
        with pytest.warns(UserWarning, match="`shuffle=True` was passed, but will be ignored"):
            training_internals._data_adapters.get_data_adapter(data, shuffle=True)
    assert not training_internals.is_never_shuffled(X) and not training_internals.is_never_shuffled([X, X])

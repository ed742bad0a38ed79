"""What keras_tx uses of Keras' private parts for `fit` still is as it needs it.

A test that fails here because Keras has changed says so, with the version.
"""

import functools
import inspect

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_tx.internals import keras_training
from keras_tx.optional import Lazy
from tests.internals.doors import TRAINING, still

tf = Lazy("tensorflow")

X, Y = np.ones((4, 2), "float32"), np.arange(4.0, dtype="float32")[:, None]


def compiled(**options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    options = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"], **options}
    model.compile("sgd", run_eagerly=True, **options)
    return model


@pytest.mark.parametrize("is_built", [False, True])
@still("calls the losses and metrics that a model was compiled with one by one", door=TRAINING)
def test_wrap_losses_and_metrics(is_built):
    model = compiled()
    expected = model.evaluate(X, Y, verbose=0, return_dict=True)
    model = compiled()
    if is_built:
        model.evaluate(X, Y, verbose=0)
    for _ in range(2):  # the second time changes nothing
        keras_training.wrap_losses(model, lambda loss: lambda *args: 3 * loss(*args), None)
        keras_training.wrap_metrics(model, _tripled)
        keras_training.wrap_loss_trackers(model, lambda update: lambda v, sample_weight: update(7 * v, 1))
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert found == {"loss": 21 * expected["loss"], "mae": 3 * expected["mae"], "mse": expected["mse"]}


@pytest.mark.parametrize("is_built", [False, True])
@still("averages the loss of each output over batches by a metric of its own", door=TRAINING)
def test_wrap_the_losses_of_several_outputs(is_built):
    def make():
        x = keras.Input((2,))
        outputs = [keras.layers.Dense(1, kernel_initializer="zeros", name=name)(x) for name in "ab"]
        model = keras.Model(x, outputs)
        model.compile("sgd", ["mse", "mae"], run_eagerly=True)
        return model

    expected = make().evaluate(X, [Y, Y], verbose=0, return_dict=True)
    model = make()
    if is_built:
        model.evaluate(X, [Y, Y], verbose=0)
    for _ in range(2):  # the second time changes nothing
        keras_training.wrap_losses(model, lambda loss: loss, lambda update: lambda v, sample_weight: update(7 * v, 1))
    found = model.evaluate(X, [Y, Y], verbose=0, return_dict=True)
    assert found == {"loss": expected["loss"], "a_loss": 7 * expected["a_loss"], "b_loss": 7 * expected["b_loss"]}


def _tripled(update, is_weighted):
    factor = 1 if is_weighted else 3
    return lambda y, y_pred, sample_weight=None: update(factor * y, factor * y_pred, sample_weight)


def test_a_model_without_losses_and_metrics_is_left_alone():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd")
    keras_training.wrap_losses(model, None, None)
    keras_training.wrap_metrics(model, None)


@still("makes batches of all kinds of data, which a data adapter may hand on", door=TRAINING)
def test_map_batches():
    def of_dataset(dataset):
        return dataset.map(lambda x, y, weights: (x, y + 1, weights))

    def of_batch(batch):
        return batch[0], batch[1] + 1, batch[2]

    options = {"y": Y, "batch_size": 3, "class_weight": {0: 1, 1: 2, 2: 3, 3: 4}}
    data = keras_training.map_batches(of_dataset, of_batch, X, **options)
    assert keras_training.is_checked(data) and not keras_training.is_checked(X)
    assert not keras_training.is_filled(data) and not keras_training.is_filled(X)
    assert keras_training.is_filled(keras_training.map_batches(of_dataset, of_batch, data, fills=True))
    assert data.num_batches == 2
    model = compiled()
    expected = model.evaluate(X, Y + 1, sample_weight=Y[:, 0] + 1, batch_size=3, verbose=0)
    np.testing.assert_allclose(compiled().evaluate(data, verbose=0), expected, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([y for _, y, _ in data.get_numpy_iterator()]), Y + 1)


@pytest.mark.tensorflow
@still("weighs the classes of a data set, and splits arrays for validation", door=TRAINING)
def test_class_weights_and_validation():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y[:, 0])).batch(4)
    weights = next(iter(keras_training.with_class_weight(dataset, {0: 1.0, 1: 5.0, 3: 2.0})))[2]
    np.testing.assert_array_equal(weights, [1, 5, 1, 2])
    np.testing.assert_array_equal(keras_training.as_sample_weight(Y, {0: 1.0, 1: 5.0, 3: 2.0}), weights)
    (x, y, weights), (_, last, _) = keras_training.split_for_validation((X, Y, Y), 0.25)
    np.testing.assert_array_equal(y, Y[:3])
    np.testing.assert_array_equal(last, Y[3:])


def batches(count, size=None):
    """`count` batches of a data set that says `size`, if anything, about itself."""
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)] * count), output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1)))
    )
    return dataset if size is None else dataset.apply(tf.data.experimental.assert_cardinality(size))


@still("tells with `_interrupted_warning` that data ran out", door=TRAINING)
def test_let_data_end(monkeypatch):
    """Data of unknown size end without a warning, and the epochs are whole; data that are too short are still told."""
    keras_training.let_data_end()
    keras_training.let_data_end()  # changes nothing more
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


@still("can say which data it does not shuffle", door=TRAINING)
def test_is_never_shuffled():
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)))
    for data in (batches(1), (batch for batch in [(X, Y)]), loader, Endless()):
        assert keras_training.is_never_shuffled(data)
        with pytest.warns(UserWarning, match="`shuffle=True` was passed, but will be ignored"):
            keras_training._data_adapters.get_data_adapter(data, shuffle=True)
    assert keras_training.is_loader(loader) and not keras_training.is_loader(Endless())
    assert not keras_training.is_never_shuffled(X) and not keras_training.is_never_shuffled([X, X])


@still("lets a callback say with which epoch `fit` begins", door=TRAINING)
def test_begin_fit_at():
    class Callback(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            keras_training.begin_fit_at(self.model, begin)

        def on_epoch_begin(self, epoch, logs=None):
            epochs.append(epoch)

    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=keras.backend.backend() != "jax")
    epochs, begin, data = [], 2, (np.ones((2, 3)), np.ones((2, 1)))
    model.fit(*data, epochs=4, callbacks=[Callback()], verbose=0)
    assert epochs == [2, 3]
    keras_training.begin_fit_at(model, None)
    begin = None
    model.fit(*data, epochs=2, initial_epoch=1, callbacks=[Callback()], verbose=0)
    assert epochs == [2, 3, 1]


@still("keeps what a model was compiled with, its loss metric, and sums the losses that layers add", door=TRAINING)
def test_parts_of_a_compiled_model():
    model = keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="ones", kernel_regularizer="l2")])
    model.build((None, 3))
    model.compile("sgd", ["mse"], loss_weights=[0.5], metrics=["mae"], run_eagerly=keras.backend.backend() != "jax")
    assert keras_training.loss_weights(model) == [0.5] and not keras_training.metrics_are_built(model)
    assert ops.convert_to_numpy(keras_training.sum_of_added_losses(model)) == pytest.approx(0.03)
    results = model.evaluate(np.ones((2, 3)), np.ones((2, 1)), verbose=0, return_dict=True)
    assert results["loss"] == pytest.approx(0.5 * 4 + 0.03) and keras_training.metrics_are_built(model)
    tracker = keras_training.loss_tracker(model)
    assert tracker.name == "loss" and float(tracker.result()) == pytest.approx(results["loss"])
    model.compile("sgd", "mse")
    assert keras_training.loss_weights(model) is None and keras_training.metrics_are_built(model)


@still("builds the metrics that a model was compiled with for a batch", door=TRAINING)
def test_build_metrics():
    model = keras.Sequential([layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    keras_training.build_metrics(model, (np.ones((2, 3)), np.ones((2, 1))))
    assert keras_training.metrics_are_built(model) and len(model.metrics_variables) == 4


def small(outputs=1, metrics=None, kind=keras_training.TracedOnce, **options):
    keras.utils.set_random_seed(5)
    x = keras.Input((2,))
    y = [layers.Dense(3, activation="softmax", name=name)(x) for name in "ab"[:outputs]]
    model = kind(x, y if outputs > 1 else y[0])
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile("adam", [loss] * outputs if outputs > 1 else loss, metrics=metrics, **options)
    return model


@pytest.fixture
def traced(monkeypatch):
    """A list that gets an element each time that a step of a model is traced."""
    calls = []

    def count(name):
        step = getattr(keras.Model, name)

        @functools.wraps(step)
        def counted(self, data):
            calls.append(name)
            return step(self, data)

        monkeypatch.setattr(keras_training.TracedOnce, name, counted, raising=False)

    count("train_step")
    count("test_step")
    return calls


X10, Y10 = np.random.default_rng(3).normal(size=(10, 2)), np.arange(10) % 3


@pytest.mark.tensorflow
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("metrics", [None, "accuracy"])
@still("builds losses, metrics and the optimizer of a model within the first step on TensorFlow", door=TRAINING)
def test_steps_are_traced_once(outputs, metrics, traced, monkeypatch):
    def trained():
        traced.clear()
        model = small(outputs, metrics and [[metrics]] * outputs)
        y = [Y10] * outputs if outputs > 1 else Y10
        found = [model.evaluate(X10, y, verbose=0, batch_size=5, return_dict=True)]
        assert not model.optimizer.built
        found += [model.fit(X10, y, verbose=0, batch_size=5, shuffle=False).history]
        return model, found, list(traced)

    model, found, calls = trained()
    monkeypatch.setattr(keras_training.TracedOnce, "_builds_first", lambda self: False)
    other, expected, calls_of_keras = trained()
    assert calls == ["test_step", "train_step"] and calls_of_keras.count("train_step") == 2
    assert [list(one) for one in found] == [list(one) for one in expected]
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose([*map(np.ravel, one.values())], [*map(np.ravel, two.values())], rtol=1e-6)
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.tensorflow
def test_steps_on_a_batch_are_traced_once(traced):
    model = small(metrics=["accuracy"])
    model.test_on_batch(np.ones((5, 2)), np.ones(5))
    assert model.metrics_names == ["loss", "compile_metrics"] and not model.optimizer.built
    model.train_on_batch(np.ones((5, 2)), np.ones(5))
    assert traced == ["test_step", "train_step"]


@pytest.mark.tensorflow
def test_what_is_left_to_the_first_step(monkeypatch):
    """Metrics without labels, and of a model whose steps do not use them."""
    model = small(metrics=["accuracy"])
    for y in (None, (), [1, 2]):
        model._maybe_symbolic_build(data_batch=(np.ones((5, 2)), y, None))
        assert not keras_training.metrics_are_built(model)
    monkeypatch.setattr(keras_training.TracedOnce, "steps_update_metrics", False)
    model._maybe_symbolic_build(data_batch=(np.ones((5, 2)), np.ones(5), None))
    assert not keras_training.metrics_are_built(model)


@pytest.mark.tensorflow
def test_steps_of_a_subclass_give_other_labels_to_the_metrics():
    """Labels become one-hot vectors within the step, and "accuracy" is that of one-hot vectors."""

    class OneHot(keras_training.TracedOnce):
        def train_step(self, data):
            return super().train_step((data[0], ops.one_hot(data[1], 3)))

        def test_step(self, data):
            return super().test_step((data[0], ops.one_hot(data[1], 3)))

    model = small(metrics=["accuracy"], kind=OneHot)
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    right = (model.predict(X10, verbose=0).argmax(1) == Y10).mean()
    assert model.evaluate(X10, Y10, verbose=0)[1] == pytest.approx(right)
    model.fit(X10, Y10, verbose=0)
    model = small()
    model.train_step = lambda data: keras.Model.train_step(model, data)
    model.fit(X10, Y10, verbose=0)


@pytest.mark.tensorflow
def test_what_is_trainable_may_change_until_the_first_step():
    model = small()
    layer = model.layers[1]
    layer.trainable = False
    with pytest.raises(ValueError, match="cardinality"):
        model.fit(X10, Y10[:3], verbose=0)
    assert not model.optimizer.built
    unfreeze = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: setattr(layer, "trainable", True))
    before = layer.get_weights()
    model.fit(X10, Y10, verbose=0, callbacks=[unfreeze])
    assert (before[0] != layer.get_weights()[0]).all()


@pytest.mark.tensorflow
def test_shape_in_replica():
    import tensorflow as tf

    assert keras_training.shape_in_replica(tf.TensorSpec((None, 3), "int32")).shape == (None, 3)
    assert keras_training.shape_in_replica(np.ones((2, 3))).shape == (2, 3)
    assert keras_training.shape_in_replica(tf.OptionalSpec(tf.TensorSpec((2,)))) is None
    two = tf.distribute.MirroredStrategy(["cpu:0"] * 1).experimental_distribute_dataset(
        tf.data.Dataset.from_tensors(np.ones((4, 3)))
    )
    assert keras_training.shape_in_replica(two.element_spec).shape == (4, 3)


def steps_on(kind, is_known, options):
    """What `evaluate` and `fit` return, the count of updates and the weights, with batches of a constant size."""
    data = tf.data.Dataset.from_tensor_slices((X10, Y10)).batch(2, drop_remainder=True)
    data = data if is_known else data.filter(lambda *_: True)
    model = small(metrics=["accuracy"], kind=kind, **options)
    found = (
        model.evaluate(data, verbose=0),
        *model.fit(data, epochs=2, validation_data=data, shuffle=False, verbose=0).history.values(),
    )
    return np.hstack(found), int(model.optimizer.iterations.numpy()), model.get_weights()


@pytest.mark.tensorflow
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"run_eagerly": True}, {"steps_per_execution": 3}])
def test_a_step_waits_for_its_batch(options):
    expected, found = (steps_on(keras_training.TracedOnce, is_known, options) for is_known in (True, False))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert found[1] == expected[1] == 10
    for one, two in zip(found[2], expected[2], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


class OwnStep(keras_training.TracedOnce):
    def train_step(self, data):
        return super().train_step(data)


class OwnLoss(keras_training.TracedOnce):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class Mended(keras.Model):
    """As a strategy leaves a model of Keras, whose first step creates the variables of the optimizer."""

    def _make_function(self, step_function):
        return super()._make_function(keras_training.waiting_for_batch(step_function))


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", [OwnStep, OwnLoss, Mended])
def test_xla_runs_a_step_that_creates_variables(kind):
    expected, found = (steps_on(kind, is_known, {"jit_compile": True}) for is_known in (True, False))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert found[1] == expected[1] == 10


@pytest.mark.tensorflow
@still("runs a part of a step when data of unknown size have ended", door=TRAINING)
def test_keras_runs_a_part_of_a_step_after_the_data():
    class Plain(keras.Model):
        _make_function = inspect.unwrap(keras.Model._make_function)  # which a strategy replaces

    expected, found = (steps_on(Plain, is_known, {}) for is_known in (True, False))
    assert expected[1] == 10 and found[1] == 12  # one more in each epoch
    assert found[0][0] < 0.9 * expected[0][0]  # the loss of 5 batches, divided by 6


@pytest.mark.tensorflow
def test_waiting_for_batch_returns_what_the_step_returns():
    def step(data):
        return data["x"] + 1

    waiting = keras_training.waiting_for_batch(step)
    assert int(waiting({"x": tf.constant(3), "y": None})) == int(tf.function(waiting)({"x": 3, "y": None})) == 4
    assert waiting({"x": 3}) == 4 and waiting.__name__ == "step"


@pytest.mark.tensorflow
def test_batches_of_ragged_and_sparse_tensors_are_waited_for():
    class Counting(keras_training.TracedOnce):
        def test_step(self, data):
            self.count.assign_add(1)
            return {"count": self.count}

    x = keras.Input((2,))
    model = Counting(x, layers.Dense(1)(x))
    model.count = tf.Variable(0)
    model.compile()
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0]])
    data = tf.data.Dataset.from_tensor_slices((ragged, tf.sparse.eye(3))).batch(1).filter(lambda *_: True)
    model.evaluate(data, verbose=0)
    assert int(model.count) == 3


@still("calls callbacks from `CallbackList`", door=TRAINING)
def test_a_callback_sees_all_callbacks_of_fit():
    class Sees(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.seen = keras_training.callbacks_of_fit(self)

    sees, other = Sees(), keras.callbacks.TerminateOnNaN()
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[other, sees])
    assert sees.seen[:2] == [other, sees]
    assert keras_training.callbacks_of_fit(sees) == []

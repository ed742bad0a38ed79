"""`Resume` in the middle of an epoch: what callbacks change in its steps, which they see again, counts once."""

import keras
import numpy as np
import pytest

from keras_tx.models import CausalLM
from keras_tx.training import PaddedAccuracy, PaddedCrossentropy, Resume
from tests.tools import to_numpy

tf = pytest.importorskip("tensorflow")

EPOCHS, STEPS = 3, 5
X = np.random.default_rng(0).normal(size=(3 * STEPS, 2)).astype("float32")


class CutOff(Exception):
    pass


class CutsOff(keras.callbacks.Callback):
    """Ends `fit` after so many steps of the process."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise CutOff


def halves_in_each_epoch():
    return keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5)


class ChangesTheRate(keras.callbacks.Callback):
    """At each of its calls in another way, so that another order of the calls gives another rate."""

    def change(self, factor, more):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * factor + more)

    def on_epoch_begin(self, epoch, logs=None):
        self.change(0.75, 0.013)

    def on_train_batch_begin(self, batch, logs=None):
        self.change(0.875, 0.011)

    def on_train_batch_end(self, batch, logs=None):
        self.change(0.9375, 0.005)


class WarmsUp(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 1.125)


class Decays(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate - 0.003)


class ShrinksTheWeights(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        for variable in self.model.trainable_variables:
            variable.assign(variable * 0.75)

    def on_train_batch_end(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            variable.assign(variable * 0.875)


class ResetsTheMetrics(keras.callbacks.Callback):
    """So that the epoch logs what its last steps measured, from the fourth one on."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.reset_metrics()

    def on_train_batch_begin(self, batch, logs=None):
        if batch in (0, 3):
            self.model.reset_metrics()


def fit(folder, callbacks, place, cut=0, steps_per_execution=1, has_length=True):
    """(history, variables, rate) of a model made anew, with `Resume` at this place in the list of callbacks."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    is_eager = steps_per_execution == 1  # tracing would be most of the time
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=is_eager, steps_per_execution=steps_per_execution)
    resume, rows = Resume(folder, save_freq=2), tf.data.Dataset.from_tensor_slices((X, X[:, :1] + 1))
    rows = rows if has_length else rows.filter(lambda x, y: True)
    data = resume.dataset(lambda epoch: rows.shuffle(len(X), seed=epoch).batch(3))
    listed = [CutsOff(cut), *callbacks]
    listed.insert({"first": 0, "middle": 2, "last": len(listed)}[place], resume)
    history = model.fit(data, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=listed)
    variables = [to_numpy(variable).copy() for variable in (*model.variables, *optimizer.variables)]
    return history, variables, float(to_numpy(optimizer.learning_rate))


def assert_resumed_equals_whole(path, make, place, cuts, **options):
    """Each number in `cuts` is that of the steps after which a process ends; it counts steps that are seen again."""
    history, whole, rate = fit(path / "whole", [one() for one in make], place, **options)
    for cut in cuts:
        with pytest.raises(CutOff):
            fit(path / "cut", [one() for one in make], place, cut, **options)
    cut_history, variables, _ = fit(path / "cut", [one() for one in make], place, **options)
    for one, two in zip(variables, whole, strict=True):
        np.testing.assert_array_equal(one, two)
    assert cut_history.epoch == history.epoch
    assert {name: cut_history.history[name] for name in ("loss", "mae")} == {
        name: history.history[name] for name in ("loss", "mae")
    }
    if place == "last":  # otherwise the backup does not have what those behind `Resume` log
        assert cut_history.history == history.history
    return history, rate


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize(
    "make",
    [
        [halves_in_each_epoch, keras.callbacks.Callback],
        [WarmsUp, Decays],
        [Decays, WarmsUp],
        [ChangesTheRate, ShrinksTheWeights, halves_in_each_epoch, ChangesTheRate],
        [ResetsTheMetrics, keras.callbacks.Callback],
    ],
)
def test_what_callbacks_change_counts_once(make, place, tmp_path):
    history, rate = assert_resumed_equals_whole(tmp_path, make, place, cuts=[3, 5, 14])
    if make[0] is halves_in_each_epoch:
        np.testing.assert_allclose(history.history["learning_rate"], [0.05, 0.025, 0.0125], rtol=1e-6)
    if make[0] is WarmsUp:
        expected = 0.1
        for _ in range(EPOCHS * STEPS):
            expected = expected * 1.125 - 0.003
        assert rate == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="there an execution is one step")
@pytest.mark.parametrize("place", ["first", "last"])
def test_with_several_steps_per_execution(place, tmp_path):
    """In a graph. An epoch has 3 executions, of 2, 2 and 1 steps."""
    make = [halves_in_each_epoch, ChangesTheRate]
    assert_resumed_equals_whole(tmp_path, make, place, cuts=[2, 5], steps_per_execution=2)


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="there an execution is one step")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # which Keras finds out in the first epoch
@pytest.mark.parametrize("has_length", [True, False])
def test_the_last_execution_of_an_epoch_may_have_fewer_steps(has_length, tmp_path):
    """In a graph. An epoch has 3 executions, of 2, 2 and 1 steps; one process ends after the third, which is saved."""
    make, options = [halves_in_each_epoch, ChangesTheRate], {"steps_per_execution": 2, "has_length": has_length}
    assert_resumed_equals_whole(tmp_path, make, "first", cuts=[2, 3], **options)


class Fails(keras.callbacks.Callback):
    """Ends `fit` in one of its methods, when it is called for the `call`th time."""

    def __init__(self, method, call=1):
        super().__init__()
        setattr(self, method, self.count)
        self.left = call

    def count(self, *arguments, **named):
        self.left -= 1
        if not self.left:
            raise CutOff


class Data:
    """Batches of which the second cannot be read while `is_broken`."""

    def __init__(self, resume, is_broken):
        rows, self.is_broken = tf.data.Dataset.from_tensor_slices((X, X[:, :1] + 1)), is_broken
        self.dataset = resume.dataset(lambda epoch: rows.batch(3).map(self.read))

    def read(self, x, y):
        def checked(x):
            if self.is_broken and np.array_equal(x, X[3:6]):
                raise CutOff
            return x

        x.set_shape((None, 2))
        return tf.ensure_shape(tf.numpy_function(checked, [x], tf.float32), (None, 2)), y


@pytest.mark.parametrize("place", ["on_train_batch_begin", "on_train_batch_end", "read"])
@pytest.mark.parametrize("then", ["fit", "train_on_batch", "resume"])
def test_a_fit_that_is_interrupted_while_it_reads_batches_again_leaves_nothing_behind(place, then, tmp_path):
    """The next `fit` of this model takes all of its steps."""
    with pytest.raises(CutOff):
        fit(tmp_path, [], "last", cut=5)  # the backup is from after step 4
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"], run_eagerly=True)
    resume = Resume(tmp_path, save_freq=2)
    data = Data(resume, is_broken=place == "read")
    callbacks = [resume] if place == "read" else [Fails(place), resume]
    with pytest.raises((CutOff, tf.errors.OpError), match="CutOff" if place == "read" else None):
        model.fit(data.dataset, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    data.is_broken, before = False, int(to_numpy(model.optimizer.iterations))
    if then == "fit":
        model.fit(X, X[:, :1], batch_size=3, verbose=0)
    elif then == "train_on_batch":
        for _ in range(STEPS):
            model.train_on_batch(X, X[:, :1])
    else:
        model.fit(data.dataset, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    after = int(to_numpy(model.optimizer.iterations))
    assert after == (EPOCHS * STEPS if then == "resume" else before + STEPS)


@pytest.mark.parametrize("metrics", [[], [PaddedAccuracy()]])
def test_the_logs_of_an_epoch_are_those_of_its_last_step(metrics, tmp_path):
    """A loss in chunks gives the metrics no outputs in training; the process ends in the validation."""
    ids = np.random.default_rng(1).integers(1, 11, (7, 5)).astype("int32")

    def fit(folder, *callbacks):
        keras.utils.set_random_seed(1)
        model = CausalLM(11, num_layers=1, hidden_dim=6, num_heads=2, intermediate_dim=7)
        model.compile("sgd", PaddedCrossentropy(chunk_size=3), metrics=metrics, run_eagerly=True)
        resume = Resume(folder, save_freq=3)
        data = resume.dataset(lambda epoch: tf.data.Dataset.from_tensor_slices((ids, ids)).batch(3))
        options = {"validation_data": (ids, ids), "shuffle": False, "verbose": 0}
        return model.fit(data, epochs=2, callbacks=[*callbacks, resume], **options).history

    whole = fit(tmp_path / "whole")
    with pytest.raises(CutOff):
        fit(tmp_path / "cut", Fails("on_test_begin", 2))
    assert fit(tmp_path / "cut") == whole

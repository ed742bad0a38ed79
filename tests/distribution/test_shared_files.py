"""Several workers write the same files, and shuffle the same rows."""

import json
import random

import keras
import numpy as np
import pytest

from keras_tx import under_strategy
from tests.distribution import cases
from tests.distribution.processes import Process, free_addresses

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow
ROWS = 22


def checkpointed(strategy, folder):
    """The weights after a training in which all workers write the same two files after each epoch."""
    with strategy.scope():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((97,))
        model = keras.Model(inputs, keras.layers.Dense(89)(keras.layers.Dense(1511)(inputs)))
        model.compile("sgd", "mse")
    paths = [f"{folder}/whole.keras", f"{folder}/epoch {{epoch}}.weights.h5"]
    callbacks = [keras.callbacks.ModelCheckpoint(path, save_weights_only="h5" in path) for path in paths]
    x, y = np.ones((14, 97), "float32"), np.ones((14, 89), "float32")
    model.fit(x, y, batch_size=7, epochs=4, verbose=0, callbacks=callbacks)
    return [float(np.abs(one).sum()) for one in model.get_weights()]


@pytest.mark.process
def test_all_workers_may_write_the_same_checkpoint(workers, tmp_path):
    (sums, _) = workers(checkpointed, folder=str(tmp_path))
    model = keras.models.load_model(tmp_path / "whole.keras", compile=False)
    np.testing.assert_allclose([np.abs(one).sum() for one in model.get_weights()], sums, rtol=1e-5)
    model.load_weights(tmp_path / "epoch 4.weights.h5")
    np.testing.assert_allclose([np.abs(one).sum() for one in model.get_weights()], sums, rtol=1e-5)
    assert len([*tmp_path.iterdir()]) == 5, "nothing else is left there"


class Rows(keras.utils.PyDataset):
    def __len__(self):
        return ROWS // 2

    def __getitem__(self, index):
        return np.arange(2 * index, 2 * index + 2), np.full((2, 1), 1000.0)


def rows_trained(strategy, kind):
    """How often each row was trained in an epoch: a step of 1 for each row of a table."""
    with strategy.scope():
        inputs = keras.Input((), dtype="int32")
        table = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros")
        model = keras.Model(inputs, table(inputs))
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))
    x, y = np.arange(ROWS), np.full((ROWS, 1), 1000.0)
    if kind == "arrays":
        model.fit(x, y, batch_size=6, verbose=0)
    elif kind == "PyDataset":
        model.fit(Rows(), verbose=0)
    else:
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(6), verbose=0)
    return model.get_weights()[0][:, 0].tolist()


@pytest.mark.process
@pytest.mark.parametrize("kind", ["arrays", "PyDataset", "tf.data"])
def test_shuffled_rows_are_each_trained_once(kind, workers):
    for found in workers(rows_trained, kind=kind):
        np.testing.assert_allclose(found, np.ones(ROWS), atol=1e-5)


def random_numbers(strategy):
    return [random.random(), float(tf.random.uniform(()))]


@pytest.mark.process
def test_workers_have_the_same_random_numbers(workers):
    one, two = workers(random_numbers)
    assert one == two


@pytest.fixture
def model():
    return cases.small()


def test_a_file_stays_as_it_was_when_it_cannot_be_written(model, tmp_path):
    path = tmp_path / "model.keras"
    model.save(path)
    before = path.read_bytes()

    def cut_short(filepath, overwrite=True):
        with open(filepath, "wb") as file:
            file.write(before[:100])
        raise OSError("No space left on device")

    object.__setattr__(model, "save", cut_short)
    with under_strategy.whole_files(model), pytest.raises(OSError, match="No space left"):
        model.save(path)
    assert model.save is cut_short
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_what_is_no_single_file_is_written_as_ever(model, tmp_path):
    with under_strategy.whole_files(model):
        model.save_weights(tmp_path / "sharded.weights.json", max_shard_size=1.0)
        model.save_weights(filepath=tmp_path / "one.weights.h5", overwrite=True)
        with pytest.raises(ValueError, match="extension"):
            model.save(tmp_path / "model.tf")
    assert "save" not in vars(model) and "save_weights" not in vars(model)
    assert {"sharded.weights.json", "one.weights.h5"} <= {path.name for path in tmp_path.iterdir()}
    changed = cases.small()
    changed.load_weights(tmp_path / "one.weights.h5")
    np.testing.assert_array_equal(changed.get_weights()[0], model.get_weights()[0])


@pytest.mark.process
def test_an_evaluator_has_a_strategy_of_its_own():
    """It trains with nobody, and waits for nobody."""
    config = {"cluster": {"worker": free_addresses(1), "evaluator": free_addresses(1)}}
    config["task"] = {"type": "evaluator", "index": 0}
    process = Process("worker", TF_CONFIG=json.dumps(config))
    process.ask(random_numbers)
    assert len(process.answer()) == 2
    process.stop()

"""`Resume` with two workers: they end with the weights of a run that was never interrupted, or all of them stop."""

import re
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.layers import Dense, Dropout, Embedding

from keras_tx.models.checked_data import CheckedModel
from keras_tx.training import PaddedCrossentropy, Resume

pytestmark = [
    pytest.mark.process,
    pytest.mark.tensorflow,
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="strategies are TensorFlow's"),
]
IDS = np.random.default_rng(0).integers(1, 11, size=(22, 5)).astype("int32")


def train(strategy, folder, cut=None, own=False, epochs=2):
    """Trains in a worker, and returns its weights; `own` gives each worker a directory, `cut` is a step of epoch 1."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input((None,), dtype="int32")  # a model of keras_tx takes twice as long to trace
        model = CheckedModel(x, keras.Sequential([Embedding(11, 8), Dropout(0.3), Dense(11)])(x))
        model.compile(keras.optimizers.Adam(0.01), PaddedCrossentropy())
    index = strategy.cluster_resolver.task_id
    resume = Resume(Path(folder) / str(index) if own else folder, save_freq=2)
    rows = tf.data.Dataset.from_tensor_slices((IDS, IDS))
    data = resume.dataset(lambda epoch: rows.shuffle(22, seed=epoch).batch(4))
    now = []

    def stop(batch, logs):
        if cut is not None and now[-1] == 1 and batch == cut:
            raise ValueError(f"cut off at {cut}")

    callback = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: now.append(epoch), on_train_batch_end=stop
    )
    np.random.seed(index)
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5)  # once in each epoch, also when resumed
    history = model.fit(data, epochs=epochs, shuffle=False, verbose=0, callbacks=[callback, halved, resume])
    weights = [weight.tolist() for weight in model.get_weights()]
    return {"weights": weights, "loss": history.history["loss"], "draw": float(np.random.random())}


@pytest.fixture(scope="module")
def whole(workers, tmp_path_factory):
    found = workers(train, folder=str(tmp_path_factory.mktemp("whole")))
    assert found[0]["weights"] == found[1]["weights"] and found[0]["draw"] != found[1]["draw"]
    return found


def cut_off(workers, folder, **options):
    with pytest.raises(ValueError, match="cut off at 3"):
        workers(train, folder=str(folder), cut=3, **options)


def test_cut_off_they_end_with_the_same_weights(workers, whole, tmp_path):
    cut_off(workers, tmp_path)
    assert workers(train, folder=str(tmp_path)) == whole


@pytest.fixture(scope="module")
def own(workers, tmp_path_factory):
    """The directories of two workers with a disk each, after a run that was cut off."""
    folder = tmp_path_factory.mktemp("own")
    cut_off(workers, folder, own=True)
    return folder


@pytest.fixture
def disks(own, tmp_path):
    return shutil.copytree(own, tmp_path / "disks")


def test_a_worker_that_lost_its_disk_gets_the_backup_of_the_chief(workers, whole, disks):
    shutil.rmtree(disks / "1")
    assert workers(train, folder=str(disks), own=True) == whole


def test_if_the_chief_lost_its_disk_all_stop(workers, disks):
    shutil.rmtree(disks / "0")
    names = [re.escape(f"worker {i} ({workers.addresses[i]})") for i in range(2)]
    message = (
        rf"The chief, {names[0]}, must have the backup .*Received: {names[0]}: none; {names[1]}: the note that "
        f"{names[0]} has a backup after 1 epoch and 2 steps"
    )
    for process in workers.processes:
        process.ask(train, folder=str(disks), own=True)
    for process in workers.processes:
        with pytest.raises(ValueError, match=message):
            process.answer()


def test_if_the_chief_has_a_damaged_backup_all_stop(workers, disks):
    (disks / "0" / "backup.npz").write_bytes(b"PK")
    for process in workers.processes:
        process.ask(train, folder=str(disks), own=True)
    for process in workers.processes:
        with pytest.raises(ValueError, match="The backup must be a whole file of `Resume`"):
            process.answer()

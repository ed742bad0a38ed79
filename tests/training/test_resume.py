"""`Resume`: a training that is interrupted anywhere ends with the weights of one that is not."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from keras_tx.training import Muon, Resume, backups
from tests import forked
from tests.tools import to_numpy

tf = pytest.importorskip("tensorflow")

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="forks processes")
IDS = np.random.default_rng(0).integers(1, 11, size=(23, 3)).astype("int32")


def new_model(units=11, optimizer="adam", dtype=None):
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(11, 7, dtype=dtype),
            keras.layers.Dropout(0.5, dtype=dtype),
            keras.layers.Dense(units, dtype=dtype),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer() if callable(optimizer) else optimizer
    model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=True)  # tracing would be most of the time
    return model


def data_of(resume):
    ids = tf.data.Dataset.from_tensor_slices((IDS, IDS))
    return resume.dataset(lambda epoch: ids.shuffle(23, seed=epoch).batch(5))


class CutOff(Exception):
    pass


def cut_off(epoch, batch):
    """Ends `fit` in the midst of an epoch."""
    now = []

    def on_batch(b, logs):
        if now[-1] == epoch and b == batch:
            raise CutOff

    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: now.append(e), on_train_batch_end=on_batch)


def fit(folder, *callbacks, epochs=3, kept=(), save_freq="epoch", **model):
    """(history, model) of a model made anew, as by the same command started again."""
    keras.utils.set_random_seed(1)
    resume, model = Resume(folder, save_freq=save_freq, callbacks=kept), new_model(**model)
    history = model.fit(data_of(resume), epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, *kept, resume])
    return history, model


def assert_same_weights(model, other):
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


class Counts(keras.callbacks.Callback):
    """Has a state that its hooks for batches change."""

    def __init__(self):
        super().__init__()
        self.begun, self.draws = 0, []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun += 1

    def on_train_batch_end(self, batch, logs=None):
        self.draws.append(float(np.random.random()))


# Steps after which a backup is written, in an epoch of 5 steps, and where the run is cut off.
@pytest.mark.parametrize("save_freq, cuts", [(2, [(0, 2), (1, 1), (2, 4)]), (1, [(1, 3), (1, 4)]), (7, [(1, 3)])])
def test_save_freq_continues_in_the_middle_of_an_epoch(save_freq, cuts, tmp_path):
    accumulating = {"optimizer": lambda: keras.optimizers.Adam(gradient_accumulation_steps=3)}
    options = {"save_freq": save_freq, **(accumulating if save_freq == 2 else {})}
    whole = Counts()
    history, model = fit(tmp_path / "whole", kept=[whole], **options)
    for cut in cuts:
        with pytest.raises(CutOff):
            fit(tmp_path / "cut", cut_off(*cut), kept=[Counts()], **options)
    counted = Counts()
    cut_history, cut_model = fit(tmp_path / "cut", kept=[counted], **options)
    assert_same_weights(cut_model, model)
    assert (cut_history.epoch, cut_history.history) == (history.epoch, history.history)
    assert (counted.begun, counted.draws) == (whole.begun, whole.draws) and whole.begun == 15


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="there an execution is one step")
def test_save_freq_in_a_graph_with_several_steps_per_execution(tmp_path):
    def run(folder, *callbacks, epochs=2):
        keras.utils.set_random_seed(1)
        model, resume = new_model(), Resume(folder, save_freq=2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=2)
        options = {"shuffle": False, "verbose": 0, "callbacks": [*callbacks, resume]}
        return model.fit(data_of(resume), epochs=epochs, **options), model

    history, model = run(tmp_path / "whole")
    with pytest.raises(CutOff):
        run(tmp_path / "cut", cut_off(1, 5))
    cut_history, cut_model = run(tmp_path / "cut")
    assert_same_weights(cut_model, model)
    assert cut_history.history == history.history
    with pytest.raises(CutOff):
        run(tmp_path / "cut", cut_off(2, 5), epochs=3)
    with pytest.raises(
        ValueError, match=r"`steps_per_execution` must be that of the backup, 2. Received: .*=1, backup"
    ):
        fit(tmp_path / "cut", save_freq=2)


def test_what_a_position_needs(tmp_path):
    for wrong in (0, -2, 1.5, "batch", True, None):
        with pytest.raises(ValueError, match=f"must be 'epoch' or a positive number of steps. Received: .*={wrong!r}"):
            Resume(tmp_path, save_freq=wrong)
    assert Resume(tmp_path, save_freq=np.int64(3)).save_freq == 3
    with pytest.raises(ValueError, match=r"must be 'epoch' unless the data come from `Resume.dataset`.*save_freq=2"):
        new_model().fit(IDS, IDS, verbose=0, callbacks=[Resume(tmp_path, save_freq=2)])
    with pytest.raises(CutOff):
        fit(tmp_path, cut_off(0, 3), save_freq=3)
    with pytest.raises(ValueError, match="`save_freq` must be a number of steps for this backup.*save_freq='epoch'"):
        fit(tmp_path)
    resume, ids = Resume(tmp_path, save_freq=3), tf.data.Dataset.from_tensor_slices((IDS, IDS))
    short = resume.dataset(lambda epoch: ids.take(8).batch(5))
    with pytest.raises(
        ValueError, match="The data of epoch 1 must have at least the 3 batches that training .* Received: 2 batches"
    ):
        new_model().fit(short, shuffle=False, verbose=0, callbacks=[resume])


class StopsAt(keras.callbacks.Callback):
    """Stops the training after some updates, counted in this process: as one that looks at a clock."""

    def __init__(self, updates):
        super().__init__()
        self.left = updates

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = self.model.stop_training or self.left == 0


@pytest.mark.parametrize("save_freq", [1, 2])
def test_a_run_that_a_callback_stopped_in_the_middle_of_an_epoch_stays_stopped(save_freq, tmp_path):
    history, whole = fit(tmp_path / "whole", StopsAt(8), save_freq=save_freq)
    assert int(to_numpy(whole.optimizer.iterations)) == 8

    def cut(epoch, logs):
        if epoch == 1:
            raise CutOff

    with pytest.raises(CutOff):  # the run is stopped after 8 updates, and killed before the epoch is saved
        fit(tmp_path / "cut", StopsAt(8), keras.callbacks.LambdaCallback(on_epoch_end=cut), save_freq=save_freq)
    for _ in range(2):
        cut_history, model = fit(tmp_path / "cut", save_freq=save_freq)
        assert_same_weights(model, whole)
        assert (cut_history.epoch, cut_history.history) == (history.epoch, history.history)


def test_a_run_stopped_before_the_position_keeps_the_backup(tmp_path):
    _, whole = fit(tmp_path / "whole", save_freq=2)
    with pytest.raises(CutOff):
        fit(tmp_path / "cut", cut_off(1, 4), save_freq=2)
    before = (tmp_path / "cut" / "backup.npz").read_bytes()
    fit(tmp_path / "cut", StopsAt(2), save_freq=2)
    assert (tmp_path / "cut" / "backup.npz").read_bytes() == before
    _, model = fit(tmp_path / "cut", save_freq=2)
    assert_same_weights(model, whole)


@pytest.mark.parametrize("save_freq", ["epoch", 2])
@pytest.mark.parametrize("steps", [2, None])
def test_data_that_go_on_in_the_next_epoch_are_refused(save_freq, steps, tmp_path):
    resume, model = Resume(tmp_path, save_freq=save_freq), new_model()
    data = data_of(resume) if steps else data_of(resume).cache()
    with pytest.raises(ValueError, match="do not pass `steps_per_epoch` to `fit`, .* Received: epoch 2, which goes on"):
        model.fit(data, epochs=3, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[resume])
    state, _ = backups.read(tmp_path / "backup.npz")
    assert (state["epochs"], state["position"]) == ([0], None)


def test_data_without_an_end_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="`make` must return the data of one epoch, a finite dataset.* Received: .* without an end"
    ):
        Resume(tmp_path).dataset(lambda epoch: tf.data.Dataset.range(3).repeat())


@pytest.fixture
def killed(tmp_path):
    """Begins `tests.training.killed`: a process, whose output is in the file `killed.path`."""
    path = tmp_path / "output.txt"

    def begin(folder, *arguments, **options):
        with open(path, "w") as file:
            options |= {"stdout": file, "stderr": subprocess.STDOUT}
            return forked.start("tests.training.killed", folder, *arguments, **options)

    begin.path = path
    return begin


def assert_same_files(one, other):
    with np.load(one / "weights.npz") as one, np.load(other / "weights.npz") as other:
        assert set(one.files) == set(other.files) > {"loss", "epoch", "arr_0"}
        for name in one.files:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@LINUX
@pytest.mark.process
@pytest.mark.tensorflow
def test_killed_at_any_moment_it_ends_with_the_weights_of_a_run_never_killed(killed, tmp_path):
    process = killed(tmp_path, "write:1", "batch:8", "written:1", "replaced:2")
    assert process.wait() == 0, killed.path.read_text()[-3000:]
    assert_same_files(tmp_path / "killed", tmp_path / "whole")
    assert os.listdir(tmp_path / "killed" / "backup") == ["backup.npz"]


@LINUX
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.tensorflow
def test_killed_from_outside_at_random_times(killed, tmp_path):
    generator, kills, whole = random.Random(0), 0, None
    for part in ("whole", "killed"):
        (tmp_path / part).mkdir()
        while not (tmp_path / part / "weights.npz").exists():
            begun = time.monotonic()
            # The last is not a fork: it has other hashes of strings than those that wrote the backup.
            process = killed(tmp_path / part, "alone", new=kills == 3)
            if part == "killed" and kills < 3:
                time.sleep(whole * generator.uniform(0.2, 1.0))
                process.send_signal(signal.SIGKILL)
                kills += 1
            assert process.wait() in (0, -signal.SIGKILL), killed.path.read_text()[-3000:]
            whole = whole or time.monotonic() - begun
    assert_same_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), dynamic_growth_steps=7),
        lambda: Muon(0.01),
    ],
)
def test_resumed_equals_whole(tmp_path, optimizer):
    history, whole = fit(tmp_path / "whole", epochs=3, optimizer=optimizer)
    with pytest.raises(CutOff):
        fit(tmp_path / "cut", cut_off(1, 2), epochs=3, optimizer=optimizer)
    resumed_history, resumed = fit(tmp_path / "cut", epochs=3, optimizer=optimizer)
    assert_same_weights(resumed, whole)
    assert resumed_history.history == history.history
    assert resumed_history.epoch == history.epoch == [0, 1, 2]
    for one, two in zip(resumed.optimizer.variables, whole.optimizer.variables, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(two), err_msg=one.path)


def test_what_draws_from_the_global_generators_goes_on(tmp_path):
    def draws(folder, epochs):
        drawn = []

        def draw(batch, logs):
            drawn.append((random.random(), np.random.normal(), np.random.permutation(5).tolist()))

        fit(folder, keras.callbacks.LambdaCallback(on_train_batch_begin=draw), epochs=epochs)
        return drawn

    whole = draws(tmp_path / "whole", 2)
    assert draws(tmp_path / "parts", 1) == whole[:5]
    assert draws(tmp_path / "parts", 2) == whole[5:]


def test_half_precision_is_kept_to_the_bit(tmp_path):
    _, whole = fit(tmp_path, epochs=2, dtype="bfloat16")
    _, again = fit(tmp_path, epochs=2, dtype="bfloat16")
    assert {w.dtype.name for w in again.get_weights()} == {"bfloat16"}
    assert_same_weights(again, whole)


def test_a_finished_training_is_not_repeated_and_can_be_prolonged(tmp_path, capsys):
    history, whole = fit(tmp_path / "whole", epochs=3)
    fit(tmp_path / "parts", epochs=2)
    _, parts = fit(tmp_path / "parts", epochs=3)
    assert_same_weights(parts, whole)
    batches = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    again, model = fit(tmp_path / "parts", count, epochs=3)
    assert batches == []
    assert_same_weights(model, whole)
    assert again.history == history.history
    assert model.fit(IDS, IDS, epochs=1, verbose=0).epoch == [0]  # without Resume: an ordinary fit


def test_numbers_that_callbacks_log_stay_numbers(tmp_path):
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(rate=np.float32(0.5)))
    fit(tmp_path, log, epochs=2)
    history, _ = fit(tmp_path, log, epochs=3)
    assert history.history["rate"] == [0.5] * 3


def test_a_callback_keeps_a_method_of_its_own(tmp_path):
    """`LambdaCallback` has its functions as attributes: each `fit` calls them, before and after `Resume`."""
    begun, model = [], new_model()
    first, last = (keras.callbacks.LambdaCallback(on_train_begin=lambda logs, n=n: begun.append(n)) for n in (0, 1))
    for epochs in (1, 2, 3):
        resume = Resume(tmp_path, callbacks=[first, last])
        model.fit(IDS, IDS, epochs=epochs, verbose=0, callbacks=[first, resume, last])
    assert begun == [0, 1] * 3


def test_a_fit_that_ends_in_on_train_begin_changes_no_later_one(tmp_path):
    """Another callback raises an error after `Resume` has said with which epoch `fit` begins."""

    def fails(logs):
        raise CutOff

    begun, model = [], new_model()
    count = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: begun.append(0))
    own, resume = count.on_train_begin, Resume(tmp_path / "one", callbacks=[count])
    model.fit(IDS, IDS, epochs=2, verbose=0, callbacks=[count, resume])
    with pytest.raises(CutOff):
        model.fit(
            IDS,
            IDS,
            epochs=3,
            verbose=0,
            callbacks=[count, resume, keras.callbacks.LambdaCallback(on_train_begin=fails)],
        )
    assert model.fit(IDS, IDS, epochs=2, verbose=0, callbacks=[Resume(tmp_path / "two")]).epoch == [0, 1]
    (tmp_path / "one" / "backup.npz").unlink()
    assert model.fit(IDS, IDS, epochs=3, verbose=0, callbacks=[count, resume]).epoch == [0, 1, 2]
    assert count.on_train_begin is own


@pytest.mark.tensorflow  # elsewhere `fit` builds the model before callbacks see it
def test_a_model_that_is_not_built_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="The model must be built before `fit`, .*: <Sequential .* which is not built"):
        model.fit(np.ones((5, 2)), np.ones((5, 3)), verbose=0, callbacks=[Resume(tmp_path)])
    model.build((None, 2))
    model.fit(np.ones((5, 2)), np.ones((5, 3)), verbose=0, callbacks=[Resume(tmp_path)])


def test_it_says_where_it_goes_on(tmp_path, capsys):
    fit(tmp_path, epochs=2)
    assert capsys.readouterr().out == ""
    model = new_model()
    model.fit(IDS, IDS, epochs=3, verbose=2, callbacks=[Resume(tmp_path)])
    assert f"Resuming after 2 epochs: {tmp_path / 'backup.npz'}" in capsys.readouterr().out


def test_the_data_of_an_epoch_depend_on_its_number_alone(tmp_path):
    resume, ids = Resume(tmp_path), tf.data.Dataset.range(23)
    data = resume.dataset(lambda epoch: ids.shuffle(23, seed=epoch).batch(5))
    assert data.cardinality() == 5

    def order(epoch):
        resume.on_epoch_begin(epoch)
        return [tuple(batch) for batch in data.as_numpy_iterator()]

    assert order(0) == order(0) != order(1) != order(2)
    assert order(1) == order(1)
    assert sorted(sum(order(3), ())) == list(range(23))
    assert resume.dataset(lambda epoch: ids.filter(lambda i: i < 3)).cardinality() == tf.data.UNKNOWN_CARDINALITY


def test_the_options_of_the_data_are_kept(tmp_path):
    """`tf.distribute` would divide the part of a worker again."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.autotune.enabled = False
    for count in (3, -2):  # a known number of batches, and an unknown one
        rows = tf.data.Dataset.range(3).with_options(options)
        rows = rows if count == 3 else rows.filter(lambda i: i < 2)
        data = Resume(tmp_path).dataset(lambda epoch, rows=rows: rows)
        assert data.options() == rows.options() and int(data.cardinality()) == count
        assert data.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF


def test_the_function_of_the_data_may_have_control_flow_over_the_epoch(tmp_path):
    """As a function of `Dataset.map`: AutoGraph converts it."""
    resume, ids = Resume(tmp_path), tf.data.Dataset.range(7)

    def make(epoch):
        if epoch > 1:
            first = epoch
        else:
            first = tf.constant(3, "int64")
        return ids.skip(first).take(2)

    data = resume.dataset(make)
    for epoch, first in ((0, 3), (1, 3), (2, 2), (5, 5)):
        resume.on_epoch_begin(epoch)
        assert list(data.as_numpy_iterator()) == [first, first + 1]


def test_the_state_of_other_callbacks_goes_on(tmp_path):
    def stopper():
        return keras.callbacks.EarlyStopping("loss", patience=2, min_delta=10.0, restore_best_weights=True)

    def plateau():
        return keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=10.0)

    kept = stopper(), plateau()
    history, whole = fit(tmp_path / "whole", epochs=9, kept=kept)
    assert len(history.epoch) == 3 and kept[0].best_epoch == 0
    for epoch in (1, 2):
        with pytest.raises(CutOff):
            fit(tmp_path / "cut", cut_off(epoch, 1), epochs=9, kept=(stopper(), plateau()))
    kept = stopper(), plateau()
    history, resumed = fit(tmp_path / "cut", epochs=9, kept=kept)
    assert history.epoch == [0, 1, 2]
    assert_same_weights(resumed, whole)
    assert float(to_numpy(resumed.optimizer.learning_rate)) == float(to_numpy(whole.optimizer.learning_rate)) < 0.001
    history, again = fit(tmp_path / "cut", epochs=9, kept=(stopper(), plateau()))  # it stays stopped
    assert history.epoch == [0, 1, 2]
    assert_same_weights(again, whole)


def test_what_the_state_of_a_callback_is():
    class Odd(keras.callbacks.Callback):
        def __init__(self, given):
            super().__init__()
            self.given = self.seen = given
            self.table = [np.arange(3), (np.float32(0.5), None)]
            self.open = open

    arrays = {}
    state = json.loads(json.dumps(backups.callback_state(Odd(4), arrays)))
    assert state == {"seen": 4, "table": [{"array": "array 0"}, [0.5, None]]}
    other = Odd(5)
    backups.restore_callback(other, state, arrays)
    assert (other.given, other.seen, other.open) == (5, 4, open)
    np.testing.assert_array_equal(other.table[0], np.arange(3))
    assert other.table[1] == [0.5, None]


def test_a_backup_of_another_model_is_refused_with_the_difference(tmp_path):
    fit(tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"which has the variable .*kernel \(7, 11\) float32. Received: .* \(7, 13\)"):
        fit(tmp_path, units=13)
    with pytest.raises(ValueError, match=r"the variable adam\S* \(\) int\d+. Received: \S*sgd"):
        fit(tmp_path, optimizer="sgd")
    model = new_model()
    small = keras.Sequential([keras.Input((3,), dtype="int32"), *model.layers[:2]])
    small.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"must be those of the backup, which has"):
        small.fit(IDS, np.ones((23, 3, 7)), verbose=0, callbacks=[Resume(tmp_path)])
    with pytest.raises(ValueError, match=r"which has 3 variables. Received: 2, backup 'x'; only one .* has c \(2,\) f"):
        backups.check_same([["a", [], "f"], ["b", [], "f"], ["c", [2], "f"]], [["a", [], "f"], ["b_1", [], "f"]], "x")
    with pytest.raises(
        ValueError, match=r"`callbacks` must be those of the backup, \[\]. Received: \['EarlyStopping'\]"
    ):
        fit(tmp_path, kept=[keras.callbacks.EarlyStopping()])


def test_a_damaged_or_foreign_backup_is_refused(tmp_path):
    path = tmp_path / "backup.npz"
    backups.write(path, {"a": 1}, {"x": np.arange(5.0), "y": np.arange(3)})
    whole = path.read_bytes()
    for size in range(0, len(whole), 17):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"must be a whole file of `Resume`; .* Received: '.*backup.npz'"):
            backups.read(path)
    for place in range(0, len(whole), 5):
        flipped = bytearray(whole)
        flipped[place] ^= 255
        path.write_bytes(flipped)
        try:
            state, arrays = backups.read(path)
        except ValueError as error:
            assert "must be a whole file of `Resume`; delete it to begin anew" in str(error)
        else:  # a time or another byte that nobody reads
            assert state["a"] == 1
            np.testing.assert_array_equal(arrays["x"], np.arange(5.0))
            np.testing.assert_array_equal(arrays["y"], np.arange(3))
    np.savez(path, a=np.ones(3))
    with pytest.raises(ValueError, match=r"whole file of `Resume`; .* Received: '.*backup.npz' \('state"):
        fit(tmp_path)
    fit(tmp_path / "other")
    state, arrays = backups.read(tmp_path / "other" / "backup.npz")
    for name, value in (
        ("epochs", []),
        ("epochs", 5),
        ("callbacks", None),
        ("variables", 3),
    ):
        backups.write(path, {**state, name: value}, arrays)
        with pytest.raises(ValueError, match=r"must be a whole file of `Resume`; .* Received: '.*backup.npz'"):
            fit(tmp_path)
    np.savez(path, state=np.frombuffer(b'{"format": "x", "arrays": []}', "uint8"))
    with pytest.raises(ValueError, match=r"Received: '.*backup.npz' \(format 'x' for 'keras_tx"):
        fit(tmp_path)


def test_an_error_while_writing_leaves_the_old_backup_and_nothing_else(tmp_path, monkeypatch):
    backups.write(tmp_path / "b.npz", {"a": 1}, {"x": np.arange(3)})

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        backups.write(tmp_path / "b.npz", {"a": 2}, {"x": np.arange(4)})
    assert os.listdir(tmp_path) == ["b.npz"]
    state, arrays = backups.read(tmp_path / "b.npz")
    assert (state["a"], arrays["x"].tolist()) == (1, [0, 1, 2])


def test_two_runs_with_one_directory_write_whole_backups(tmp_path, monkeypatch):
    path, savez = tmp_path / "backup.npz", np.savez
    (tmp_path / "backup.npz-0123456789abcdef.part").write_bytes(b"of a killed process")

    def amid_another_run(file, **arrays):
        monkeypatch.setattr(np, "savez", savez)
        backups.write(path, {"run": 2}, {"x": np.arange(7)})
        assert backups.read(path)[0]["run"] == 2
        savez(file, **arrays)

    monkeypatch.setattr(np, "savez", amid_another_run)
    backups.write(path, {"run": 1}, {"x": np.arange(5)})
    state, arrays = backups.read(path)
    assert (state["run"], arrays["x"].tolist()) == (1, [0, 1, 2, 3, 4])
    if sys.platform != "win32":  # which has no locks, and so nothing that tells of a killed process
        assert os.listdir(tmp_path) == ["backup.npz"]


def test_arguments_of_a_wrong_type_are_refused(tmp_path):
    with pytest.raises(TypeError, match="`directory` must be a path, a `str` or `Path`. Received: directory=3"):
        Resume(3)
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match="`directory` must be a folder. Received: a file, directory='.*file'"):
        Resume(tmp_path / "file")
    with pytest.raises(TypeError, match="`callbacks` must be a list of Keras callbacks. Received: 'loss' among them"):
        Resume(tmp_path, callbacks=["loss"])
    with pytest.raises(TypeError, match=r"`make` must return a tf.data.Dataset. Received: \[1\]"):
        Resume(tmp_path).dataset(lambda epoch: [1])


class Counting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.count = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.count += 1

    def on_train_begin(self, logs=None):
        self.count = 0


@pytest.mark.parametrize("is_last", [True, False])
def test_what_a_callback_changes_at_the_beginning_of_an_epoch_counts(is_last, tmp_path):
    def counted(epochs):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        counting, x = Counting(), np.ones((2, 1))
        callbacks = [counting, Resume(tmp_path, callbacks=counting)]
        model.fit(x, x, epochs=epochs, verbose=0, callbacks=callbacks[:: 1 if is_last else -1])
        assert "on_train_begin" not in vars(counting)
        return counting.count

    assert [counted(2), counted(4), counted(5), counted(5)] == [2, 4, 5, 5]

"""A `fit` that goes on where it was cut off, at the end of the last whole epoch.

What is on disk is always one whole backup: it is written beside the old one and takes its name only when complete.
"""

import os
from pathlib import Path
from typing import Any

import keras

from keras_tx.keras_internals import begin_fit_at
from keras_tx.optional import Lazy
from keras_tx.training import backups

tf = Lazy("tensorflow")


class Resume(keras.callbacks.Callback):
    """Keeps a backup of the training in `directory`; the same command started again goes on from it.

    At the end of each epoch it writes the model's variables, those of dropout's seeds among them, the optimizer's
    (moments, updates so far, learning rate, moving averages, loss scale), the states of Python's, NumPy's and PyTorch's
    random generators, the epoch's number and the history. A process killed at any moment, also while writing, leaves a
    whole backup. Started again, `fit` goes on with the epoch that was cut off, and its history holds all epochs. The
    backup stays after the last epoch: the same command then trains no more, and with more `epochs` it trains on, unless
    a callback stopped it. Delete the directory to begin anew, and use one for each run.

    The result is that of a run never interrupted, to the last bit, when an epoch's data depend on nothing but its
    number. `shuffle` of `tf.data`, and of `fit` on TensorFlow, begins its random sequence again with each process; so
    let `resume.dataset` make the data of each epoch:

    >>> resume = Resume("runs/translate")
    >>> train = resume.dataset(lambda epoch: pairs.shuffle(10_000, seed=epoch).batch(64))
    >>> model.fit(train, epochs=20, callbacks=[..., resume])

    To the last bit also needs operations that are deterministic, see `tf.config.experimental.enable_op_determinism`.

    `Resume` must be the last in the list of callbacks, so that what they put into the logs, and that they stopped the
    training, is in the backup. A callback that writes a file by itself (`CSVLogger(append=True)`) may write the epoch
    that was cut off twice. The learning rate is that of the backup, not that of `compile`, unless it is a schedule.

    Against `keras.callbacks.BackupAndRestore`, which writes weights and epoch to two files in place, does not restore
    the seeds of dropout's masks, the history or other callbacks, and deletes all at the end.

    Args:
        directory: of the backup; made where there is none.
        callbacks: those of the callbacks of `fit` that have a state: `EarlyStopping`, `ReduceLROnPlateau`,
            `ModelCheckpoint(save_best_only=True)`. Kept are their numbers, strings and arrays (the best weights) that
            are no arguments of their constructor.

    Raises:
        TypeError: for what is not a path or a callback.
        ValueError: at the start of `fit`, for a backup that is damaged, of another model or optimizer, or with other
            `callbacks`.
    """

    def __init__(self, directory, *, callbacks=()):
        super().__init__()
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"`directory` must be a path. Received: directory={directory!r}")
        self.path = Path(directory) / "backup.npz"
        self.callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"`callbacks` must be a list of Keras callbacks. Received: {callback!r} among them")
        self._epoch = None  # a tf.Variable, once there is a dataset that reads it
        self._unrestored: Any = None  # (state, arrays) of a backup until all of it is in place

    def dataset(self, make):
        """A `tf.data.Dataset` whose elements in each epoch are those of `make(epoch)`.

        Everything random in it must come from `epoch`: `shuffle(n, seed=epoch)`, `tf.random.stateless_uniform(shape,
        seed=[7, epoch])`. An epoch is what `make` returns, so `fit` is not given `steps_per_epoch`: for shorter epochs
        `take` the number of batches.

        Args:
            make: a function from the epoch's number, a scalar int64 tensor, to a `tf.data.Dataset` of batches. It is
                called once, in a graph, as the function of `Dataset.flat_map`, and once to learn the number of batches.
        """
        if self._epoch is None:
            with tf.device("CPU:0"):
                self._epoch = tf.Variable(0, dtype="int64", trainable=False, name="epoch")
        first = make(tf.constant(0, "int64"))
        if not isinstance(first, tf.data.Dataset):
            raise TypeError(f"`make` must return a tf.data.Dataset. Received: {first!r}")
        dataset = tf.data.Dataset.range(1).flat_map(lambda _: make(self._epoch.read_value()))
        count = first.cardinality()
        return dataset if count < 0 else dataset.apply(tf.data.experimental.assert_cardinality(count))

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._epochs, self._logs, self._unrestored = [], {}, None
        if self.path.exists():
            self._read()

    def on_epoch_begin(self, epoch, logs=None):
        if self._epoch is not None:
            self._epoch.assign(epoch)
        self._restore_late()

    def on_epoch_end(self, epoch, logs=None):
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self._logs.setdefault(name, []).append(value)
        arrays = {f"variable {index}": backups.array_of(v) for index, v in enumerate(self._variables())}
        state = {
            "epochs": self._epochs,
            "logs": self._logs,
            "stopped": bool(self.model.stop_training),
            "variables": [backups.described(variable) for variable in self._variables()],
            "random": backups.random_states(arrays),
            "callbacks": [[type(c).__name__, backups.encoded_state(c, arrays)] for c in self.callbacks],
        }
        backups.write(self.path, state, arrays)

    def on_train_end(self, logs=None):
        self._restore_late()  # where no epoch was left

    def _variables(self):
        optimizer = self.model.optimizer
        return [*self.model.variables, *(optimizer.variables if optimizer is not None else ())]

    def _read(self):
        state, arrays = backups.read(self.path)
        classes, given = [name for name, _ in state["callbacks"]], [type(c).__name__ for c in self.callbacks]
        if classes != given:
            raise ValueError(
                f"`callbacks` must be those of the backup, {classes}. Received: {given}, backup {str(self.path)!r}"
            )
        variables = self._variables()
        backups.check_same(state["variables"], [backups.described(v) for v in variables], self.path)
        for index, variable in enumerate(variables):
            variable.assign(arrays.pop(f"variable {index}"))
        self._epochs, self._logs = state["epochs"], state["logs"]
        self._unrestored = state, arrays
        self._set_states()
        start = self._epochs[-1] + 1
        if self.params.get("verbose"):
            print(f"Resuming after {start} epochs: {self.path}")
        # `fit` asks for it after this, as Keras' BackupAndRestore also relies on; from beyond the last it trains none.
        begin_fit_at(self.model, max(start, self.params["epochs"]) if state["stopped"] else start)

    def _restore_late(self):
        """The rest, once: what callbacks after us in the list, the history among them, have begun anew since."""
        if self._unrestored is None:
            return
        self._set_states()
        backups.restore_random_states(self._unrestored[0]["random"], self._unrestored[1])
        self._unrestored = None
        begin_fit_at(self.model, None)  # the next `fit` begins where it says
        history = getattr(self.model, "history", None)
        if history is not None:
            history.epoch, history.history = list(self._epochs), {name: list(v) for name, v in self._logs.items()}

    def _set_states(self):
        state, arrays = self._unrestored
        for callback, (_, values) in zip(self.callbacks, state["callbacks"], strict=True):
            backups.restore_state(callback, values, arrays)

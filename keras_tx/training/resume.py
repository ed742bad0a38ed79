"""A callback with which an interrupted `fit` continues after its last complete epoch."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras

from keras_tx.keras_internals import begin_fit_at
from keras_tx.optional import Lazy
from keras_tx.training import backups
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


class Resume(keras.callbacks.Callback):
    """A callback that backs up the training after each epoch, so that an interrupted `fit` continues when run again.

    At the end of each epoch it saves the variables of the model (with the seeds of dropout), the variables of the
    optimizer (moments, number of updates, learning rate, moving averages, loss scale), the states of Python's, NumPy's
    and PyTorch's random generators, the number of the epoch and the history. A process that is killed at any moment,
    even while writing, leaves a complete backup. Started again, `fit` repeats the epoch that was interrupted, and its
    history contains all epochs. The backup stays after the last epoch: the same command then trains no further; with
    more `epochs` it continues, unless a callback stopped the training. Delete the directory to start from the
    beginning, and use one directory for each run.

    The result is equal, bit by bit, to that of an uninterrupted run, if the data of an epoch depend only on its number.
    `shuffle` of `tf.data`, and of `fit` on TensorFlow, restarts its random sequence in each process; so let
    `Resume.dataset` create the data of each epoch, as below. Operations must also be deterministic: see
    `tf.config.experimental.enable_op_determinism`.

    `Resume` must be the last in the list of callbacks, so that the backup contains what the others log, and whether
    they stopped the training. A callback that writes its own file (such as `CSVLogger(append=True)`) may write the
    interrupted epoch twice. The learning rate comes from the backup, not from `compile`, unless it is a schedule.

    `keras.callbacks.BackupAndRestore`, in comparison, overwrites its files in place, does not restore the seeds of
    dropout, the history or other callbacks, and deletes the backup at the end.

    Args:
        directory: the directory of the backup, which is created if it does not exist.
        callbacks: the callbacks of `fit` whose state is saved too, such as `EarlyStopping`, `ReduceLROnPlateau` or
            `ModelCheckpoint(save_best_only=True)`. Their state is numbers, strings and arrays (such as the best
            weights) that are not arguments of their constructors.

    Raises:
        TypeError: for a `directory` that is not a path, or for `callbacks` that are not callbacks. ValueError: at the
            start of `fit`, for a backup that is damaged, or was made with another model, optimizer or other
            `callbacks`.

    Examples:
        >>> def train(epochs):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse", run_eagerly=True)
        ...     resume = keras_tx.training.Resume("runs/line")
        ...     x = np.ones((4, 1))
        ...     return model.fit(x, 2 * x, epochs=epochs, shuffle=False, verbose=0, callbacks=[resume])
        >>> first = train(epochs=2)  # interrupted here
        >>> second = train(epochs=3)
        >>> second.epoch
        [0, 1, 2]
        >>> second.history["loss"][:2] == first.history["loss"]
        True

        Data that are shuffled differently in each epoch:

        >>> import tensorflow as tf
        >>> resume = keras_tx.training.Resume("runs/translate")
        >>> pairs = tf.data.Dataset.range(10)
        >>> train_data = resume.dataset(lambda epoch: pairs.shuffle(10, seed=epoch).batch(5))
        >>> len(train_data)
        2
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        callbacks: keras.callbacks.Callback | Iterable[keras.callbacks.Callback] = (),
    ):
        super().__init__()
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"`directory` must be a path. Received: directory={directory!r}")
        self.path = Path(directory) / "backup.npz"
        self.callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"`callbacks` must be a list of Keras callbacks. Received: {callback!r} among them")
        self._epoch: Any = None  # a tf.Variable, once there is a dataset that reads it
        self._unrestored: Any = None  # (state, arrays) of a backup until all of it is restored

    def dataset(self, make: Callable[[Tensor], Any]) -> Any:
        """A `tf.data.Dataset` whose elements in each epoch are those of `make(epoch)`.

        All randomness in it must come from `epoch`: `shuffle(n, seed=epoch)`, `tf.random.stateless_uniform(shape,
        seed=[7, epoch])`. `make` returns a whole epoch, so do not pass `steps_per_epoch` to `fit`; for shorter epochs
        use `take(number_of_batches)` in `make`.

        Args:
            make: a function from the number of the epoch, a scalar int64 tensor, to a `tf.data.Dataset` of batches. It
                is called once to count the batches, and traced once as the function of `Dataset.flat_map`.
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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._epochs: list[int] = []
        self._logs: dict[str, list[Any]] = {}
        self._unrestored = None
        if self.path.exists():
            with backups.reading(self.path):
                self._restore()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._epoch is not None:
            self._epoch.assign(epoch)
        self._restore_late()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self._logs.setdefault(name, []).append(value)
        arrays = {f"variable {index}": backups.as_array(v) for index, v in enumerate(self._variables())}
        state = {
            "epochs": self._epochs,
            "logs": self._logs,
            "stopped": bool(self.model.stop_training),
            "variables": [backups.describe(variable) for variable in self._variables()],
            "random": backups.random_states(arrays),
            "callbacks": [[type(c).__name__, backups.callback_state(c, arrays)] for c in self.callbacks],
        }
        backups.write(self.path, state, arrays)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore_late()  # if no epoch was left

    def _variables(self) -> list[Any]:
        optimizer = self.model.optimizer
        return [*self.model.variables, *(optimizer.variables if optimizer is not None else ())]

    def _restore(self) -> None:
        state, arrays = backups.read(self.path)
        classes, given = [name for name, _ in state["callbacks"]], [type(c).__name__ for c in self.callbacks]
        if classes != given:
            raise ValueError(
                f"`callbacks` must be those of the backup, {classes}. Received: {given}, backup {str(self.path)!r}"
            )
        variables = self._variables()
        backups.check_same(state["variables"], [backups.describe(v) for v in variables], self.path)
        for index, variable in enumerate(variables):
            variable.assign(arrays.pop(f"variable {index}"))
        self._epochs, self._logs = state["epochs"], state["logs"]
        self._unrestored = state, arrays
        self._restore_callbacks()
        start = self._epochs[-1] + 1
        if self.params.get("verbose"):
            print(f"Resuming after {start} epochs: {self.path}")
        # `fit` reads it after this call, as Keras' BackupAndRestore relies on; beyond the last epoch it trains nothing.
        begin_fit_at(self.model, max(start, self.params["epochs"]) if state["stopped"] else start)

    def _restore_late(self) -> None:
        """Restores, once, what later callbacks (the history is one) reset at the start of training."""
        if self._unrestored is None:
            return
        with backups.reading(self.path, ValueError):
            self._restore_callbacks()
            backups.restore_random_states(self._unrestored[0]["random"], self._unrestored[1])
        self._unrestored = None
        begin_fit_at(self.model, None)  # the next `fit` begins at its own `initial_epoch`
        history = getattr(self.model, "history", None)
        if history is not None:
            history.epoch, history.history = list(self._epochs), {name: list(v) for name, v in self._logs.items()}

    def _restore_callbacks(self) -> None:
        state, arrays = self._unrestored
        for callback, (_, values) in zip(self.callbacks, state["callbacks"], strict=True):
            backups.restore_callback(callback, values, arrays)

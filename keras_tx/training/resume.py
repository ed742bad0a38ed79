"""A callback with which an interrupted `fit` continues where it was last saved."""

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from keras_tx import checks
from keras_tx.internals.keras_training import begin_fit_at, callbacks_of_fit
from keras_tx.training import backups, workers
from keras_tx.training.agreement import after, agreed_backup, write_note
from keras_tx.training.epoch_data import EpochData
from keras_tx.training.mid_epoch import SkippedSteps, packed_metrics, restore_metrics
from keras_tx.types import Tensor


class Resume(keras.callbacks.Callback):
    """A callback that backs up the training, so that an interrupted `fit` continues when run again.

    At the end of each epoch, and after every `save_freq` steps if that is a number, it saves the variables of the model
    (with the seeds of dropout), the variables of the optimizer (moments, accumulated gradients, number of updates,
    learning rate, moving averages, loss scale), the states of Python's, NumPy's and PyTorch's random generators, the
    history, and the position: the epoch, and within it the step and the metrics. A process that is killed at any
    moment, even while writing, leaves a complete backup. Started again, `fit` repeats what was done since, and its
    history contains all epochs. The backup stays after the last epoch: the same command then trains no further; with
    more `epochs` it continues, unless a callback stopped the training. Delete the directory to start from the
    beginning, and use one directory for each run.

    The result is equal, bit by bit, to that of an uninterrupted run, if the data of an epoch depend only on its number.
    `shuffle` of `tf.data`, and of `fit` on TensorFlow, restarts its random sequence in each process; so let
    `Resume.dataset` create the data of each epoch, as below. A `keras.utils.PyDataset` with `workers` above 1 is
    shuffled before the random states are restored, so create it with `workers=1`. Operations must also be
    deterministic: see `tf.config.experimental.enable_op_determinism`. In the middle of an epoch, the batches before the
    position are read again but not trained on. Callbacks see the beginning of the epoch and these steps again; then all
    variables, which they may have changed (such as the learning rate), and the callbacks in `callbacks` get their saved
    state.

    `Resume` must be the last in the list of callbacks, so that the backup contains what the others log and change when
    an epoch ends, and whether they stopped the training. A callback that writes its own file (such as
    `CSVLogger(append=True)`) may write the interrupted epoch twice. The learning rate comes from the backup, not from
    `compile`, unless it is a schedule.

    **Several workers** (`keras_tx.distribution.multi_worker_strategy`, or several processes of `keras.distribution` on
    JAX): every worker has a `Resume`, and the first one, the chief, writes the backup. At the start all workers agree:
    they begin with the backup of the chief, which sends it to those that do not find it in their own directory. If the
    chief has none but another worker knows of one, all of them raise an error. So `directory` may be shared, or be on
    each machine's own disk. Each worker gets its own random states; workers that were added keep theirs.

    `keras.callbacks.BackupAndRestore`, in comparison, overwrites its files in place, does not restore the seeds of
    dropout, the history or other callbacks, and deletes the backup at the end.

    Args:
        directory: the directory of the backup, which is created if it does not exist.
        save_freq: "epoch", or a number of steps, as in `keras.callbacks.BackupAndRestore`: then the backup is also
            written after so many steps. This needs data from `Resume.dataset`.
        callbacks: the callbacks of `fit` whose state is saved too, such as `EarlyStopping`, `ReduceLROnPlateau` or
            `ModelCheckpoint(save_best_only=True)`. Their state is numbers, strings and arrays (such as the best
            weights) that are not arguments of their constructors. `SwapEMAWeights(swap_on_epoch=True)` must be among
            them if it stands before `Resume`: its state says whether the saved weights are the averages.

    Raises:
        TypeError: for a `directory` that is not a path, or for `callbacks` that are not callbacks.
        ValueError: for a `directory` that is a file; for a `save_freq` that is not "epoch" or a positive integer; at
            the start of `fit`, for a model that is not built, for a backup that is damaged, or was made with another
            model, optimizer, `steps_per_execution` or other `callbacks`; for a number as `save_freq` without
            `Resume.dataset`; for a `SwapEMAWeights` that is not in `callbacks`; if the chief of several workers has
            lost its backup; and in the second epoch, if its data continue the first's.

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

        Data that are shuffled differently in each epoch, and a backup every 1,000 steps:

        >>> import tensorflow as tf
        >>> resume = keras_tx.training.Resume("runs/translate", save_freq=1000)
        >>> pairs = tf.data.Dataset.range(10)
        >>> train_data = resume.dataset(lambda epoch: pairs.shuffle(10, seed=epoch).batch(5))
        >>> len(train_data)
        2
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_freq: str | int = "epoch",
        callbacks: keras.callbacks.Callback | Iterable[keras.callbacks.Callback] = (),
    ):
        super().__init__()
        folder = checks.local_path("directory", directory)
        if folder.is_file():
            raise ValueError(f"`directory` must be a folder. Received: a file, directory={str(directory)!r}")
        is_number = isinstance(save_freq, (int, np.integer)) and not isinstance(save_freq, bool)
        if save_freq != "epoch" and (not is_number or int(save_freq) < 1):
            raise ValueError(
                f"`save_freq` must be 'epoch' or a positive number of steps. Received: save_freq={save_freq!r}"
            )
        self.path = folder / "backup.npz"
        self.save_freq: int | None = int(save_freq) if is_number else None
        self.callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        for callback in self.callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(f"`callbacks` must be a list of Keras callbacks. Received: {callback!r} among them")
        if self.save_freq is not None:  # otherwise Keras need not wait for each step, to call a method of it
            self.on_train_batch_begin, self.on_train_batch_end = self._before_step, self._after_step
        self._data = EpochData()
        self._unrestored: Any = None  # (state, arrays) of a backup until all of it is restored
        self._skipped: SkippedSteps | None = None
        self._releases: list[Callable[[], None]] = []
        self._workers = workers.Workers()

    def dataset(self, make: Callable[[Tensor], Any]) -> Any:
        """A `tf.data.Dataset` whose elements in each epoch are those of `make(epoch)`.

        All randomness in it must come from `epoch`: `shuffle(n, seed=epoch)`, `tf.random.stateless_uniform(shape,
        seed=[7, epoch])`. `make` returns a whole epoch, so do not pass `steps_per_epoch` to `fit`; for shorter epochs
        use `take(number_of_batches)` in `make`.

        Args:
            make: a function from the number of the epoch, a scalar int64 tensor, to a `tf.data.Dataset` of batches. It
                is called once to count the batches, and traced once as the function of `Dataset.flat_map`.

        Raises:
            TypeError: if `make` returns something else.
            ValueError: if `make` returns a dataset without an end.
        """
        return self._data.dataset(make)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.save_freq is not None and not self._data.is_used:
            raise ValueError(
                "`save_freq` must be 'epoch' unless the data come from `Resume.dataset`, with which each epoch can be "
                f"read again from its beginning. Received: save_freq={self.save_freq}"
            )
        if not self.model.built:
            raise ValueError(
                "The model must be built before `fit`, so that `Resume` can restore its variables: begin it with "
                f"`keras.Input`, or call it on a batch. Received: {self.model}, which is not built"
            )
        self._check_swaps()
        self._release_callbacks()  # of a `fit` that has been interrupted
        begin_fit_at(self.model, None)
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        self._workers = workers.of_model(self.model)
        self._epochs: list[int] = []
        self._logs: dict[str, list[Any]] = {}
        self._unrestored = self._skipped = None
        self._unsaved_steps = 0
        found = agreed_backup(self.path, self._workers)
        if found is not None:
            with backups.reading(self.path):
                self._restore(*found)

    def _check_swaps(self) -> None:
        """Raises if the backup would not say that a callback before this one has put averages into the model."""
        before = itertools.takewhile(lambda callback: callback is not self, callbacks_of_fit(self))
        for callback in before:
            is_swap = isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch
            if is_swap and callback not in self.callbacks:
                given = [type(one).__name__ for one in self.callbacks]
                raise ValueError(
                    "`callbacks` of `Resume` must contain `SwapEMAWeights(swap_on_epoch=True)` if it stands before "
                    "`Resume` in `fit`, so that the backup says whether its weights are the averages: pass it as "
                    f"`callbacks`, or put it after `Resume`. Received: `callbacks` of {given}"
                )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._data.begin(epoch)
        self._current, self._steps, self._calls, self._skipped = epoch, 0, 0, None
        self._restore_late()
        if self.save_freq is not None:
            self._random_at_begin = backups.packed_random_states()
        if self._unrestored is not None:  # the position is in this epoch
            self._begin_in_the_middle()

    def _before_step(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._skipped is not None:
            self._skipped.skip_next()

    def _after_step(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        end = min(batch + 1, self.params.get("steps") or batch + 1)  # the last execution may have fewer steps
        steps, self._steps = end - self._steps, end
        self._calls += 1
        if self._calls == 1:
            self._data.check(self._current)
        if self._skipped is not None:
            if not self._skipped.left:
                self._end_of_skipping()
            return
        self._unsaved_steps += steps
        if self._unsaved_steps >= (self.save_freq or 0) or self.model.stop_training:
            position = {"epoch": self._current, "steps": self._steps, "calls": self._calls, "logs": logs or {}}
            self._save(position | {"steps_per_execution": self.model.steps_per_execution})

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._skipped is not None:
            if self.model.stop_training:
                return  # a callback stopped `fit` before it reached the step of the backup, which stays valid
            raise self._skipped.too_few(self._steps)
        self._data.check(self._current)
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self._logs.setdefault(name, []).append(value)
        self._save(None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._restore_late()  # if no epoch was left

    def _variables(self, model: Any) -> list[Any]:
        return [*model.variables, *(model.optimizer.variables if model.optimizer is not None else ())]

    def _save(self, position: dict[str, Any] | None) -> None:
        """Writes the backup; `position` is None at the end of an epoch."""
        self._unsaved_steps = 0
        kept = self._variables(self.model)
        metrics = self.model.metrics_variables if position is not None else []
        arrays = {f"variable {i}": backups.as_array(self._workers.array(one)) for i, one in enumerate(kept)}
        state = {
            "epochs": self._epochs,
            "logs": self._logs,
            "position": position,
            "stopped": bool(self.model.stop_training),
            "workers": len(self._workers.names),
            "variables": [backups.describe(variable) for variable in kept],
            "metrics": [backups.describe(variable) for variable in metrics],
            "callbacks": [[type(c).__name__, backups.callback_state(c, arrays)] for c in self.callbacks],
        }
        arrays |= self._gathered("random", backups.packed_random_states())
        if position is not None:
            arrays |= self._gathered("random at begin", self._random_at_begin)
            arrays |= self._gathered("metrics", packed_metrics(metrics, self._workers))
        if self._workers.index == 0:
            backups.write(self.path, state, arrays)
        else:
            write_note(self.path, self._workers, state)

    def _gathered(self, name: str, own: bytes) -> dict[str, np.ndarray]:
        """Bytes of each worker, as arrays."""
        return {f"{name} {i}": np.frombuffer(one, "uint8") for i, one in enumerate(self._workers.gather(own))}

    def _restore(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        classes, given = [name for name, _ in state["callbacks"]], [type(c).__name__ for c in self.callbacks]
        if classes != given:
            raise ValueError(
                f"`callbacks` must be those of the backup, {classes}. Received: {given}, backup {str(self.path)!r}"
            )
        position = state["position"]
        backups.check_same(state["variables"], [backups.describe(v) for v in self._variables(self.model)], self.path)
        if position is not None:
            self._check_position(position)
        self._epochs, self._logs = state["epochs"], state["logs"]
        self._unrestored = state, arrays
        self._restore_variables(self.model)
        self._restore_callbacks()
        for callback, (_, values) in zip(self.callbacks, state["callbacks"], strict=True):
            self._restore_after_its_beginning(callback, values, arrays)
        start = self._epochs[-1] + 1 if position is None else position["epoch"]
        if self.params.get("verbose"):
            print(f"Resuming {after(state)}: {self.path}")
        # `fit` reads it after this call, as Keras' BackupAndRestore relies on; beyond the last epoch it trains nothing.
        is_over = state["stopped"] and position is None
        begin_fit_at(self.model, max(start, self.params["epochs"]) if is_over else start)

    def _check_position(self, position: dict[str, int]) -> None:
        if self.save_freq is None:
            raise ValueError(
                "`save_freq` must be a number of steps for this backup, which is from the middle of an epoch. "
                f"Received: save_freq='epoch', backup {str(self.path)!r}"
            )
        if position["steps_per_execution"] != self.model.steps_per_execution:
            raise ValueError(
                f"`steps_per_execution` must be that of the backup, {position['steps_per_execution']}. Received: "
                f"steps_per_execution={self.model.steps_per_execution}, backup {str(self.path)!r}"
            )

    def _restore_late(self) -> None:
        """Restores, once, the random numbers, and the history: a later callback, which resets itself at the start."""
        if self._unrestored is None:
            return
        state, _ = self._unrestored
        in_the_middle = state["position"] is not None
        with backups.reading(self.path, ValueError):
            self._restore_random("random at begin" if in_the_middle else "random")
        self._release_callbacks()
        begin_fit_at(self.model, None)  # the next `fit` begins at its own `initial_epoch`
        history = getattr(self.model, "history", None)
        if history is not None:
            history.epoch, history.history = list(self._epochs), {name: list(v) for name, v in self._logs.items()}
        if not in_the_middle:
            self._unrestored = None

    def _begin_in_the_middle(self) -> None:
        """Lets `fit` read the batches before the position without training on them."""
        saved, model = self._unrestored[0], self.model  # within a step, `self.model` would change the state on JAX

        def restored(state: Any) -> Any:
            """If the data end with the position, `fit` assigns this state to the variables."""
            self._restore_variables(model)
            parts = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
            return (*([variable.value for variable in part] for part in parts), state[-1])

        with backups.reading(self.path):
            self._skipped = SkippedSteps(
                model,
                saved["position"],
                saved["metrics"],
                has_length=self.params.get("steps") is not None,
                restore_metrics=lambda: self._restore_metrics(model),
                restored=restored,
            )

    def _end_of_skipping(self) -> None:
        # Callbacks saw the skipped steps again, but what they changed there is in the backup. It was written at this
        # point of the step, so that callbacks behind `Resume` in the list change the model once more, as they did then.
        model = self.model
        self._restore_variables(model)
        self._restore_metrics(model)
        with backups.reading(self.path, ValueError):
            self._restore_callbacks()
            self._restore_random("random")
            model.stop_training = bool(self._unrestored[0]["stopped"])
        self._unrestored = self._skipped = None

    def _restore_variables(self, model: Any) -> None:
        for index, variable in enumerate(self._variables(model)):
            variable.assign(self._unrestored[1][f"variable {index}"])

    def _restore_metrics(self, model: Any) -> None:
        state, arrays = self._unrestored
        with backups.reading(self.path, ValueError):
            packed = [arrays[f"metrics {i}"].tobytes() for i in range(state["workers"])]
            restore_metrics(model, state["metrics"], packed, self._workers, self.path)

    def _restore_callbacks(self) -> None:
        state, arrays = self._unrestored
        for callback, (_, values) in zip(self.callbacks, state["callbacks"], strict=True):
            backups.restore_callback(callback, values, arrays)

    def _restore_after_its_beginning(self, callback: keras.callbacks.Callback, values: Any, arrays: Any) -> None:
        """Lets a callback that stands after this one, and so resets itself later, have its state once more."""
        begin, own = callback.on_train_begin, vars(callback).get("on_train_begin")  # `LambdaCallback` has an own one

        def release() -> None:
            if own is None:
                vars(callback).pop("on_train_begin", None)
            else:
                callback.on_train_begin = own

        def on_train_begin(logs: dict[str, Any] | None = None) -> None:
            begin(logs)
            with backups.reading(self.path):
                backups.restore_callback(callback, values, arrays)

        callback.on_train_begin = on_train_begin
        self._releases.append(release)

    def _release_callbacks(self) -> None:
        while self._releases:
            self._releases.pop()()

    def _restore_random(self, name: str) -> None:
        """Restores the random states that this worker has in the backup; a worker that was added has none."""
        arrays = self._unrestored[1]
        if "random 0" not in arrays or f"{name} 0" not in arrays:
            raise LookupError(f"no {name} states")
        own = arrays.get(f"{name} {self._workers.index}")
        if own is not None:
            backups.restore_packed_random_states(own.tobytes(), self.path)

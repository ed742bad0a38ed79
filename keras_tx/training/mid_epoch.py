"""What `Resume` does in the middle of an epoch: it saves metrics, and reads batches again without training on them."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tx.internals.keras_training import build_metrics
from keras_tx.training import backups
from keras_tx.training.workers import Workers


def packed_metrics(variables: Sequence[Any], workers: Workers) -> bytes:
    """What each device of this worker has added up; their sums would lose the order of the additions."""
    parts = [workers.parts(one) for one in variables]
    arrays = {f"{i} {j}": backups.as_array(part) for i, one in enumerate(parts) for j, part in enumerate(one)}
    file = io.BytesIO()
    backups.save(file, {"devices": len(parts[0]) if parts else 0}, arrays)
    return file.getvalue()


def restore_metrics(model: Any, saved: Sequence[Any], packed: Sequence[bytes], workers: Workers, path: Path) -> None:
    """Gives the metrics of the epoch their values of the backup.

    Args:
        model: the model, whose metrics of the training are built.
        saved: the descriptions of the variables in the backup.
        packed: what `packed_metrics` returned in each worker.
        workers: those of now, of which there may be more or fewer.
        path: the backup, which errors name.
    """
    places = {backups.path_of(one): i for i, one in enumerate(saved)}
    found = [backups.read(path, io.BytesIO(one)) for one in packed]
    for variable in model.metrics_variables:
        if backups.path_of(variable) in places:  # a metric of the evaluation alone may not be built yet
            place = places[backups.path_of(variable)]
            of_all = [[values[f"{place} {j}"] for j in range(info["devices"])] for info, values in found]
            _restore_metric(variable, of_all, workers)


def _restore_metric(variable: Any, of_all: list[list[np.ndarray]], workers: Workers) -> None:
    """Gives a variable of a metric its values of the backup, which are those of each device of each worker."""
    own = of_all[min(workers.index, len(of_all) - 1)]
    devices = len(workers.parts(variable))
    if keras.backend.backend() == "tensorflow" and (len(of_all), len(own)) != (len(workers.names), devices):
        total = np.sum([part for parts in of_all for part in parts], axis=0, dtype=own[0].dtype)
        own = [np.zeros_like(total)] * devices  # other workers or devices than before: the first one has the sum
        own[0] = total if workers.index == 0 else own[0]
    workers.assign_parts(variable, own)


class SkippedSteps:
    """The steps of an epoch before the position of a backup, whose batches are read again but not trained on.

    Attributes:
        left: how many calls of `model.train_function` are still to be skipped.
    """

    def __init__(
        self,
        model: Any,
        position: dict[str, Any],
        metrics: Sequence[Any],
        *,
        has_length: bool,
        restore_metrics: Callable[[], None],
        restored: Callable[[Any], Any],
    ):
        """
        Args:
            model: the model, between two steps of `fit`.
            position: the position in the backup.
            metrics: the descriptions of the variables of the metrics in the backup.
            has_length: whether `fit` knows how many batches there are.
            restore_metrics: gives the metrics their values of the backup; called when they are built. On JAX this must
                be before the first step, so that the state of `fit` has them.
            restored: on JAX, from the state of `fit` to that of the backup.
        """
        self.left: int = position["calls"]
        self._logs = dict(position["logs"])
        self._model, self._train, self._position = model, model.train_function, position
        self._has_length, self._restore_metrics, self._restored = has_length, restore_metrics, restored
        self._batches = 0
        known = {backups.path_of(variable) for variable in model.metrics_variables}
        self._must_build_metrics = not {backups.path_of(one) for one in metrics} <= known
        if not self._must_build_metrics:
            restore_metrics()

    def skip_next(self) -> None:
        """Lets the next step of `fit` read its batches only.

        This is for one step, so that a `fit` that is interrupted leaves the model as it was.
        """
        self._model.train_function = self._skip

    def _skip(self, *arguments: Any) -> Any:
        """In place of `model.train_function`."""
        self._model.train_function = self._train
        self.left -= 1
        # PyTorch passes the batches of the step, the others an iterator of batches.
        read = iter(arguments[-1]) if keras.backend.backend() == "torch" else arguments[-1]
        for step in range(min(self._position["steps_per_execution"], self._position["steps"] - self._batches)):
            batch = next(read, None)
            if batch is None:
                if step and not self._has_length:
                    break  # data of unknown length, which end in this execution
                raise self.too_few(self._batches)
            self._batches += 1
            if self._must_build_metrics:
                build_metrics(self._model, batch)
                self._restore_metrics()
                self._must_build_metrics = False
        if len(arguments) == 1:
            return self._logs
        return self._logs, arguments[0] if self.left else self._restored(arguments[0])  # JAX passes a state, too

    def too_few(self, batches: int) -> ValueError:
        """The error for data that have ended before the position."""
        return ValueError(
            f"The data of epoch {self._position['epoch'] + 1} must have at least the {self._position['steps']} batches "
            f"that training had seen when the backup was written. Received: {batches} batches"
        )

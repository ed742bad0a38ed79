"""The curves of a training: each metric's epochs and values, from a History, its dict or the file of a CSVLogger."""

import csv
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx.checks import positive_int

Curve = tuple[np.ndarray, np.ndarray]  # epochs, counted from 1, and values


def curves(history: Any, validation_freq: int | Sequence[int]) -> dict[str, Curve]:
    """{metric: its epochs and values}, with NaN where a CSVLogger had no value; see `plots.training_curves`."""
    if isinstance(history, (str, os.PathLike)):
        columns: Any = _csv_columns(Path(history))
        epochs: Any = columns.pop("epoch", None)
    else:
        columns = getattr(history, "history", history)
        epochs = getattr(history, "epoch", None)
    if not isinstance(columns, dict) or any(np.ndim(values) == 0 for values in columns.values()):
        raise TypeError(f"`history` must be a History, its dict or the path of a CSV file. Received: {history!r}")
    if not columns or not all(len(values) for values in columns.values()):
        raise ValueError(f"`history` must hold at least one epoch of one metric. Received: {dict(columns)}")
    try:
        found = {name: np.array([_number(value) for value in values]) for name, values in columns.items()}
        every = np.array([int(epoch) + 1 for epoch in epochs or range(max(map(len, found.values())))])
    except (TypeError, ValueError) as error:
        raise ValueError(f"`history` must hold numbers. Received: {error}") from error
    validated = every[_is_validated(every, validation_freq)]
    result: dict[str, Curve] = {}
    for name, values in found.items():
        choices = [every, validated] if name.startswith("val_") else [every]
        fitting = [epochs for epochs in choices if len(epochs) == len(values)]
        if not fitting:
            raise ValueError(
                "The values of each metric must be one for each epoch, or for each epoch that `validation_freq` chooses"
                f". Received: {len(values)} of {name} in {len(every)} epochs, validation_freq={validation_freq}. Pass "
                "the `validation_freq` of `fit`, or the path of the file of a keras.callbacks.CSVLogger"
            )
        result[name] = fitting[0], values
    return result


def _csv_columns(path: Path) -> dict[str, list[str | None]]:
    if not path.is_file():
        raise FileNotFoundError(f"`history` must be a file that exists. Received: history={str(path)!r}")
    with open(path, encoding="utf-8-sig", newline="") as file:
        # The first name that a CSVLogger writes is "epoch"; its `separator` comes next.
        separator = re.match(r"epoch([^\w\r\n])", file.readline())
        file.seek(0)
        reader = csv.DictReader(file, delimiter=separator[1] if separator else ",")
        table = []
        for row in reader:
            if None in row:
                raise ValueError(
                    "No row of `history` must have more values than the header has names. Received: "
                    f"line {reader.line_num} of {str(path)!r} with {len(row) - 1 + len(row[None])} values, header "
                    f"{reader.fieldnames}"
                )
            table.append(row)
    return {name: [row[name] for row in table] for name in (table[0] if table else {})}


def _number(value: Any) -> float:
    is_absent = value is None or (isinstance(value, str) and value in ("", "NA"))
    return math.nan if is_absent else float(value)


def _is_validated(epochs: np.ndarray, validation_freq: Any) -> np.ndarray:
    """Whether Keras evaluates after each epoch, also if training began at another one than the first."""
    if isinstance(validation_freq, (list, tuple)):
        return np.isin(epochs, [positive_int("validation_freq", epoch) for epoch in validation_freq])
    is_validated: np.ndarray = epochs % positive_int("validation_freq", validation_freq) == 0
    return is_validated

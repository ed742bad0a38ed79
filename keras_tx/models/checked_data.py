"""Checks of the data for `fit`, `evaluate` and `predict`: ids and labels outside their ranges, strings, floats.

A compiled graph cannot say what is wrong with ids, or cannot raise errors at all: on a GPU TensorFlow reads zeros for
an id outside the table, and XLA and JAX read the first or last row. So arrays are checked before the graph runs, and
the batches of a `tf.data.Dataset`, generator, `PyDataset`, PyTorch `DataLoader` or Grain dataset on the way to it.
"""

import functools
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_tx.data.padding_rows import filled_rows
from keras_tx.internals import keras_jax_steps, keras_training
from keras_tx.internals.keras_models import is_of_keras, layers_within
from keras_tx.layers import LearnedPositionalEncoding
from keras_tx.layers.ids import (
    check_in_each_row,
    check_integers,
    check_no_texts,
    check_range,
    rule_of_each_row,
    values_of,
)
from keras_tx.models.counted import CountedModel
from keras_tx.models.filled_data import fill_arguments
from keras_tx.models.shared_data import in_each_process, with_own_share
from keras_tx.optional import Lazy
from keras_tx.training import PaddedCrossentropy
from keras_tx.under_strategy import check_training

tf = Lazy("tensorflow")

_STEPS = ("call", "train_step", "test_step", "compute_loss", "compute_loss_and_updates")
_OF_KERAS = ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
# What the assertions of this file, its Python errors, a look-up and Keras' loss write into TensorFlow's long errors.
_OUTSIDE = re.compile(
    r"((?:(?:The labels|`\w+`) must be in \[0, \d+\)|Each row of `\w+` must have )[^[\]]*"
    r"Received: (?:label |no such id in row )?)\] \[(-?\d+)\]"
)
_IN_PYTHON = re.compile(
    r"ValueError: ((?:(?:The labels|`\w+`) must be |Each row of `\w+` must have )[^\n]*Received: [^\n]*)"
)
_LOOK_UP = re.compile(r"indices\[[\d,]+\] = (-?\d+) is not in \[0, (\d+)\)")
_OF_POSITIONS = "layers/positions.py"  # a file in which a look-up may stand; the others are of ids
_LABEL = re.compile(r"Received a label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")


class Labels(NamedTuple):
    """The labels of one output: they are in [0, size), or `ignored`, which the loss has as the argument `name`."""

    size: int
    ignored: int | None
    name: str

    @property
    def rule(self) -> str:
        also = "" if self.ignored is None else f" or the `{self.name}` {self.ignored}"
        return f"The labels must be in [0, {self.size}){also}. Received: label "


class DataCheck:
    """Checks batches, or whole arrays, of inputs and labels.

    Args:
        sizes: {name of an input of ids: the size of its table}.
        names: the names of all inputs, in the order in which a list of arrays gives them.
        labels: how the labels are to be, in the structure of the compiled loss: one, a list or a dict; None is
            unchecked.
        in_each_row: {name of an input of ids: (an id that each of its rows must have, the id's name)}.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        names: list[str],
        labels: Any,
        in_each_row: Mapping[str, tuple[int, str]] = types.MappingProxyType({}),
    ):
        self.sizes, self.names, self.labels, self.in_each_row = dict(sizes), names, labels, dict(in_each_row)

    def arrays(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        """Raises a ValueError for the first wrong value of arrays."""
        for name, ids in self._ids(x):
            check_no_texts(name, ids)
            ids = ids.to_numpy() if hasattr(ids, "to_numpy") else ids  # a pandas DataFrame, which Keras takes
            if hasattr(ids, "shape"):
                check_integers(name, ids)
                check_range(name, values_of(ids), self.sizes[name])
                if name in self.in_each_row:
                    check_in_each_row(name, values_of(ids), *self.in_each_row[name], _filled_rows(sample_weight))
        for given, labels in self._labels(y, sample_weight):
            check_no_texts("y", given)
            values = values_of(given) if hasattr(given, "shape") else None
            if values is not None and values.size and not 0 <= values.min() <= values.max() < labels.size:
                wrong = values[~((values >= 0) & (values < labels.size)) & (values != labels.ignored)]
                if wrong.size:
                    raise ValueError(f"{labels.rule}{wrong[0]}")

    def batch(self, batch: Any) -> Any:
        """Returns a batch of a generator or `PyDataset`, (x, y, sample_weight) or a part of it, after the check."""
        self.arrays(*keras.utils.unpack_x_y_sample_weight(batch))
        return batch

    def dataset(self, batches: Any) -> Any:
        """A `tf.data.Dataset` with the batches of another; an iterator of it raises for a wrong value."""
        is_tuple = isinstance(batches.element_spec, tuple)  # then `map` passes its elements one by one

        def checked(*batch: Any) -> Any:
            self._assert(batch if is_tuple else batch[0])
            return batch if is_tuple else batch[0]

        return batches.map(checked)

    def _assert(self, batch: Any) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        for name, ids in self._ids(x):
            if isinstance(ids, tf.Tensor):
                check_integers(name, ids)
                _assert_range(ids, self.sizes[name], None, f"`{name}` must be in [0, {self.sizes[name]}). Received: ")
                if name in self.in_each_row and ids.shape.rank == 2:
                    has_it = tf.reduce_any(ids == self.in_each_row[name][0], axis=1)
                    has_it |= filled_rows(sample_weight)
                    rule = rule_of_each_row(name, *self.in_each_row[name])
                    tf.debugging.Assert(tf.reduce_all(has_it), [rule, tf.argmin(tf.cast(has_it, "int32"))])
        for given, labels in self._labels(y, sample_weight):
            if isinstance(given, tf.Tensor):
                check_no_texts("y", given)
                _assert_range(given, labels.size, labels.ignored, labels.rule)

    def _ids(self, x: Any) -> list[tuple[str, Any]]:
        if not isinstance(x, Mapping):
            x = dict(zip(self.names, x if isinstance(x, (list, tuple)) else [x], strict=False))
        return [(name, x[name]) for name in self.sizes if x.get(name) is not None]

    def _labels(self, y: Any, sample_weight: Any) -> list[tuple[Any, Labels]]:
        if y is None or self.labels is None:
            return []
        if isinstance(self.labels, Labels):
            given = keras.tree.flatten(y) if isinstance(y, (list, tuple, dict)) else [y]
            pairs = [(given[0], self.labels)] if len(given) == 1 else []
        elif isinstance(self.labels, dict):
            pairs = [(y[name], one) for name, one in self.labels.items() if name in y] if isinstance(y, dict) else []
        else:
            pairs = list(zip(y, self.labels, strict=False)) if isinstance(y, (list, tuple)) else []
        is_weighted = sample_weight is not None  # with Keras' loss, a label of weight 0 may be any number
        return [(y, one) for y, one in pairs if one and not (is_weighted and one.name == "ignore_class")]


def _filled_rows(sample_weight: Any) -> Any:
    """Which rows of a batch only fill it up, booleans (B,); False if there are none."""
    given = [one for one in keras.tree.flatten(sample_weight) if one is not None]
    if not given:
        return False
    weights = np.asarray(keras.ops.convert_to_numpy(given[0]), "float32")
    return ((weights == 0) & np.signbit(weights)).all(axis=tuple(range(1, weights.ndim)))


class CheckedBatches(keras.utils.PyDataset):
    """A `PyDataset` with the batches of another, checked."""

    def __init__(self, dataset: Any, check: DataCheck):
        options = ("workers", "use_multiprocessing", "max_queue_size")
        super().__init__(**{name: getattr(dataset, name) for name in options})
        self.dataset, self.check = dataset, check

    def __getitem__(self, index: int) -> Any:
        return self.check.batch(self.dataset[index])

    @property
    def num_batches(self) -> Any:
        return self.dataset.num_batches

    def on_epoch_begin(self) -> None:
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()


class CheckedModel(CountedModel):
    """A functional model whose `fit`, `evaluate`, `predict` and `..._on_batch` check ids and labels.

    They raise a ValueError that names the argument, the range and the value, on every backend and device, for arrays,
    `tf.data.Dataset`s, generators, `PyDataset`s, PyTorch `DataLoader`s and Grain datasets. Labels are checked if the
    loss is `PaddedCrossentropy` or Keras' `SparseCategoricalCrossentropy`; for the latter only without sample weights,
    with which a label of weight 0 may be any number. So are arguments that Keras would take, and train something else:
    no labels, a loss of probabilities for a model that returns logits, and class weights for labels of tokens.
    """

    def _returns_logits(self) -> bool:
        """Whether the outputs are logits."""
        return False

    def _id_sizes(self) -> Mapping[str, int]:
        """{name of an input of ids: size of the table that it indexes}; by default empty."""
        return {}

    def _ids_in_each_row(self) -> Mapping[str, tuple[int, str]]:
        """{name of an input of ids: (an id that each of its rows must have, the id's name)}; by default empty."""
        return {}

    def _input_names(self) -> list[str]:
        """The names of the inputs, in the order in which a list gives them."""
        return [tensor.name for tensor in self.inputs]

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        several = inputs.values() if isinstance(inputs, dict) else inputs
        for one in several if isinstance(inputs, (dict, list, tuple)) else [inputs]:
            check_no_texts("inputs", one)
        return super().__call__(inputs, *args, **kwargs)

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_checks("fit", args, kwargs)

    @functools.wraps(keras.Model.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_checks("evaluate", args, kwargs)

    @functools.wraps(keras.Model.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_checks("predict", args, kwargs, has_labels=False)

    @functools.wraps(keras.Model.train_on_batch)
    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_checks("train_on_batch", args, kwargs)

    @functools.wraps(keras.Model.test_on_batch)
    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_checks("test_on_batch", args, kwargs)

    @functools.wraps(keras.Model.predict_on_batch)
    def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_checks("predict_on_batch", args, kwargs, has_labels=False)

    def predict_step(self, *args: Any) -> Any:
        if keras.backend.backend() != "jax":
            return super().predict_step(*args)
        outputs, state = super().predict_step(*args)
        return in_each_process(outputs), state

    @with_own_share
    def _with_checks(self, name: str, args: Any, kwargs: dict[str, Any], has_labels: bool = True) -> Any:
        keras_jax_steps.sync_variables(self)  # for a callback of `fit` that predicts
        bound = inspect.signature(getattr(super(), name)).bind(*args, **kwargs)
        given = bound.arguments
        check_training(self, name, given)
        keras_training.let_data_end()
        if name == "fit" and "shuffle" not in given and keras_training.is_never_shuffled(given.get("x")):
            given["shuffle"] = False  # Keras' default is True, and it would warn that it does not shuffle these
        if has_labels:
            self._check_training_arguments(given)
        labels = self._labels() if has_labels else None
        check = DataCheck(self._id_sizes(), self._input_names(), labels, self._ids_in_each_row())
        x, options = given.get("x"), {name: given[name] for name in ("class_weight", "shuffle") if name in given}
        if not (given.get("validation_split") and keras_training.is_loader(x)):  # which is an error of Keras
            given["x"] = _checked(check, x, given.get("y"), given.get("sample_weight"), **options)
        if given.get("validation_data") is not None:
            data = given["validation_data"]
            is_arrays = isinstance(data, (list, tuple))
            given["validation_data"] = (_checked(check, *data), *data[1:]) if is_arrays else _checked(check, data)
        without_padding_rows = fill_arguments(self, name, given)
        try:
            return without_padding_rows(getattr(super(), name)(*bound.args, **bound.kwargs))
        except BaseException as error:  # also if the user interrupts it
            keras_jax_steps.restore_variables(self)
            is_of_graph = _is_tensorflow_imported() and isinstance(error, tf.errors.InvalidArgumentError)
            text = str(error) if is_of_graph else ""
            if found := _OUTSIDE.search(text) or _IN_PYTHON.search(text):
                raise ValueError("".join(found.groups())) from None
            if found := _LABEL.search(text):
                raise ValueError(f"The labels must be in [0, {found[2]}). Received: label {found[1]}") from error
            found = _LOOK_UP.search(text)
            if found and _OF_POSITIONS in text:
                position, size = map(int, found.groups())
                count = _usable_positions(self, size)
                raise ValueError(
                    f"Rows must not have more tokens than the model has positions, {count}. Received: position "
                    f"{position - size + count}. Give the tokenizer a smaller `max_length`"
                ) from error
            if found:
                raise ValueError(f"The ids must be in [0, {found[2]}). Received: {found[1]}") from error
            raise

    def _check_training_arguments(self, given: Mapping[str, Any]) -> None:
        if any(not _is_of_library(getattr(type(self), name, keras.Model.fit)) for name in _STEPS):
            return  # a user's subclass may make labels or probabilities itself
        losses = [one for one in keras.tree.flatten(getattr(self, "loss", None)) if one is not None]
        x = given.get("x")
        is_array = hasattr(x, "shape") or (isinstance(x, Mapping) and all(hasattr(one, "shape") for one in x.values()))
        if losses and is_array and given.get("y") is None:
            raise ValueError("`y` must be the labels if `x` is an array or a dictionary of arrays. Received: y=None")
        if self._returns_logits() and any(map(_is_of_probabilities, losses)):
            raise ValueError(
                "`loss` must have `from_logits=True`, since the model returns logits, as in "
                f"`keras.losses.SparseCategoricalCrossentropy(from_logits=True)`. Received: loss={self.loss!r}"
            )
        of_tokens = any(len(output.shape) > 2 for output in self.outputs)
        if given.get("class_weight") is not None and of_tokens and _rank_of_labels(given) in (2, None):
            raise ValueError(
                "`class_weight` must be None for labels (B, T): Keras would weigh each row by a position. Give weights "
                f"(B, T) as `sample_weight`. Received: class_weight={given['class_weight']}"
            )

    def _labels(self) -> Any:
        loss = getattr(self, "loss", None)  # None before `compile`
        outputs = keras.tree.flatten(self.output)
        if isinstance(loss, dict):
            named = self.output if isinstance(self.output, dict) else dict(zip(self.output_names, outputs, strict=True))
            return {name: _labels_for(one, named.get(name)) for name, one in loss.items()}
        if isinstance(loss, (list, tuple)):
            return [_labels_for(one, output) for one, output in zip(loss, outputs, strict=False)]
        return _labels_for(loss, outputs[0]) if len(outputs) == 1 else None


def _rank_of_labels(given: Mapping[str, Any]) -> int | None:
    """The number of axes of the labels of `fit`; None if nothing tells."""
    y = given.get("y")
    if y is None and _is_tensorflow_imported() and isinstance(given.get("x"), tf.data.Dataset):
        spec = given["x"].element_spec
        y = spec[1] if isinstance(spec, tuple) and len(spec) > 1 else None
    shape = getattr(y, "shape", None)
    return None if shape is None else len(shape)


def _is_of_library(function: Any) -> bool:
    """Whether a function is of Keras or of this package."""
    return is_of_keras(function) or str(function.__module__).startswith("keras_tx.")


def _is_of_probabilities(loss: Any) -> bool:
    """Whether `loss`, as `compile` takes it, is one of Keras' cross-entropies of probabilities."""
    try:
        loss = keras.losses.get(loss)
        if not is_of_keras(type(loss) if isinstance(loss, keras.losses.Loss) else loss):
            return False
        if isinstance(loss, keras.losses.Loss):
            return loss.get_config().get("from_logits") is False
        return inspect.signature(loss).parameters["from_logits"].default is False
    except (KeyError, NotImplementedError, TypeError, ValueError):  # it has no such argument, or tells nothing
        return False


def _labels_for(loss: Any, output: Any) -> Labels | None:
    if output is None or output.shape[-1] is None:
        return None
    if isinstance(loss, PaddedCrossentropy):
        return Labels(output.shape[-1], loss.padding_id, "padding_id")
    is_named = isinstance(loss, str) and loss in _OF_KERAS
    is_sparse = isinstance(loss, keras.losses.SparseCategoricalCrossentropy) and loss.get_config().get("axis", -1) == -1
    if is_named or is_sparse or loss is keras.losses.sparse_categorical_crossentropy:
        return Labels(output.shape[-1], getattr(loss, "ignore_class", None), "ignore_class")
    return None


def _checked(check: DataCheck, x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Any:
    """`x` after the check, or in a form that checks each batch; `options` are those of `fit`, for data loaders."""
    if keras_training.is_checked(x):  # `fit` gives its validation data, which it has checked, to `evaluate`
        return x
    if isinstance(x, types.GeneratorType):
        return _checked_generator(check, x)
    if isinstance(x, keras.utils.PyDataset):
        return CheckedBatches(x, check)
    if _is_tensorflow_imported() and isinstance(x, tf.data.Dataset):
        return check.dataset(x)
    if keras_training.is_loader(x):
        return keras_training.map_batches(check.dataset, check.batch, x, y=y, sample_weight=sample_weight, **options)
    check.arrays(x, y, sample_weight)
    return x


def _checked_generator(check: DataCheck, batches: Iterator[Any]) -> Iterator[Any]:
    yield from map(check.batch, batches)


def _assert_range(values: Any, size: int, ignored: int | None, text: str) -> None:
    values = tf.cast(values, "int64")
    if ignored is not None:
        values = tf.where(values == ignored, tf.zeros_like(values), values)
    least, most = tf.reduce_min(values), tf.reduce_max(values)
    tf.debugging.Assert((least >= 0) & (most < size), [text, tf.where(least < 0, least, most)])


def _is_tensorflow_imported() -> bool:
    return (
        sys.modules.get("tensorflow") is not None
    )  # if not, nothing is of its classes, and to import it would take seconds


def _usable_positions(model: Any, size: int) -> int:
    """How many of the `size` rows of a table are for positions: the first rows of RoBERTa's and BART's are not."""
    layers = [layer for layer in layers_within(model) if isinstance(layer, LearnedPositionalEncoding) and layer.built]
    return min([layer.max_length for layer in layers if layer.embeddings.shape[0] == size], default=size)

"""The private parts of Keras for `fit`: losses, metrics, and data of unknown size."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_tx.internals import keras_models, keras_optimizers, keras_torch
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

try:
    from keras.src.trainers import data_adapters as _data_adapters
    from keras.src.trainers.data_adapters import array_slicing as _array_slicing
    from keras.src.trainers.data_adapters import data_adapter_utils as _adapter_utils
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter as _DataAdapter
    from keras.src.trainers.epoch_iterator import EpochIterator as _EpochIterator
except (ImportError, AttributeError) as _error:
    raise ImportError(
        f"Keras {keras.__version__} no longer has a private part that keras_tx needs ({_error}): install a version "
        "of Keras that keras_tx supports, or update keras_tx/internals/keras_training.py"
    ) from _error


def wrap_losses(
    model: Any, wrapper: Callable[[Any], Any], of_tracker: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    """Replaces each loss function(y_true, y_pred, sample_weight) of a model by `wrapper(loss)`.

    With several losses, `of_tracker(update_state)` also replaces `update_state` of the metrics that average each loss.
    """
    losses = model._compile_loss
    if losses is None or "build" in vars(losses):
        return
    build = losses.build

    def wrap() -> None:
        losses._flat_losses = [one._replace(loss=wrapper(one.loss)) for one in losses._flat_losses]
        for tracker in losses.metrics:
            tracker.update_state = of_tracker(tracker.update_state)

    def build_wrapped(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        wrap()

    if losses.built:
        wrap()
    losses.build = build_wrapped


def wrap_metrics(model: Any, wrapper: Callable[[Callable[..., None], bool], Callable[..., None]]) -> None:
    """Replaces `update_state(y_true, y_pred, sample_weight=None)` of a model's metrics by `wrapper(update_state, ...)`.

    The second argument of `wrapper` says whether they are `weighted_metrics`; others get no weights from Keras.
    """
    metrics = model._compile_metrics
    if metrics is None or "build" in vars(metrics):
        return
    build = metrics.build

    def wrap() -> None:
        for lists, is_weighted in ((metrics._flat_metrics, False), (metrics._flat_weighted_metrics, True)):
            for one in lists:
                if one:
                    one.update_state = wrapper(one.update_state, is_weighted)

    def build_wrapped(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        wrap()

    if metrics.built:
        wrap()
    metrics.build = build_wrapped


def wrap_loss_trackers(model: Any, wrapper: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replaces `update_state(values, sample_weight=None)` of the metric that averages the whole loss over batches."""
    tracker = model._loss_tracker
    if "update_state" not in vars(tracker):
        tracker.update_state = wrapper(tracker.update_state)


def let_data_end() -> None:
    """From now on, Keras does not warn that data "ran out" if nobody said how many batches there are.

    It warns at the end of the first epoch over every data set of unknown size, such as texts in batches of similar
    length. With `steps_per_epoch`, or a size that the data do not keep, it still warns.
    """
    original = _EpochIterator._interrupted_warning
    if hasattr(original, "keras_tx"):
        return

    @functools.wraps(original)
    def warn(self: Any) -> None:
        if self.steps_per_epoch or self.data_adapter.num_batches is not None:
            original(self)

    warn.keras_tx = True  # type: ignore[attr-defined]
    _EpochIterator._interrupted_warning = warn


def is_loader(x: Any) -> bool:
    """Whether `x` is a PyTorch `DataLoader` or a Grain dataset."""
    return bool(_data_adapters.is_torch_dataloader(x) or _data_adapters.is_grain_dataset(x))


def is_never_shuffled(x: Any) -> bool:
    """Whether `fit` cannot shuffle data of this kind: it takes the batches as they come."""
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is None
    return isinstance(x, types.GeneratorType) or _data_adapters.is_tf_dataset(x) or is_loader(x)


class _MappedAdapter(_DataAdapter):
    """The batches that Keras makes of data, checked or changed."""

    def __init__(self, adapter: Any, of_dataset: Callable[[Any], Any], of_batch: Callable[[Any], Any], fills: bool):
        self._adapter, self._of_dataset, self._of_batch, self.fills = adapter, of_dataset, of_batch, fills

    def get_numpy_iterator(self) -> Iterator[Any]:
        return map(self._of_batch, self._adapter.get_numpy_iterator())

    def get_jax_iterator(self) -> Iterator[Any]:
        return map(self._of_batch, self._adapter.get_jax_iterator())

    def get_tf_dataset(self) -> Any:
        return self._of_dataset(self._adapter.get_tf_dataset())

    def get_torch_dataloader(self) -> Iterator[Any]:
        return map(self._of_batch, self._adapter.get_torch_dataloader())

    @property
    def num_batches(self) -> Any:
        return self._adapter.num_batches

    @property
    def batch_size(self) -> int | None:
        return None  # it may have changed

    @property
    def has_partial_batch(self) -> None:
        return None

    @property
    def partial_batch_size(self) -> None:
        return None

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()


def map_batches(
    of_dataset: Callable[[Any], Any], of_batch: Callable[[Any], Any], x: Any, fills: bool = False, **options: Any
) -> Any:
    """Data for `fit`, `evaluate` and `predict` whose batches are those that Keras makes of `x`, checked or changed.

    Args:
        of_dataset: from a `tf.data.Dataset` of batches to another one; for TensorFlow.
        of_batch: from a batch of arrays to another one; for JAX and PyTorch.
        x: arrays, a generator, a `PyDataset`, ...
        fills: whether the batches are filled up for devices that share them, after the check.
        options: `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle` and `class_weight`, as for `fit`.
    """
    return _MappedAdapter(_data_adapters.get_data_adapter(x, **options), of_dataset, of_batch, fills)


def is_checked(x: Any) -> bool:
    """Whether data come from `map_batches`, so that they are checked."""
    return isinstance(x, _MappedAdapter)


def is_filled(x: Any) -> bool:
    """Whether data come from `map_batches` that `fills` them, so that nothing is left to do with them."""
    return isinstance(x, _MappedAdapter) and x.fills


def as_sample_weight(y: Any, class_weight: Any) -> Any:
    """The sample weights (B,) of labels `y` by `class_weight`, a dict from classes to weights."""
    return _adapter_utils.class_weight_to_sample_weights(y, class_weight)


def with_class_weight(dataset: Any, class_weight: Any) -> Any:
    """A `tf.data.Dataset` of batches (x, y, sample_weight) of one of (x, y), with the weights of the classes `y`."""
    return _data_adapters.TFDatasetAdapter(dataset, class_weight=class_weight).get_tf_dataset()


def split_for_validation(arrays: Any, validation_split: float) -> Any:
    """(x, y, sample_weight) of arrays as two of them, divided as `fit` does for `validation_split`."""
    return _array_slicing.train_validation_split(arrays, validation_split=validation_split)


# What a model was compiled with.


def begin_fit_at(model: Any, epoch: int | None) -> None:
    """Makes `fit` begin with this epoch; called in `on_train_begin`. None restores the default for the next `fit`."""
    model._initial_epoch = epoch


def callbacks_of_fit(callback: keras.callbacks.Callback) -> list[Any]:
    """The callbacks of the `fit` that has called a method of `callback`; none if it was called in another way.

    Keras does not tell a callback of the others, so the list is read from the frame of Keras' method that called it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and callback in caller.callbacks:
            return list(caller.callbacks)
        frame = frame.f_back
    return []


def loss_weights(model: Any) -> Any:
    """The `loss_weights` that a model was compiled with."""
    return model._compile_loss._user_loss_weights


def loss_tracker(model: Any) -> Any:
    """The metric that averages the loss of a compiled model over the batches of an epoch."""
    return model._loss_tracker


def metrics_are_built(model: Any) -> bool:
    """Whether the metrics that a model was compiled with are built, or there are none."""
    return model._compile_metrics is None or bool(model._compile_metrics.built)


def build_metrics(model: Any, batch: Any) -> None:
    """Builds the metrics that a model was compiled with for such a batch; on TensorFlow the first step does it."""
    model._symbolic_build(data_batch=batch)


def waiting_for_batch(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step of `fit` or `evaluate` on TensorFlow, so that no part of it runs before its batch has been read.

    Keras finds the end of data of unknown size when a step asks for the batch after the last one. In a graph, whatever
    in that step does not depend on the batch has then run: the optimizer has counted an update, and metrics a batch of
    constant size, so that losses and metrics were too small. Only variables that the step creates do not wait:
    TensorFlow takes their initial values out of the graph, which XLA needs.
    """

    def create(creator: Callable[..., Any], **options: Any) -> Any:
        with tf.control_dependencies(None):
            return creator(**options)

    @functools.wraps(step)
    def wait(data: Any) -> Any:
        tensors = [x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]
        if not tensors or tf.executing_eagerly():
            return step(data)
        with tf.control_dependencies([tf.group(*tensors)]), tf.variable_creator_scope(create):
            return step(data)

    return wait


class TracedOnce(keras_torch.Tracked):
    """A functional model that builds its optimizer, metrics and losses before it traces a step on TensorFlow.

    Keras builds them within the step there, unless there is a strategy. A function may create variables only the first
    time that TensorFlow traces it. So such a step is traced twice, and each variable gets conditions that initialize
    it.

    A traced step serves sample weights (B,) or (B, T), not both: it is traced anew for the other ones. TensorFlow would
    relax their shapes to an unknown rank, with which neither Keras nor this package can compute.

    A subclass of the user whose steps differ may give other outputs or labels to the metrics, and train other
    variables; then all is left to Keras.

    Here a step waits for its batch: see `waiting_for_batch`.
    """

    @property
    def steps_update_metrics(self) -> bool:
        """Whether a step gives the outputs of the model to the metrics. If not, they are built when first used."""
        return True

    def make_train_function(self, force: bool = False) -> Any:
        made = super().make_train_function(self._has_other_ranks("train_function") or force)
        function: Any = vars(self).get("train_function")
        if self._builds_first() and not hasattr(function, "keras_tx"):

            @functools.wraps(function)
            def build_and_train(*arguments: Any) -> Any:
                keras_optimizers.build_optimizer(self)  # here callbacks have set what is trainable
                return function(*arguments)

            build_and_train.keras_tx = True  # type: ignore[attr-defined]
            self.train_function = build_and_train
        return made

    def make_test_function(self, force: bool = False) -> Any:
        return super().make_test_function(self._has_other_ranks("test_function") or force)

    def _make_function(self, step_function: Any, **options: bool) -> Any:
        is_graph = keras.backend.backend() == "tensorflow"
        return super()._make_function(waiting_for_batch(step_function) if is_graph else step_function, **options)

    def _has_other_ranks(self, function: str) -> bool:
        """Whether the coming data have sample weights of another number of axes than `function` has been made for."""
        ranks = getattr(self, "_ranks", ())
        if not ranks:
            return False
        before = getattr(self, f"_ranks_of_{function}", ranks)
        setattr(self, f"_ranks_of_{function}", ranks)
        return bool(ranks != before)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)
        batch = data_batch if iterator is None else iterator._distributed_dataset.element_spec
        weights = map(shape_in_replica, keras.tree.flatten(keras.utils.unpack_x_y_sample_weight(batch)[2]))
        self._ranks = tuple(len(one.shape) for one in weights if one is not None)
        if not self._builds_first() or not self.steps_update_metrics:
            return
        y = keras.tree.map_structure(shape_in_replica, keras.utils.unpack_x_y_sample_weight(batch)[1])
        outputs, metrics, losses = self.output, self._compile_metrics, self._compile_loss
        if not keras.tree.flatten(y) or any(one is None for one in keras.tree.flatten(y)):
            return  # Keras says what is wrong with these labels
        if metrics is not None and not metrics.built:
            metrics.build(y, outputs)
        if losses is not None and not losses.built and _are_nested_alike(y, outputs):
            losses.build(keras.tree.pack_sequence_as(outputs, keras.tree.flatten(y)), outputs)

    def _builds_first(self) -> bool:
        if keras.backend.backend() != "tensorflow" or self._distribute_strategy is not None:
            return False
        return not any(name in vars(self) or not _is_ours(getattr(type(self), name)) for name in _STEPS)


_STEPS = ("call", "train_step", "test_step", "compute_loss", "compute_metrics")


def _is_ours(method: Any) -> bool:
    return keras_models.is_of_keras(method) or (method.__module__ or "").startswith("keras_tx.")


def shape_in_replica(spec: Any) -> Any:
    """What has the shape and dtype of a tensor in a replica's batch; None for an optional value, which means None.

    Args:
        spec: from the `element_spec` of a data set, also of a strategy, or an array.
    """
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return spec if hasattr(spec, "shape") else None


def _are_nested_alike(y: Any, outputs: Any) -> bool:
    """Whether labels are nested as outputs, but for lists and tuples, which Keras does not distinguish here."""
    try:
        keras.tree.assert_same_paths(y, outputs)
    except ValueError:
        return False
    return True


def sum_of_added_losses(model: Any) -> Tensor:
    """The sum of `model.losses` (regularizers, `add_loss`), as `fit` adds it to the loss."""
    return sum(map(model._aggregate_additional_loss, model.losses))

"""The private parts of Keras for `fit`: losses, metrics, gradient accumulation, and data of unknown size."""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

try:
    from keras.src.trainers import data_adapters as _data_adapters
    from keras.src.trainers.data_adapters import array_slicing as _array_slicing
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter as _DataAdapter
    from keras.src.trainers.epoch_iterator import EpochIterator as _EpochIterator
except (ImportError, AttributeError) as _error:
    raise ImportError(
        f"Keras {keras.__version__} no longer has a private part that keras_tx needs ({_error}): install a version "
        "of Keras that keras_tx supports, or update keras_tx/internals/keras_training.py"
    ) from _error


def wrap_losses(model: Any, wrapper: Callable[[Any], Any]) -> None:
    """Replaces each loss function(y_true, y_pred, sample_weight) of a model by `wrapper(loss)`."""
    losses = model._compile_loss
    if losses is None or "build" in vars(losses):
        return
    build = losses.build

    def build_wrapped(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        losses._flat_losses = [one._replace(loss=wrapper(one.loss)) for one in losses._flat_losses]

    if losses.built:
        losses._flat_losses = [one._replace(loss=wrapper(one.loss)) for one in losses._flat_losses]
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
    """Replaces `update_state(values, sample_weight=None)` of the metric that averages the loss over batches."""
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


def is_never_shuffled(x: Any) -> bool:
    """Whether `fit` cannot shuffle data of this kind: it takes the batches as they come."""
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is None
    is_any = (_data_adapters.is_tf_dataset, _data_adapters.is_torch_dataloader, _data_adapters.is_grain_dataset)
    return isinstance(x, types.GeneratorType) or any(is_one(x) for is_one in is_any)


class _MappedAdapter(_DataAdapter):
    """The batches that Keras makes of data, changed."""

    def __init__(self, adapter: Any, of_dataset: Callable[[Any], Any], of_batch: Callable[[Any], Any]):
        self._adapter, self._of_dataset, self._of_batch = adapter, of_dataset, of_batch

    def get_numpy_iterator(self) -> Iterator[Any]:
        return map(self._of_batch, self._adapter.get_numpy_iterator())

    def get_jax_iterator(self) -> Iterator[Any]:
        return map(self._of_batch, self._adapter.get_jax_iterator())

    def get_tf_dataset(self) -> Any:
        return self._of_dataset(self._adapter.get_tf_dataset())

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


def map_batches(of_dataset: Callable[[Any], Any], of_batch: Callable[[Any], Any], x: Any, **options: Any) -> Any:
    """Data for `fit`, `evaluate` and `predict` whose batches are those that Keras makes of `x`, changed.

    Args:
        of_dataset: from a `tf.data.Dataset` of batches to another one; for TensorFlow.
        of_batch: from a batch of arrays to another one; for JAX.
        x: arrays, a generator, a `PyDataset`, ...
        options: `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle` and `class_weight`, as for `fit`.
    """
    return _MappedAdapter(_data_adapters.get_data_adapter(x, **options), of_dataset, of_batch)


def is_prepared(x: Any) -> bool:
    """Whether data come from `map_batches`, so that nothing is left to do with them."""
    return isinstance(x, _MappedAdapter)


def with_class_weight(dataset: Any, class_weight: Any) -> Any:
    """A `tf.data.Dataset` of batches (x, y, sample_weight) of one of (x, y), with the weights of the classes `y`."""
    return _data_adapters.TFDatasetAdapter(dataset, class_weight=class_weight).get_tf_dataset()


def split_for_validation(arrays: Any, validation_split: float) -> Any:
    """(x, y, sample_weight) of arrays as two of them, divided as `fit` does for `validation_split`."""
    return _array_slicing.train_validation_split(arrays, validation_split=validation_split)


def weigh_micro_batches(
    optimizer: Any, shares: Callable[[], tuple[Tensor, Tensor] | None], num_replicas: Callable[[], int]
) -> None:
    """Lets an optimizer with `gradient_accumulation_steps` weigh the gradients of the batches of an update.

    Keras takes their mean. `shares()` is called in each step and returns None for that, or (weight, divisor) of the
    batch: then the update has the sum of gradient * weight over its batches, divided by the sum of the divisors. The
    sum so far is a variable of the optimizer. The gradients of `num_replicas()` replicas are added up.
    """
    steps = optimizer.gradient_accumulation_steps
    if not steps or "_backend_apply_gradients" in vars(optimizer):
        return
    so_far = optimizer.add_variable((), dtype="float32", name="accumulated_weight", aggregation="only_first_replica")

    def weigh_and_apply(gradients: Any, variables: Any) -> None:
        share = shares()
        if share is not None:
            weight, divisor = share
            is_first = keras.ops.equal(optimizer._iterations % steps, 0)
            before = keras.ops.where(is_first, 0.0, keras.ops.convert_to_tensor(so_far))
            after = before + divisor
            optimizer.assign(so_far, after)
            # Keras adds this to what it has accumulated, and divides by the number of batches at the end.
            own = steps * keras.ops.divide_no_nan(weight, after)
            others = keras.ops.divide_no_nan(before, after) - 1
            others = others / num_replicas()
            kept = [optimizer._accumulated_gradients[optimizer._get_variable_index(one)] for one in variables]
            gradients = [
                keras.ops.convert_to_tensor(g) * keras.ops.cast(own, g.dtype)
                + keras.ops.convert_to_tensor(k) * keras.ops.cast(others, g.dtype)
                for g, k in zip(gradients, kept, strict=True)
            ]
        type(optimizer)._backend_apply_gradients(optimizer, gradients, variables)  # may be mended later

    optimizer._backend_apply_gradients = weigh_and_apply


def clip_whole_gradients(optimizer: Any) -> None:
    """Lets an optimizer clip the gradient of a table of embeddings, where Keras clips its parts on TensorFlow.

    There the gradient has one row for each token, and Keras' norm is that of these rows, even if several of them are to
    be added to the same row of the table.
    """
    is_clipped = any(getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue"))
    if keras.backend.backend() == "tensorflow" and is_clipped and "_clip_gradients" not in vars(optimizer):
        kind = type(optimizer)  # whose function may be mended later
        optimizer._clip_gradients = lambda gradients: kind._clip_gradients(optimizer, without_duplicates(gradients))


def without_duplicates(gradients: list[Any]) -> list[Any]:
    """Gradients on TensorFlow in which no row of a table occurs twice."""
    return [_of_each_row(one) if isinstance(one, tf.IndexedSlices) else one for one in gradients]


def _of_each_row(gradient: Any) -> Any:
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


# What a model was compiled with, and optimizers.


def begin_fit_at(model: Any, epoch: int | None) -> None:
    """Makes `fit` begin with this epoch; called in `on_train_begin`. None restores the default for the next `fit`."""
    model._initial_epoch = epoch


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


def sum_of_added_losses(model: Any) -> Tensor:
    """The sum of `model.losses` (regularizers, `add_loss`), as `fit` adds it to the loss."""
    return sum(map(model._aggregate_additional_loss, model.losses))


class MuonByVariable(keras.optimizers.Muon):
    """`keras.optimizers.Muon` in which a subclass chooses the variables for AdamW and how the others are updated."""

    def takes_adamw(self, variable: Any) -> bool:
        """Whether AdamW updates `variable` (something with a `shape` and a `path`)."""
        return bool(super()._should_use_adamw(variable))

    def update_matrix(self, gradient: Tensor, variable: Any, learning_rate: Tensor, momentum: Any) -> None:
        """Updates a variable that AdamW does not update, and its momentum."""
        super()._muon_update_step(gradient, variable, learning_rate, momentum)

    def index_of(self, variable: Any) -> int:
        """The index of `variable` in the list that the optimizer was built with."""
        return int(self._get_variable_index(variable))

    def _should_use_adamw(self, variable: Any) -> bool:
        return self.takes_adamw(variable)

    def _muon_update_step(self, gradient: Tensor, variable: Any, lr: Tensor, m: Any) -> None:
        self.update_matrix(gradient, variable, lr, m)

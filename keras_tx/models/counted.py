"""Losses and metrics that count examples and real tokens over all replicas, and over the batches of one update.

The same training then has the same result on any number of devices, and with gradient accumulation. Rows that fill a
batch up (`keras_tx.data.fill_batches`) count nothing anywhere.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import ops

from keras_tx.internals import keras_models, keras_optimizers, keras_training
from keras_tx.models.base import BaseModel
from keras_tx.models.padding_of_labels import warn_of_other_padding
from keras_tx.training import PaddedCrossentropy, replicas
from keras_tx.types import Tensor

_ROWS: contextvars.ContextVar[Any] = contextvars.ContextVar("examples_of_a_batch", default=None)
_EXAMPLES: contextvars.ContextVar[Any] = contextvars.ContextVar("rows_that_are_examples", default=None)
_MICRO_BATCH: contextvars.ContextVar[Any] = contextvars.ContextVar("share_of_a_batch_in_an_update", default=None)
_IS_LOADED: contextvars.ContextVar[bool] = contextvars.ContextVar("compiled_as_in_a_file", default=False)

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
IS_EXAMPLE = "is_example"  # the name of the weights of a filled batch for `predict`


class CountedModel(BaseModel):
    """A functional model with the same losses, metrics and updates on any number of replicas."""

    counts_over_replicas = True  # so that `fit` under a strategy leaves the loss tracker to this class

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model; see `keras.Model.compile`.

        It warns if `PaddedCrossentropy`, `PaddedAccuracy` or `Perplexity` has another `padding_id` than the model,
        except for one below 0, such as -100.

        With `gradient_accumulation_steps` of the optimizer, an update equals that for one batch of all the examples of
        its batches: they are weighted by their numbers of real tokens if the loss is `PaddedCrossentropy`, and by their
        numbers of examples otherwise, which is not the same for a loss of Keras that is a mean over masked tokens.
        With `reduction="sum"` the sums are added up, and weight regularizers count once. A cycle that is not complete
        at the end of `fit` goes on in the next `fit`. A batch that a `LossScaleOptimizer` skips, because its gradients
        overflow, does not count: the update takes one more batch. As everywhere in Keras, a schedule of the
        learning rate counts the batches, not the updates, and `use_ema` averages the weights after each batch.
        """
        if not _IS_LOADED.get():
            self._take_policy_of_layers()
        super().compile(*args, **kwargs)
        if not _IS_LOADED.get():
            warn_of_other_padding(self._padding_of_labels(), (args, kwargs))
        optimizer = self._updating_optimizer()
        if optimizer is not None:
            keras_optimizers.weigh_micro_batches(optimizer, _MICRO_BATCH.get, replicas.num_replicas)
            keras_optimizers.use_whole_gradients(optimizer)
            keras_optimizers.update_with_kernels(optimizer)

    def get_compile_config(self) -> Any:
        config = super().get_compile_config()
        if config and self.optimizer is not None and type(self).compile.__module__.startswith("keras_tx."):
            # With its scale of the loss, for which Keras would look at the global policy when it loads the model.
            config["optimizer"] = keras.saving.serialize_keras_object(self.optimizer)
            config["auto_scale_loss"] = False
        return config

    def compile_from_config(self, config: Any) -> None:
        if not type(self).compile.__module__.startswith("keras_tx."):  # Keras warns that it cannot know the arguments
            super().compile_from_config(config)
            return
        with _set(_IS_LOADED, True):
            self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def _take_policy_of_layers(self) -> None:
        """Lets Keras scale the loss if the layers have the policy "mixed_float16", and the global policy is another."""
        policy = self._policy_of_layers()
        policy = getattr(policy, "default_policy", policy)  # of a `DTypePolicyMap`
        if policy is not None and "mixed_float16" in (policy.name, self.dtype_policy.name):
            keras_models.replace_dtype_policy(self, policy)

    def _policy_of_layers(self) -> Any:
        """The dtype policy of the layers; None if it is not known to be another one than that of the model."""
        return None

    def _padding_of_labels(self) -> int | None:
        """The padding id of labels that are ids of tokens; None if there is none, or if labels are something else."""
        return None

    def train_step(self, *args: Any) -> Any:
        share = self._share_of(args[-1]) if self._accumulates() else None
        with _set(_ROWS, self._rows_of(args[-1])), _set(_MICRO_BATCH, share):
            return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        with _set(_ROWS, self._rows_of(args[-1])):
            return super().test_step(*args)

    def predict_step(self, *args: Any) -> Any:
        outputs = super().predict_step(*args)
        weights = keras.utils.unpack_x_y_sample_weight(args[-1])[2]
        if not isinstance(weights, dict) or set(weights) != {IS_EXAMPLE}:
            return outputs
        kept = ops.cast(weights[IS_EXAMPLE], "int32")  # workers do not exchange booleans
        return ((outputs[0], kept), *outputs[1:]) if len(args) > 1 else (outputs, kept)  # JAX has a state

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        keras_training.wrap_losses(self, _over_replicas, _by_examples)
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return self._with_added_losses_once(loss)

    def _with_added_losses_once(self, loss: Tensor) -> Tensor:
        """The loss of a batch with its share of the added losses, such as regularizers, which count once an update."""
        if _MICRO_BATCH.get() is None or self._reduction() in _MEANS or not self.losses:
            return loss
        # The sums of an update's batches are added up, and so would be what does not depend on the examples.
        others = 1 - 1 / self._updating_optimizer().gradient_accumulation_steps
        return loss - ops.cast(sum(self.losses), loss.dtype) * others / replicas.num_replicas()

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        keras_training.wrap_metrics(self, _of_examples)
        with _set(_EXAMPLES, replicas.examples(sample_weight)):
            return super().compute_metrics(x, y, y_pred, sample_weight)

    def _rows_of(self, data: Any) -> Tensor | None:
        """The number of examples of a batch that one replica stands for in the mean of the loss over batches."""
        keras_training.wrap_loss_trackers(self, _by_examples)
        x, _, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        examples = replicas.examples(sample_weight)
        if examples is not None:
            rows = ops.sum(examples)
        elif keras.backend.backend() == "tensorflow":
            # Keras weights the loss of each output there only if the batch size is known statically.
            rows = ops.cast(ops.shape(_first(x))[0], "float32")
        else:
            return None
        return replicas.sum_over_replicas(rows) / replicas.num_replicas()

    def _updating_optimizer(self) -> Any:
        """The optimizer, or the one inside a `LossScaleOptimizer`; None without one."""
        return getattr(self.optimizer, "inner_optimizer", self.optimizer)

    def _accumulates(self) -> bool:
        return bool(getattr(self._updating_optimizer(), "gradient_accumulation_steps", None))

    def _reduction(self) -> Any:
        """How the loss, or the first one of several, is reduced to a number."""
        losses = [one for one in keras.tree.flatten(self.loss) if one is not None]
        return getattr(losses[0], "reduction", "sum_over_batch_size") if losses else None

    def _share_of(self, data: Any) -> tuple[Tensor, Tensor]:
        """The weight of a batch among those of an update, and what its sum over them is to be divided by."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        losses = [one for one in keras.tree.flatten(self.loss) if one is not None]
        reduction, examples = self._reduction(), replicas.examples(sample_weight)
        if reduction not in _MEANS:
            return ops.ones(()), ops.ones(()) / self._updating_optimizer().gradient_accumulation_steps
        if len(losses) == 1 and isinstance(losses[0], PaddedCrossentropy):
            count = losses[0].count(_first(y), keras.tree.flatten(sample_weight)[0])
        elif examples is None:
            count = ops.cast(ops.shape(_first(x))[0], "float32")
        elif reduction == "mean_with_sample_weight":
            count = ops.sum(ops.cast(_first(sample_weight), "float32"))
        else:
            count = ops.sum(examples)
        count = replicas.sum_over_replicas(count)
        return count, count


def _over_replicas(loss: Any) -> Callable[..., Tensor]:
    """One of Keras' losses whose mean is that over all replicas, and without the rows that fill a batch up."""
    if isinstance(loss, PaddedCrossentropy):
        return loss
    reduction = getattr(loss, "reduction", None)

    def over_replicas(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        sample_weight = _for_tokens(sample_weight, y_pred, not isinstance(loss, keras.losses.CTC))
        if sample_weight is not None:
            sample_weight = _squeezed(sample_weight, len(y_pred.shape) - 1)
        value = loss(y_true, y_pred, sample_weight)
        if reduction not in _MEANS or (sample_weight is None and replicas.num_replicas() == 1):
            return value
        mask = keras_models.get_keras_mask(y_pred)
        counted = ops.ones_like(y_pred[..., 0] if mask is None else mask, dtype="float32")
        if mask is not None:
            counted = ops.cast(mask, "float32")
        ignored = getattr(loss, "ignore_class", None)  # whose labels Keras leaves out of the mean
        if ignored is not None:
            labels = ops.cast(ops.reshape(y_true, ops.shape(counted)), "float32")
            counted = counted * ops.cast(ops.not_equal(labels, float(ignored)), "float32")
        # It is constant, but TensorFlow takes its gradient in replicas for which it does not know the batch size. All
        # replicas must do the same, and so none of them takes the gradient of the sum over replicas below.
        counted = ops.stop_gradient(counted)
        if sample_weight is None:
            divided_by, count = ops.sum(counted), ops.sum(counted)
        else:
            weights = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
            weights = ops.reshape(weights, (*ops.shape(weights), *[1] * (len(counted.shape) - len(weights.shape))))
            if reduction == "mean_with_sample_weight":
                divided_by = count = ops.sum(counted * weights)
            else:
                divided_by = ops.sum(counted)
                count = ops.sum(ops.where(replicas.is_padding_row(weights), 0.0, counted))
        share = ops.divide_no_nan(divided_by * replicas.num_replicas(), replicas.sum_over_replicas(count))
        return value * ops.cast(share, value.dtype)

    return over_replicas


def _of_examples(update: Callable[..., None], is_weighted: bool) -> Callable[..., None]:
    """`update_state` of metrics that leaves out the rows that fill a batch up."""

    def update_with_examples(y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        given = sample_weight if is_weighted else _EXAMPLES.get()
        update(y_true, y_pred, sample_weight=_for_tokens(given, y_pred))

    return update_with_examples


def _by_examples(update: Callable[..., None]) -> Callable[..., None]:
    """`update_state` of the mean of the loss over batches, which it weighs by their numbers of examples."""

    def update_with_examples(values: Any, sample_weight: Any = None) -> None:
        rows = _ROWS.get()
        if rows is None:
            update(values, sample_weight=sample_weight)
            return
        if len(values.shape):  # losses without reduction, which Keras has multiplied by the number of replicas
            of_rows = ops.mean(ops.reshape(values, (ops.shape(values)[0], -1)), axis=-1)
            values = ops.divide_no_nan(ops.sum(of_rows) / replicas.num_replicas(), rows)
        update(values, sample_weight=rows)

    return update_with_examples


def _for_tokens(sample_weight: Any, y_pred: Any, has_tokens: bool = False) -> Any:
    """Weights (B,) as (B, T) if predictions (B, T, V) have a mask, or `has_tokens`: their losses have the shape (B, T).

    Keras would multiply them along the wrong axis.
    """
    if sample_weight is None or (keras_models.get_keras_mask(y_pred) is None and not has_tokens):
        return sample_weight
    shape = ops.shape(y_pred)[:-1]
    weights = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
    if len(weights.shape) >= len(shape):
        return sample_weight
    weights = ops.reshape(weights, (*ops.shape(weights), *[1] * (len(shape) - len(weights.shape))))
    return weights * ops.ones(shape, dtype="float32")


def _squeezed(sample_weight: Any, rank: int) -> Tensor:
    """Weights without the last axes of size 1 that are more than `rank`, as those of (B, 1) for losses (B,)."""
    weights = ops.convert_to_tensor(sample_weight)
    while len(weights.shape) > rank and weights.shape[-1] == 1:
        weights = ops.squeeze(weights, axis=-1)
    return weights


def _first(structure: Any) -> Any:
    return next(one for one in keras.tree.flatten(structure) if one is not None)


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

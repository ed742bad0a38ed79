"""The private parts of Keras for steps of training and evaluation on JAX, where Keras holds the state of a model."""

import contextvars
from typing import Any, NamedTuple

import keras

from keras_tx.internals import keras_models, keras_training

_IS_TRAIN_STEP: contextvars.ContextVar[bool] = contextvars.ContextVar("train_step_of_keras", default=False)
_PARTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
_NAMES = {2: _PARTS[:2], 3: (*_PARTS[:2], _PARTS[3]), 4: _PARTS}  # for `predict`, for `evaluate` and for `fit`


class _Masked(NamedTuple):
    """The outputs of a model, and the mask that Keras attached to each of them or None; both go through `jax.grad`."""

    outputs: Any
    masks: list[Any]


class JaxSteps(keras_training.TracedOnce):
    """A functional model whose metrics see masks in `fit` on JAX, and which keeps its weights there if a step fails.

    On JAX, Keras drops the masks of outputs between the loss and the metrics of a training step, so that metrics would
    count padding tokens. And while `fit`, `evaluate` and `predict` run, the variables of a model have no values: Keras
    passes them from step to step, and loses them if the data of the first step raise an error, or with
    `steps_per_execution` those of any step. What fails within a compiled step takes the values with it: JAX has given
    their memory away. On the other backends this class changes nothing.
    """

    def train_step(self, *args: Any) -> Any:
        token = _IS_TRAIN_STEP.set(True)
        try:
            return super().train_step(*args)
        finally:
            _IS_TRAIN_STEP.reset(token)

    def compute_loss_and_updates(self, *args: Any, **kwargs: Any) -> Any:
        loss, (unscaled_loss, outputs, *variables) = super().compute_loss_and_updates(*args, **kwargs)
        masks = [keras_models.get_keras_mask(one) for one in keras.tree.flatten(outputs)]
        is_overridden = type(self).compute_loss_and_updates is not JaxSteps.compute_loss_and_updates
        if _IS_TRAIN_STEP.get() and not is_overridden and any(mask is not None for mask in masks):
            outputs = _Masked(outputs, masks)
        return loss, (unscaled_loss, outputs, *variables)

    def _update_metrics_variables(
        self, metrics_variables: Any, unscaled_loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> Any:
        if isinstance(y_pred, _Masked):
            y_pred, masks = y_pred
            for output, mask in zip(keras.tree.flatten(y_pred), masks, strict=True):
                if mask is not None:
                    keras_models.set_keras_mask(output, mask)
        return super()._update_metrics_variables(metrics_variables, unscaled_loss, x, y, y_pred, sample_weight)

    def _get_jax_state(self, **options: bool) -> Any:
        state = super()._get_jax_state(**options)
        self._jax_state = dict(zip((name for name in _PARTS if options.get(name)), state, strict=True))
        return state

    def _make_function(self, step_function: Any, **options: bool) -> Any:
        def step(state: Any, data: Any) -> Any:
            outputs, state = step_function(state, data)
            self._jax_state = dict(zip(_NAMES[len(state)], state, strict=True))
            return outputs, state

        is_one = keras.backend.backend() != "jax" or self.steps_per_execution == 1  # then Keras keeps the state itself
        return super()._make_function(step_function if is_one else step, **options)

    def jax_state_sync(self) -> None:
        state = getattr(self, "_jax_state", None) or {}
        if not any(value.is_deleted() for values in state.values() for value in values):
            super().jax_state_sync()
        # Otherwise the step that took these values has failed while it ran, and its own error is the one to be seen.


def sync_variables(model: Any) -> None:
    """Gives the variables of a model their values, which they do not have within `fit` and `evaluate` on JAX.

    Keras does so for callbacks that read `self.model`, but not for those that know the model from elsewhere.
    """
    if keras.backend.backend() == "jax" and isinstance(model, keras.Model):
        model.jax_state_sync()


def restore_variables(model: Any) -> None:
    """Gives the variables of a model the values of its last step after `fit`, `evaluate` or `predict` failed on JAX."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
        model._jax_state = None

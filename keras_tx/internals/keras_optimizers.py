"""The private parts of Keras' optimizers: building, whole gradients, kernels, and gradient accumulation."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_tx.internals.keras_models import is_of_keras
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def build_optimizer(model: Any) -> None:
    """Builds the optimizer of a compiled model, unless it is built already, for the weights that are trainable now."""
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built and model.trainable_variables:
        optimizer.build(model.trainable_variables)


def use_whole_gradients(optimizer: Any) -> None:
    """Gives an optimizer one gradient for each row of a table on TensorFlow, where there is one for each look-up.

    Keras would clip the norm of these parts, and Adam would add up their squares, where it is to square their sum. The
    layers of this package have whole gradients; those of Keras, and LoRA of quantized tables, do not.
    """
    if keras.backend.backend() == "tensorflow" and "_clip_gradients" not in vars(optimizer):
        kind = type(optimizer)  # whose function may be mended later
        optimizer._clip_gradients = lambda gradients: kind._clip_gradients(optimizer, whole_gradients(gradients))


def whole_gradients(gradients: list[Any]) -> list[Any]:
    """Gradients on TensorFlow as dense tensors, in which all look-ups of a row are added up."""
    return [tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one for one in gradients]


def update_with_kernels(optimizer: Any) -> None:
    """Lets `Adam` and `AdamW` update each variable with TensorFlow's kernel, where Keras has about thirty operations.

    It takes less time to trace one. Weight decay, subclasses, an `update_step` of the user, `amsgrad`, variables in
    half precision and strategies are left to Keras.
    """
    is_known = type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW) and not optimizer.amsgrad
    if keras.backend.backend() == "tensorflow" and is_known and "_backend_update_step" not in vars(optimizer):
        optimizer._backend_update_step = functools.partial(_update_with_kernels, optimizer)


def _update_with_kernels(optimizer: Any, gradients: list[Any], variables: list[Any], learning_rate: Tensor) -> None:
    dtypes = {keras.backend.standardize_dtype(one.dtype) for one in variables}
    is_changed = "update_step" in vars(optimizer) or not is_of_keras(type(optimizer).update_step)
    if is_changed or len(dtypes) > 1 or not dtypes <= {"float32", "float64"} or tf.distribute.has_strategy():
        type(optimizer)._backend_update_step(optimizer, gradients, variables, learning_rate)
        return
    dtype = dtypes.pop()
    step = tf.cast(keras.ops.convert_to_tensor(optimizer.iterations) + 1, dtype)
    beta1, beta2, epsilon = (
        tf.cast(keras.ops.convert_to_tensor(one), dtype)
        for one in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    )
    numbers = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    numbers |= {"beta1_power": beta1**step, "beta2_power": beta2**step, "lr": tf.cast(learning_rate, dtype)}
    for gradient, variable in zip(gradients, variables, strict=True):
        index = optimizer._get_variable_index(variable)
        kept = {"m": optimizer._momentums[index], "v": optimizer._velocities[index], "var": variable}
        handles = {name: getattr(one, "value", one).handle for name, one in kept.items()}
        tf.raw_ops.ResourceApplyAdam(**handles, **numbers, grad=tf.convert_to_tensor(tf.cast(gradient, dtype)))


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

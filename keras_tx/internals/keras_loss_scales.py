"""The private parts of Keras' `LossScaleOptimizer`, and what is mended there for strategies of `tf.distribute`.

Keras puts one around the optimizer of a model with the dtype policy "mixed_float16". `keras_replicas.mend` applies the
mends of this file; nothing here is called on the other backends.
"""

import contextvars
import functools
from typing import Any

import keras

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def asks_the_first_replica() -> bool:
    """Whether a batch is skipped only if the first replica finds gradients that are not finite.

    Keras takes its answer for all, as if the gradients had been added up before. Another replica's infinite gradients
    then make all weights infinite. That is so if the check does not sum anything over replicas; trying it would start
    TensorFlow, and then this process could not become a member of a cluster.
    """
    return "all_reduce" not in keras.optimizers.LossScaleOptimizer.check_finite.__code__.co_names


def ask_all_replicas() -> None:
    """Lets all replicas skip a batch if the gradients of one of them are not finite."""
    original = keras.optimizers.LossScaleOptimizer.check_finite

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        is_finite = original(self, grads)
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return is_finite
        is_wrong = 1 - tf.cast(is_finite, "float32")  # devices do not add booleans
        return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, is_wrong), 0)

    keras.optimizers.LossScaleOptimizer.check_finite = check_finite


def updates_without_context() -> bool:
    """Whether the inner optimizer of a replica does not see the context variables that are set in its training step.

    `MirroredStrategy` and `MultiWorkerMirroredStrategy` go on in new threads, in which no context variable is set.
    """
    return "run" not in keras.optimizers.LossScaleOptimizer._stateful_handle_finite_grads.__code__.co_names


_contexts: dict[tuple[int, Any], contextvars.Context] = {}  # of the replicas that are within `apply` of an optimizer


def _key(optimizer: Any) -> tuple[int, Any]:
    return id(optimizer), tf.distribute.get_replica_context()._replica_id


def update_with_context() -> None:
    """Calls the inner optimizer with the context variables that are set where the replica calls the outer one."""
    apply = keras.optimizers.LossScaleOptimizer._tf_apply
    update = keras.optimizers.LossScaleOptimizer._stateful_handle_finite_grads

    @functools.wraps(apply)
    def apply_with_context(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        goes_on_here = tf.__internal__.distribute.strategy_supports_no_merge_call()
        if goes_on_here or tf.distribute.in_cross_replica_context():  # for which Keras has an error
            apply(self, grads, trainable_variables)
            return
        key = _key(self)
        _contexts[key] = contextvars.copy_context()
        try:
            apply(self, grads, trainable_variables)
        finally:
            _contexts.pop(key, None)

    @functools.wraps(update)
    def update_in_context(self: Any, grads: Any, trainable_variables: Any) -> None:
        context = _contexts.get(_key(self)) if _contexts else None
        if context is None:
            update(self, grads, trainable_variables)
        else:
            context.run(update, self, grads, trainable_variables)

    keras.optimizers.LossScaleOptimizer._tf_apply = apply_with_context
    keras.optimizers.LossScaleOptimizer._stateful_handle_finite_grads = update_in_context

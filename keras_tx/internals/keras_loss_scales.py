"""The private parts of Keras' `LossScaleOptimizer`, and what is mended there for strategies of `tf.distribute`.

Keras puts one around the optimizer of a model with the dtype policy "mixed_float16". `keras_replicas.mend` applies the
mends of this file; nothing here is called on the other backends.
"""

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

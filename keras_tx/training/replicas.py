"""Counting over replicas and processes, and the rows that fill a batch up.

A replica is the copy of a model on one device, under a strategy of `tf.distribute`; each gets a part of every batch. On
JAX a batch is one array, whatever the number of devices, so that nothing has to be added up.
"""

from typing import Any

import keras
from keras import ops

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
torch = Lazy("torch")


def num_replicas() -> int:
    """The number of replicas, by which Keras divides losses because `tf.distribute` adds the gradients of replicas."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync) if keras.backend.backend() == "tensorflow" else 1


def sum_over_replicas(value: Tensor) -> Tensor:
    """The sum of a scalar over all replicas in a step of `fit` or `evaluate`; `value` itself anywhere else."""
    if num_replicas() == 1 or tf.distribute.in_cross_replica_context():
        return value
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def share_of_sum(total: Tensor) -> Tensor:
    """The share of one replica in the sum of `total` over all of them; see `mean_over_replicas`."""
    return total * _num_processes(total)


def mean_over_replicas(total: Tensor, count: Tensor) -> Tensor:
    """The share of one replica in the sum of `total` over all replicas, divided by the sum of `count`.

    The shares of all replicas add up to the mean, as Keras needs it. With processes of `torch.distributed` it is the
    mean of the shares that is the mean, as `DistributedDataParallel` needs it; there it is that only if `total` has
    gradients, so that one process alone can evaluate.
    """
    if keras.backend.backend() == "torch":
        if _num_processes(total) > 1:
            count = ops.cast(count, "float32").detach().clone()
            torch.distributed.all_reduce(count)
        return ops.divide_no_nan(share_of_sum(total), count)
    if num_replicas() > 1 and tf.distribute.in_cross_replica_context():
        return ops.divide_no_nan(total, count) / num_replicas()
    return ops.divide_no_nan(total, sum_over_replicas(count))


def is_padding_row(sample_weight: Tensor) -> Tensor:
    """Where sample weights are those of rows that fill a batch up: zeros with a minus sign."""
    return ops.logical_and(ops.equal(sample_weight, 0), ops.signbit(sample_weight))


def examples(sample_weight: Any) -> Tensor | None:
    """The rows of a batch that are examples and not padding, as float32 ones and zeros (B,); None without weights.

    With several outputs, the first weights that are not None tell it.
    """
    given = [one for one in keras.tree.flatten(sample_weight) if one is not None]
    if not given:
        return None
    weights = ops.cast(ops.convert_to_tensor(given[0]), "float32")
    real = ops.logical_not(is_padding_row(weights))
    if len(real.shape) > 1:
        real = ops.any(real, axis=list(range(1, len(real.shape))))
    return ops.cast(real, "float32")


def _num_processes(total: Tensor) -> int:
    """The number of processes of `torch.distributed` that compute a loss with gradients together."""
    if keras.backend.backend() != "torch" or not getattr(total, "requires_grad", False):
        return 1
    is_used = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if is_used else 1

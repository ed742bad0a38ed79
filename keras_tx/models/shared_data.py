"""Data in several processes of JAX: each takes its share before it checks the batches, and gets all predictions."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import keras

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def with_own_share(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `method(self, called, args, kwargs, ...)`, where `args` and `kwargs` are those of `fit` and so on.

    A `keras.distribution` gives each process its share of a `tf.data.Dataset`, for which it must know the batch size.
    That is known of `dataset.batch(8)` and no longer when the batches have been mapped. So the shares come first here.
    """

    @functools.wraps(method)
    def of_share(self: Any, called: Any, args: Any, kwargs: dict[str, Any], **options: Any) -> Any:
        distribution = keras.distribution.distribution()
        if distribution is None or distribution.num_processes == 1 or not distribution.auto_shard_dataset:
            return method(self, called, args, kwargs, **options)

        def share(value: Any) -> Any:
            if sys.modules.get("tensorflow") is None or not isinstance(value, tf.data.Dataset):
                return value
            policy = value.options().experimental_distribute.auto_shard_policy
            if policy == tf.data.experimental.AutoShardPolicy.OFF:  # as the readers of `keras_tx.data` set it
                raise ValueError(
                    "With `auto_shard_dataset=True`, the default of `keras.distribution`, each process takes its rows "
                    "of every batch, so the data must be those of all processes. Make the data after "
                    "`keras.distribution.set_distribution` and without `num_shards`. Received: a dataset with only the "
                    "part of this process (AutoShardPolicy.OFF)"
                )
            return distribution.distribute_dataset(value)

        args, kwargs = [share(value) for value in args], {name: share(value) for name, value in kwargs.items()}
        distribution.auto_shard_dataset = False  # Keras would divide them again
        try:
            return method(self, called, args, kwargs, **options)
        finally:
            distribution.auto_shard_dataset = True

    return of_share


def in_each_process(outputs: Any) -> Any:
    """The outputs of a traced step, whole in each process; Keras could not read slices that lie in another one."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.num_processes == 1:
        return outputs

    def whole(x: Any) -> Any:
        layout = keras.distribution.TensorLayout([None] * len(x.shape), distribution.device_mesh)
        return keras.distribution.distribute_tensor(x, layout)

    return keras.tree.map_structure(whole, outputs)

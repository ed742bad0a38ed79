"""The private part of Keras for single batches under a strategy of `tf.distribute`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_tx.internals import keras_replicas
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


@contextmanager
def batches_in_parts(model: Any, method: str) -> Iterator[None]:
    """Within this context, `train_on_batch` and `test_on_batch` give each replica of this process a part of the batch.

    Keras gives each the whole batch. A loss that is a sum, and its gradients, are then as many times too large.

    Args:
        model: a model that was made in the scope of a strategy.
        method: "train_on_batch" or "test_on_batch".

    Raises:
        ValueError: by the method, for an array without rows, or with fewer rows than there are replicas.
    """
    strategy: Any = keras_replicas.strategy_of(model)
    name = f"{method.partition('_')[0]}_function"
    make: Any = getattr(model, f"make_{name}")
    function: Any = None
    replicas = keras_replicas.replicas_here(strategy)

    def of_replica(rows: Any) -> Any:
        rows = rows if isinstance(rows, (tf.Tensor, tf.RaggedTensor)) else tf.convert_to_tensor(rows)
        if not rows.shape.rank or rows.shape[0] < replicas:
            raise ValueError(
                f"`x`, `y` and `sample_weight` must have at least {replicas} rows, one for each replica of this "
                f"process, if the loss is a sum over the rows. Received: an array of shape {tuple(rows.shape)}"
            )
        ends = [rows.shape[0] * index // replicas for index in range(replicas + 1)]

        def part(context: Any) -> Any:
            index = context.replica_id_in_sync_group % replicas
            return rows[ends[index] : ends[index + 1]]

        return strategy.experimental_distribute_values_from_function(part)

    def in_parts(batches: Any) -> Any:
        parts = [keras.tree.map_structure(lambda one: one if one is None else of_replica(one), one) for one in batches]
        # Keras returns the mean of what each replica has for a metric, and not the metric over all of them.
        return model._get_metrics_result_or_logs(function(parts))

    def make_in_parts(force: bool = False) -> None:
        """Keras calls this before each batch: the function is made anew for batches of other ranks."""
        nonlocal function
        if getattr(model, name) is in_parts:
            setattr(model, name, function)
        make(force)
        function = getattr(model, name)
        setattr(model, name, in_parts)

    object.__setattr__(model, f"make_{name}", make_in_parts)
    try:
        make_in_parts()
        yield
    finally:
        object.__delattr__(model, f"make_{name}")
        setattr(model, name, function)

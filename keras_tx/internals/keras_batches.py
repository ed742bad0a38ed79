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
    """In here, `train_on_batch` and the like give each replica its part of the batch, as `fit` does.

    Keras gives each the whole batch, so that losses that are sums are too large, and predictions come several times.
    If the rows cannot be shared evenly, the last replicas get fewer, or none.

    Args:
        model: a model that was made in the scope of a strategy.
        method: "train_on_batch", "test_on_batch" or "predict_on_batch".
    """
    strategy: Any = keras_replicas.strategy_of(model)
    name = f"{method.partition('_')[0]}_function"
    getattr(model, f"make_{name}")()
    function = getattr(model, name)

    def of_replica(rows: Any) -> Any:
        rows = rows if isinstance(rows, (tf.Tensor, tf.RaggedTensor)) else tf.convert_to_tensor(rows)
        count = -(-rows.shape[0] // strategy.num_replicas_in_sync)

        def part(context: Any) -> Any:
            begin = context.replica_id_in_sync_group * count
            return rows[begin : begin + count]

        return strategy.experimental_distribute_values_from_function(part)

    def in_parts(batches: Any) -> Any:
        parts = [keras.tree.map_structure(lambda one: one if one is None else of_replica(one), one) for one in batches]
        outputs = function(parts)
        # Keras returns the mean of what each replica has for a metric, and not the metric over all of them.
        return outputs if method == "predict_on_batch" else model._get_metrics_result_or_logs(outputs)

    setattr(model, name, in_parts)
    try:
        yield
    finally:
        setattr(model, name, function)

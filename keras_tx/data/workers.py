"""Which part of the data this worker reads: the number of workers and the index of this one."""

import json
import os
import sys
from numbers import Integral
from typing import Any

import keras

from keras_tx.optional import Lazy

jax = Lazy("jax")
torch = Lazy("torch")


def share(num_shards: Any, shard_index: Any) -> tuple[int, int]:
    """The number of parts of the data and the part of this worker, (count, index).

    Args:
        num_shards: the number of parts. None: what the environment says, which is TF_CONFIG, the processes of JAX (see
            `_of_jax`) or those of `torch.distributed`; one part otherwise.
        shard_index: the part to read, from 0. None: that of this worker.

    Raises:
        ValueError: only one of the two is given, they are not integers with 0 <= shard_index < num_shards, or
            TF_CONFIG is malformed.
    """
    if (num_shards is None) != (shard_index is None):
        raise ValueError(
            "`num_shards` and `shard_index` must be given together, or neither. Received: "
            f"num_shards={num_shards!r}, shard_index={shard_index!r}"
        )
    if num_shards is None:
        return _of_environment()
    for value in (num_shards, shard_index):
        if isinstance(value, bool) or not isinstance(value, Integral):
            break
    else:
        if 0 <= shard_index < num_shards:
            return int(num_shards), int(shard_index)
    raise ValueError(
        "`shard_index` must be an integer of at least 0 and less than `num_shards`. Received: "
        f"num_shards={num_shards!r}, shard_index={shard_index!r}"
    )


def _of_environment() -> tuple[int, int]:
    if os.environ.get("TF_CONFIG"):
        return _of_tf_config(os.environ["TF_CONFIG"])
    if keras.backend.backend() == "jax" and "jax" in sys.modules and jax.distributed.is_initialized():
        return _of_jax()
    if keras.backend.backend() == "torch" and "torch" in sys.modules:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_world_size()), int(distributed.get_rank())
    return 1, 0


def _of_jax() -> tuple[int, int]:
    """The part of this process of JAX. One part if the distribution gives each process its rows of every batch.

    Otherwise there is a part for each replica of the model: processes that hold one replica together need equal rows.
    """
    distribution = keras.distribution.distribution()
    if distribution is None:
        return int(jax.process_count()), int(jax.process_index())
    if distribution.auto_shard_dataset:
        return 1, 0
    return min(distribution.num_processes, distribution.num_model_replicas), distribution.data_shard_id


def _of_tf_config(text: str) -> tuple[int, int]:
    """Reads the environment variable of `tf.distribute`: the chief is first, and an evaluator reads all data."""
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        addresses = [cluster.get(kind, []) for kind in ("chief", "worker")]
        if not all(isinstance(one, list) for one in addresses):
            raise ValueError("'chief' and 'worker' must be lists of addresses")
        counts = [len(one) for one in addresses]
        kind, index = task.get("type"), task.get("index")
        if kind not in ("chief", "worker") or sum(counts) < 2:
            return 1, 0
        if isinstance(index, bool) or not isinstance(index, (int, str)):
            raise ValueError("'task' must have an integer 'index'")
        index = int(index)
        position = index + (counts[0] if kind == "worker" else 0)
        if not 0 <= index < counts[kind == "worker"]:
            raise ValueError(f"there is no {kind} {index}")
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            "TF_CONFIG must be JSON with 'cluster' and 'task', as `tf.distribute` describes. Received: "
            f"{text!r} ({error})"
        ) from error
    return sum(counts), position

"""Strategies of `tf.distribute` under which every functional Keras model trains: on one machine, and on several."""

import json
import os
import random
import warnings
from collections.abc import Sequence
from typing import Any

import keras

from keras_tx import checks
from keras_tx.distribution import cluster
from keras_tx.internals import keras_replicas, tensorflow_graphs
from keras_tx.optional import Lazy
from keras_tx.training.workers import OfTensorFlow
from keras_tx.under_strategy import guard_training, remember

tf = Lazy("tensorflow")

_HEARTBEAT = 10  # seconds after which a worker that is silent is taken for lost


def mirrored_strategy(devices: Sequence[str] | None = None) -> Any:
    """A `tf.distribute.MirroredStrategy`: a model on several devices of one machine, each with a part of every batch.

    This patches Keras in this process, where the installed version needs it, so that `fit`, `evaluate` and `predict`
    work under the strategy for any functional model: batches that the devices do not share evenly, generators,
    `steps_per_execution`, and `ema_overwrite_frequency` of an optimizer.

    Make, load and compile the model inside `strategy.scope()`. The batch size is that of all devices together.

    Args:
        devices: such as `["GPU:0", "GPU:1"]`. None: all GPUs, or the CPU if there is none.

    Returns:
        A `tf.distribute.MirroredStrategy`.

    Raises:
        ValueError: another backend than TensorFlow, or devices that do not exist or are named twice. Later, `fit`
            raises for what cannot work: a model or an optimizer made outside of the scope, `jit_compile=True`, and a
            batch size below the number of devices.

    Examples:
        >>> strategy = keras_tx.distribution.mirrored_strategy()
        >>> with strategy.scope():
        ...     model = keras_tx.models.TextClassifier(11, 2, num_layers=1, hidden_dim=8, num_heads=2)
        ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> history = model.fit(np.array([[1, 2, 0], [3, 4, 5]]), np.array([0, 1]), verbose=0)
        >>> strategy.num_replicas_in_sync
        1
    """
    _check_backend("mirrored_strategy")
    if devices is not None:
        _check_devices(devices)
    if os.environ.get("TF_CONFIG"):
        warnings.warn(
            "`mirrored_strategy` uses the devices of this machine only and ignores TF_CONFIG, which names several "
            "workers: use `multi_worker_strategy` to train on all of them.",
            stacklevel=2,
        )
    guard_training()
    with keras_replicas.fresh_collective_keys(tf.distribute.MirroredStrategy):
        strategy = tf.distribute.MirroredStrategy(devices)
    remember(strategy)
    return strategy


def multi_worker_strategy(
    *, timeout: float = 300.0, cluster_resolver: Any = None, communication_options: Any = None
) -> Any:
    """A `tf.distribute.MultiWorkerMirroredStrategy`: a model on several machines, each with a part of every batch.

    The same program runs on every machine, with the environment variable TF_CONFIG, which names all of them and says
    which one this is. This function waits until all have started. It must be called before anything else uses
    TensorFlow, since no process can join a cluster later.

    This patches Keras in this process, where the installed version needs it, so that `fit`, `evaluate` and `predict`
    work under the strategy for any functional model; see also `mirrored_strategy`. Make, load and compile the model
    inside `strategy.scope()`. The batch size is that of all machines together, and every machine gets the same data
    set. So that all shuffle it alike, they take over the random state of Python from the first one, and without a seed
    of TensorFlow (`keras.utils.set_random_seed`) they set the same one.

    If a worker is lost, the others raise an error that names it, within a minute. Start all of them again to go on.

    Args:
        timeout: how many seconds to wait for the other workers.
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` in place of TF_CONFIG.
        communication_options: `tf.distribute.experimental.CommunicationOptions`.

    Returns:
        A `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: another backend than TensorFlow, or a TF_CONFIG that is missing or wrong. Later, `fit` raises for
            what cannot work, as under `mirrored_strategy`.
        RuntimeError: TensorFlow has been used before, or the port of this worker is in use.
        TimeoutError: a worker did not start in time; the message has its address.

    Examples:
        >>> import json, os
        >>> os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["10.0.0.1"]}, "task": {"type": "worker"}})
        >>> keras_tx.distribution.multi_worker_strategy()
        Traceback (most recent call last):
            ...
        ValueError: TF_CONFIG must have the key 'task' with 'type' and 'index'. Received: task={'type': 'worker'}
        >>> del os.environ["TF_CONFIG"]
    """
    _check_backend("multi_worker_strategy")
    timeout = checks.positive_float("timeout", timeout)
    if cluster_resolver is None:
        tasks = cluster.from_environment()
    else:
        jobs = cluster_resolver.cluster_spec().as_dict()
        tasks = cluster.checked(jobs, cluster_resolver.task_type, cluster_resolver.task_id, "`cluster_resolver`")
    if keras_replicas.tensorflow_has_started():
        raise RuntimeError(
            "`multi_worker_strategy` must be called before anything else uses TensorFlow in this process: before "
            "tensors, data sets, layers and models are made, and in a notebook after a restart of the kernel."
        )
    cluster.wait(tasks, timeout)
    guard_training()
    milliseconds = {
        "heartbeat_timeout_in_ms": 1000 * _HEARTBEAT,
        "cluster_register_timeout_in_ms": int(1000 * timeout),
    }
    with (
        keras_replicas.fresh_collective_keys(tf.distribute.MultiWorkerMirroredStrategy),
        keras_replicas.coordination_options(**milliseconds),
    ):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver, communication_options)
    if tasks.others:  # an evaluator has none
        _share_random_state(strategy)
    remember(strategy)
    return strategy


def _share_random_state(strategy: Any) -> None:
    """Lets all workers shuffle alike: otherwise some rows of a data set are trained twice in an epoch, others never.

    Keras shuffles arrays by TensorFlow's random numbers and a `PyDataset` by Python's, and each worker then reads its
    part of each batch. A state that is the same already, as after the same seeds, is not changed.
    """
    workers = OfTensorFlow(strategy)
    version, numbers, gauss = random.getstate()
    received = json.loads(workers.from_chief(json.dumps([version, numbers, gauss]).encode()))
    state = (received[0], tuple(received[1]), received[2])
    random.setstate(state)
    if not tensorflow_graphs.has_global_seed():
        copy = random.Random()
        copy.setstate(state)
        tf.random.set_seed(copy.getrandbits(31))


def _check_backend(name: str) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"`{name}` needs the TensorFlow backend. On JAX use `keras.distribution.DataParallel` or "
            "`keras.distribution.ModelParallel` with `keras.distribution.set_distribution`. Received: "
            f"keras.backend.backend()={keras.backend.backend()!r}"
        )


def _check_devices(devices: Any) -> None:
    known = [device.name.removeprefix("/device:") for device in tf.config.list_logical_devices()]
    is_list = isinstance(devices, (list, tuple)) and all(isinstance(one, str) for one in devices)
    names = [one.rpartition("device:")[2].lstrip("/").upper() for one in devices] if is_list else []
    if not names or not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(f"`devices` must be names from {known}, each at most once. Received: devices={devices!r}")

"""What the processes of one training tell each other: bytes from each to all, and from the first to all.

The engines are those that train: collectives of `tf.distribute` for `MultiWorkerMirroredStrategy`, and
`jax.experimental.multihost_utils` for the processes of `keras.distribution` on JAX. Every process must call the same
methods in the same order.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
jax = Lazy("jax")
multihost_utils = Lazy("jax.experimental.multihost_utils")

CHUNK = 1 << 26  # bytes that are sent at once


class Workers:
    """A training of one process, or the base of those with several.

    Attributes:
        index: the number of this process; 0 is the chief, which writes the files.
        names: what each process is called in messages, in order.
    """

    index = 0
    names: Sequence[str] = ("this process",)

    def __init__(self, strategy: Any = None) -> None:
        self._strategy = strategy  # of `tf.distribute`; None on other backends

    def gather(self, data: bytes) -> list[bytes]:
        """The data of all processes, in order."""
        return [data]

    def from_chief(self, data: bytes) -> bytes:
        """The data of the chief; that of the others does not count."""
        return data

    def array(self, value: Tensor) -> np.ndarray:
        """The whole value of a variable, of which this process may hold a part."""
        return np.asarray(keras.ops.convert_to_numpy(value))

    def parts(self, variable: Any) -> list[np.ndarray]:
        """What each device of this process has added up in a variable of a metric; on JAX, all devices together."""
        return [np.asarray(one) for one in self._local(variable)] if self._strategy else [self.array(variable)]

    def assign_parts(self, variable: Any, parts: Sequence[np.ndarray]) -> None:
        """Gives the devices what `parts` returned."""
        if self._strategy is None:
            variable.assign(parts[0])
        else:
            for one, part in zip(self._local(variable), parts, strict=True):
                one.assign(part)

    def _local(self, variable: Any) -> Sequence[Any]:
        found: Sequence[Any] = self._strategy.experimental_local_results(variable.value)
        return found


class SeveralWorkers(Workers):
    """A training of several processes, which exchange arrays of equal shapes."""

    def gather(self, data: bytes) -> list[bytes]:
        lengths = self._gathered(np.array([len(data)], "int32"))[:, 0]
        padded = np.zeros(-(-max(int(lengths.max()), 1) // 4) * 4, "uint8")
        padded[: len(data)] = np.frombuffer(data, "uint8")
        rows = self._gathered(padded.view("int32"))
        return [row.tobytes()[:length] for row, length in zip(rows, lengths, strict=True)]

    def from_chief(self, data: bytes) -> bytes:
        size = int(self._of_chief(np.array(list(len(data).to_bytes(8, "little")), "int32")) @ 256 ** np.arange(8))
        received = bytearray()
        for start in range(0, size, CHUNK):
            length = min(CHUNK, size - start)
            part = np.zeros(-(-length // 4) * 4, "uint8")
            if self.index == 0:
                part[:length] = np.frombuffer(data, "uint8", length, start)
            received += self._of_chief(part.view("int32")).tobytes()[:length]
        return bytes(received)

    def _gathered(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all processes, stacked: (processes, *shape). They are int32 and of one shape."""
        raise NotImplementedError(f"{type(self).__name__} must define `_gathered`")

    def _of_chief(self, array: np.ndarray) -> np.ndarray:
        """The array of the first process. It is int32, and of one shape in all processes."""
        raise NotImplementedError(f"{type(self).__name__} must define `_of_chief`")


class OfTensorFlow(SeveralWorkers):
    """The workers of a `tf.distribute.MultiWorkerMirroredStrategy`."""

    def __init__(self, strategy: Any) -> None:
        resolver = strategy.cluster_resolver
        jobs = resolver.cluster_spec().as_dict()
        tasks = [(job, i) for job in ("chief", "worker") for i in range(len(jobs.get(job, ())))]
        super().__init__(strategy)
        self.index = tasks.index((resolver.task_type, resolver.task_id))
        self.names = [f"{job} {i} ({jobs[job][i]})" for job, i in tasks]

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """The sum of the arrays of all processes; one replica of each has its array, the others zeros."""
        here = self._strategy.extended.worker_devices
        first = self._strategy.num_replicas_in_sync // len(self.names) * self.index

        def of_replica(context: Any) -> Any:
            own = context.replica_id_in_sync_group == first
            return tf.constant(array if own or len(here) == 1 else np.zeros_like(array))

        with self._strategy.scope():
            values = self._strategy.experimental_distribute_values_from_function(of_replica)
            return np.asarray(self._strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None))

    def _gathered(self, array: np.ndarray) -> np.ndarray:
        rows = np.zeros((len(self.names), *array.shape), "int32")
        rows[self.index] = array
        return self._sum(rows)

    def _of_chief(self, array: np.ndarray) -> np.ndarray:
        return self._sum(array if self.index == 0 else np.zeros_like(array))


class OfJax(SeveralWorkers):
    """The processes of `keras.distribution` on JAX."""

    def __init__(self) -> None:
        super().__init__()
        self.index = jax.process_index()
        self.names = [f"process {i}" for i in range(jax.process_count())]

    def _gathered(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(multihost_utils.process_allgather(array))

    def _of_chief(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(multihost_utils.broadcast_one_to_all(array))

    def array(self, value: Tensor) -> np.ndarray:
        held = keras.ops.convert_to_tensor(value)
        if held.is_fully_addressable:
            return np.asarray(held)
        if held.is_fully_replicated:
            return np.asarray(held.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(held, tiled=True))


def of_model(model: Any) -> Workers:
    """The processes that train a model together."""
    if keras.backend.backend() == "tensorflow":
        strategy = model.distribute_strategy
        is_several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
        return OfTensorFlow(strategy) if is_several else Workers(strategy)
    return OfJax() if keras.backend.backend() == "jax" and jax.process_count() > 1 else Workers()

"""Saves from several processes of JAX: all of them gather the arrays, one at a time, and the first one writes."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_tx.optional import Lazy

jax, multihost_utils = Lazy("jax"), Lazy("jax.experimental.multihost_utils")


def on_host(variable: Any) -> np.ndarray:
    """The value of a variable or tensor; if its slices lie in several processes, all of them must call this."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    if keras.backend.backend() == "jax":
        if not (value.is_fully_addressable or value.is_fully_replicated):
            gathered: np.ndarray = multihost_utils.process_allgather(value, tiled=True)
            return gathered
        # JAX keeps the copy on the host as long as the array lives. Here that is another array with the same buffers.
        parts = [shard.data for shard in value.addressable_shards]
        value = jax.make_array_from_single_device_arrays(value.shape, value.sharding, parts)
    found: np.ndarray = keras.ops.convert_to_numpy(value)
    return found


def written_by_first(arrays: Iterator[Any], write: Callable[[Iterator[Any]], None]) -> None:
    """Calls `write(arrays)` in the first process; the others also go through `arrays`, and wait for the end.

    Raises:
        OSError: in the other processes, if the first one failed. It raises its own error.
    """
    is_alone = keras.backend.backend() != "jax" or jax.process_count() == 1
    error: BaseException | None = None
    try:
        if is_alone or jax.process_index() == 0:
            write(arrays)
    except BaseException as one:
        error = one
    if not is_alone:
        try:
            for _ in arrays:  # gathering needs all processes, also when one cannot write
                pass
        except BaseException as one:
            error = error or one
        failed = multihost_utils.process_allgather(np.array(error is not None)).reshape(-1)
        if failed.any() and error is None:
            raise OSError(
                "Every process must save the checkpoint without an error. Received: an error in process "
                f"{int(failed.argmax())}"
            )
    if error is not None:
        raise error

"""Integer ids and the tables they index: (B, T), (V, D) -> (B, T, D), with what can be checked checked.

Values can be read only in eager calls. In a TensorFlow graph the look-up itself refuses an id outside the table; XLA
and JAX cannot raise, there such an id reads some row of the table.
"""

import keras
import numpy as np
from keras import ops


def check_ids(name, ids, size):
    """Returns integer `ids` in which a negative one is out of the table, or raises where that can be known."""
    ids = ops.convert_to_tensor(ids)
    dtype = keras.backend.standardize_dtype(ids.dtype)
    if "int" not in dtype:
        raise ValueError(f"`{name}` must be integers. Received: {name} of dtype {dtype}")
    values = _values(ids)
    if values is not None and values.size and not 0 <= values.min() <= values.max() < size:
        wrong = values[(values < 0) | (values >= size)].ravel()[0]
        raise ValueError(f"`{name}` must be in [0, {size}). Received: {wrong} in {name} of shape {values.shape}")
    return ids if "uint" in dtype else ops.where(ids < 0, size, ids)  # else Keras counts negative ids from the end


def look_up(name, table, ids, dtype):
    """The rows `ids` of `table`."""
    return ops.cast(ops.take(table, check_ids(name, ids, table.shape[0]), axis=0), dtype)


def check_positions(positions, inputs):
    """Returns `positions` (B, T) or (T,) for `inputs` (B, T, D), or raises."""
    positions = ops.convert_to_tensor(positions)
    dtype = keras.backend.standardize_dtype(positions.dtype)
    expected = tuple(inputs.shape[:2])
    pairs = zip(reversed(tuple(positions.shape)), reversed(expected), strict=False)
    if len(positions.shape) not in (1, 2) or any(None not in (a, b) and a not in (1, b) for a, b in pairs):
        raise ValueError(
            f"`positions` must have the shape {expected} or {expected[1:]}. Received: positions.shape="
            f"{tuple(positions.shape)}"
        )
    if "int" not in dtype:
        raise ValueError(f"`positions` must be integers. Received: positions of dtype {dtype}")
    return positions


def _values(ids):
    """The ids as a NumPy array, or None where they have no values yet."""
    if isinstance(ids, keras.KerasTensor) or getattr(getattr(ids, "device", None), "type", None) == "meta":
        return None
    try:
        return np.asarray(ops.convert_to_numpy(ids))
    except Exception:  # each backend raises its own error for a tensor of a graph
        return None

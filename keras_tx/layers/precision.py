"""The dtype of scores, softmax, positions and statistics, float32 at least, float64 where the inputs are float64; and
vectors of integers as floats.
"""

from typing import Any

import keras
from keras import ops

from keras_tx.types import DType, Tensor


def wide_dtype(*given: Tensor | DType) -> str:
    """ "float64" if one of the tensors or dtypes is float64, else "float32"."""
    dtypes = [keras.backend.standardize_dtype(getattr(one, "dtype", one)) for one in given]
    return "float64" if "float64" in dtypes else "float32"


def as_floats(x: Tensor, layer: Any) -> Tensor:
    """The vectors `x`, in the compute dtype of `layer` if they are integers or booleans.

    Keras leaves those as they are, and what is computed from them would be rounded to integers.
    """
    return x if keras.backend.is_float_dtype(x.dtype) else ops.cast(x, layer.compute_dtype)

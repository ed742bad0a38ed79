"""The dtype of scores, softmax, positions and statistics: float32 at least, float64 where the inputs are float64."""

import keras

from keras_tx.types import DType, Tensor


def wide_dtype(*given: Tensor | DType) -> str:
    """ "float64" if one of the tensors or dtypes is float64, else "float32"."""
    dtypes = [keras.backend.standardize_dtype(getattr(one, "dtype", one)) for one in given]
    return "float64" if "float64" in dtypes else "float32"

"""The largest and the smallest number against NumPy's, of empty tensors too, and on the device of the tensor."""

import keras
import numpy as np
import pytest

from keras_tx.layers.extremes import largest, smallest
from tests.tools import normal, to_numpy

SHAPES = [((3, 5), 1), ((3, 5), 0), ((3, 5), -1), ((3, 5), None), ((3, 0), 1), ((0, 5), 1), ((0, 5), 0), ((0,), None)]


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_they_are_those_of_numpy(shape, axis, dtype):
    if dtype == "int64" and keras.backend.backend() == "jax":
        pytest.skip("JAX has no int64 without its option")
    x = (7 * normal(*shape)).astype(dtype)
    ends = (float("-inf"), float("inf")) if dtype == "float32" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for initial in (*ends, 2):
        for ours, theirs in ((largest, np.max), (smallest, np.min)):
            found = ours(keras.ops.convert_to_tensor(x), initial, axis)
            np.testing.assert_array_equal(to_numpy(found), theirs(x, axis=axis, initial=initial))
            assert keras.backend.standardize_dtype(found.dtype) == dtype


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="PyTorch alone names devices")
def test_they_are_on_the_device_of_the_tensor():
    with keras.device("meta"):  # which is not the CPU, and which every machine has
        x = keras.ops.zeros((3, 5))
        assert x.device.type == largest(x, 0, 1).device.type == smallest(x, 0).device.type == "meta"

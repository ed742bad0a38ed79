"""Single batches under a strategy, and what is read of Keras' private parts for them."""

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_batches
from tests.internals.doors import BATCHES, still

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow


@still("returns the metrics of a model in the place of logs", door=BATCHES)
def test_each_method_gets_the_batch_in_parts_and_is_as_before_afterwards():
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    x, y = np.arange(14.0).reshape(7, 2), np.ones(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"], run_eagerly=True)
    for method in ("test_on_batch", "train_on_batch"):
        expected, name = getattr(model, method)(x, y), f"{method.partition('_')[0]}_function"
        function = getattr(model, name)
        with keras_batches.batches_in_parts(model, method):
            assert getattr(model, name) is not function
            np.testing.assert_allclose(getattr(model, method)(x, y), expected, rtol=1e-6)
        assert getattr(model, name) is function

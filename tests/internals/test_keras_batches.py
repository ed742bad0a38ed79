"""Single batches under a strategy, and what is read of Keras' private parts for them."""

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_batches
from keras_tx.models import CausalLM
from keras_tx.training import PaddedCrossentropy
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


def test_batches_of_other_ranks_are_given_in_parts_too(monkeypatch):
    strategy, parts = tf.distribute.OneDeviceStrategy("cpu:0"), []
    with strategy.scope():
        model = CausalLM(11, num_layers=1, hidden_dim=4, num_heads=1, intermediate_dim=4, dropout=0.0)
        model.compile(keras.optimizers.SGD(0.0), PaddedCrossentropy(reduction="sum"), jit_compile=False)
    distribute = strategy.experimental_distribute_values_from_function
    monkeypatch.setattr(
        strategy, "experimental_distribute_values_from_function", lambda part: parts.append(1) or distribute(part)
    )
    ids = np.arange(1, 9).reshape(2, 4)
    for shape in ((2,), (2, 4), (2, 4), (2,)):
        parts.clear()
        with keras_batches.batches_in_parts(model, "train_on_batch"):
            found = keras.Model.train_on_batch(model, ids, ids, np.full(shape, 2.0, "float32"))
        assert len(parts) == 3  # inputs, labels and weights
        np.testing.assert_allclose(found, 2 * float(PaddedCrossentropy(reduction="sum")(ids, model(ids))), rtol=1e-5)

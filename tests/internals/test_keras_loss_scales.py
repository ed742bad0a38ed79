"""What is mended in Keras' `LossScaleOptimizer` still is as its mends need it.

`test_keras_replicas` tests that the faults are found, and `tests/distribution/test_loss_scale.py` what comes of them.
"""

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_loss_scales
from tests.internals.doors import SCALES, still

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow


@still("skips a batch by the answer of `check_finite`", door=SCALES)
def test_ask_all_replicas(monkeypatch):
    """Without several replicas an optimizer answers as before, and a batch is skipped where the answer is False."""
    scaled = keras.optimizers.LossScaleOptimizer
    monkeypatch.setattr(scaled, "check_finite", getattr(scaled.check_finite, "__wrapped__", scaled.check_finite))
    assert keras_loss_scales.asks_the_first_replica()
    keras_loss_scales.ask_all_replicas()
    assert not keras_loss_scales.asks_the_first_replica()
    optimizer, variable = scaled(keras.optimizers.SGD(1.0), initial_scale=2.0), keras.Variable([5.0])
    optimizer.build([variable])
    values = []
    for gradient in (4.0, np.inf, np.nan, 0.5):
        assert bool(optimizer.check_finite([tf.constant([gradient]), None])) == np.isfinite(gradient)
        optimizer.apply([tf.constant([gradient])], [variable])
        values.append(variable.numpy().item())
    assert values == [3, 3, 3, 2]  # the scale is 0.5 for the last
    monkeypatch.setattr(scaled, "check_finite", lambda *_: False)
    optimizer.apply([tf.constant([1.0])], [variable])
    assert variable.numpy() == 2

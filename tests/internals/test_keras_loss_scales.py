"""What is mended in Keras' `LossScaleOptimizer` still is as its mends need it.

`test_keras_replicas` tests that the faults are found, and `tests/distribution/test_loss_scale.py` what comes of them.
"""

import contextvars

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_loss_scales
from tests.internals.doors import SCALES, still

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow


NUMBER = contextvars.ContextVar("number", default=None)


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


@still("calls the inner optimizer in `_stateful_handle_finite_grads`, within `_tf_apply`", door=SCALES)
def test_update_with_context(monkeypatch):
    """A context variable of the training step is what it is there for the inner optimizer, where Keras starts threads.

    Without replicas, and after an error of the inner optimizer, all is as in Keras.
    """
    scaled = keras.optimizers.LossScaleOptimizer
    for name in ("_tf_apply", "_stateful_handle_finite_grads"):
        monkeypatch.setattr(scaled, name, getattr(vars(scaled)[name], "__wrapped__", vars(scaled)[name]))
    seen, strategy = [], tf.distribute.MirroredStrategy(["CPU:0"])

    class Noting(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            seen.append(NUMBER.get())
            if NUMBER.get() == 7:
                raise ValueError("seven")
            super().apply(grads, trainable_variables)

    with strategy.scope():
        variable, optimizer = keras.Variable([5.0]), scaled(Noting(1.0), initial_scale=2.0)
        optimizer.build([variable])

    def step(number=3):
        token = NUMBER.set(number)
        try:
            optimizer.apply([tf.constant([4.0])], [variable])
        finally:
            NUMBER.reset(token)

    assert keras_loss_scales.updates_without_context()
    strategy.run(step)
    keras_loss_scales.update_with_context()
    assert not keras_loss_scales.updates_without_context()
    strategy.run(step)
    tf.function(lambda: strategy.run(step))()
    with pytest.raises(ValueError, match="seven"):
        strategy.run(step, args=(7,))
    assert seen == [None, 3, 3, 7] and not keras_loss_scales._contexts
    with strategy.scope(), pytest.raises(ValueError, match="must be called in a replica context"):
        step()
    alone, variable = scaled(Noting(1.0), initial_scale=2.0), keras.Variable([5.0])
    alone.apply([tf.constant([4.0])], [variable])
    assert seen[4:] == [None] and variable.numpy() == 3

"""What is mended for strategies of `tf.distribute`, and what is read of Keras' and TensorFlow's private parts.

A test that fails here because Keras or TensorFlow has changed says so, with the version. A mend whose fault Keras no
longer has is not applied, and can go.
"""

import importlib
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_loss_scales, keras_replicas
from keras_tx.models import TextClassifier
from tests.internals.doors import REPLICAS, still

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow
FAULTS = {  # the check that finds a fault, and what it concerns
    keras_replicas.draws_a_batch_to_build: "_maybe_symbolic_build",
    keras_replicas.averages_over_an_axis: "reduce_per_replica",
    keras_replicas.loops_over_batches_in_a_graph: "_make_function",
    keras_replicas.updates_across_replicas_from_one: "_overwrite_model_variables_with_average_value",
    keras_replicas.clips_before_the_sum: "_clip_gradients",
    keras_replicas.accumulates_in_one_replica: "_backend_apply_gradients",
    keras_replicas.normalizes_no_examples_to_nan: "_moments",
    keras_loss_scales.asks_the_first_replica: "check_finite",
    keras_loss_scales.updates_without_context: "_stateful_handle_finite_grads",
}


@pytest.fixture
def stock(monkeypatch):
    """Keras without mends, also if this process has applied them, until the end of a test."""
    trainer, optimizer = keras_replicas._trainer, keras_replicas._optimizer
    owners = [trainer.TensorFlowTrainer, importlib.import_module("keras.src.backend.tensorflow.trainer")]
    owners += [optimizer.TFOptimizer, keras.layers.BatchNormalization, keras.optimizers.LossScaleOptimizer]
    for owner in owners:
        for name in [*FAULTS.values(), "_tf_apply"]:
            if name in vars(owner):
                original = getattr(vars(owner)[name], "__wrapped__", vars(owner)[name])
                monkeypatch.setattr(owner, name, original)


@pytest.mark.parametrize("is_faulty", FAULTS, ids=lambda one: one.__name__)
def test_a_fault_is_found_and_mended(is_faulty, stock):
    has = f"Keras {keras.__version__} no longer has the fault of {FAULTS[is_faulty]} or a function that the check calls"
    assert is_faulty(), f"{has}: its mend in {is_faulty.__module__} can go"
    keras_replicas.mend()
    assert not is_faulty()


def test_the_mean_of_no_examples_is_nan_unless_it_is_mended(stock):
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    nothing = tf.zeros((0, 2))
    has = f"Keras {keras.__version__} no longer has the fault of _moments: its mend in internals/{REPLICAS.name} can go"
    assert np.isnan(layer._moments(nothing, None)).all(), has
    keras_replicas.mend()
    np.testing.assert_array_equal(layer._moments(nothing, None), [[0, 0], [1, 1]])
    np.testing.assert_array_equal(layer._moments(tf.constant([[3.0, 5.0]]), None), [[3, 5], [0, 0]])


def test_what_is_not_faulty_stays(stock, monkeypatch):
    for is_faulty in FAULTS:
        monkeypatch.setattr(sys.modules[is_faulty.__module__], is_faulty.__name__, lambda: False)
    trainer = keras_replicas._trainer.TensorFlowTrainer
    before = [trainer._maybe_symbolic_build, trainer._make_function]
    keras_replicas.mend()
    assert before == [trainer._maybe_symbolic_build, trainer._make_function]


def depth(function):
    """How often a function has been wrapped."""
    return 1 + depth(function.__wrapped__) if hasattr(function, "__wrapped__") else 0


def test_a_model_trains_in_the_scope_of_a_stock_strategy_and_keras_is_mended_once(stock):
    x, y = np.ones((4, 3), int), np.zeros(4, int)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = TextClassifier(11, 2, num_layers=1, hidden_dim=4, num_heads=1, intermediate_dim=4)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, run_eagerly=True)
        for _ in range(3):
            model.train_on_batch(x, y)
    for name in ("_overwrite_model_variables_with_average_value", "_clip_gradients", "_backend_apply_gradients"):
        assert depth(getattr(keras_replicas._optimizer.TFOptimizer, name)) == 1


def model_of(strategy):
    with strategy.scope():
        x = keras.Input((3,))
        model = keras.Model(x, keras.layers.Dense(2)(x))
        model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=[keras.metrics.MeanSquaredError()])
    return model


@still("keeps the strategy of models and optimizers, and the metrics of a model", door=REPLICAS)
def test_what_models_know():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    model = model_of(strategy)
    assert keras_replicas.strategy_of(model) is strategy
    assert keras_replicas.strategy_of_optimizer(model.optimizer) is strategy
    default = keras_replicas.strategy_of_optimizer(keras.optimizers.SGD())
    assert default is tf.distribute.get_strategy() and keras_replicas.strategy_of_optimizer(None) is None
    assert keras_replicas.strategy_of(keras.Sequential([keras.layers.Dense(1)])) is None
    first, second = keras_replicas.metrics_compiled_with(model)
    assert first == "mae" and isinstance(second, keras.metrics.MeanSquaredError)
    assert keras_replicas.metrics_compiled_with(keras.Sequential([])) == []
    assert not keras_replicas.is_multi_worker(strategy)


def test_the_replicas_of_this_process_are_counted():
    assert keras_replicas.replicas_here(tf.distribute.OneDeviceStrategy("cpu:0")) == 1


@still("builds a model from the specs of a data set", door=REPLICAS)
def test_a_model_is_built_from_specs():
    keras_replicas.mend()
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")
    model = model_of(tf.distribute.OneDeviceStrategy("CPU:0"))
    results = model.evaluate(x, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(results["loss"], np.mean((model(x) - y) ** 2), rtol=1e-5)
    assert set(results) == {"loss", "mae", "mean_squared_error"}


@still("finds the batch size of a data set", library="tensorflow", door=REPLICAS)
def test_batch_size_of():
    rows = tf.data.Dataset.range(10)
    assert keras_replicas.batch_size_of(rows.batch(4)) == 4
    assert keras_replicas.batch_size_of(rows.batch(4).repeat().prefetch(1)) == 4
    assert keras_replicas.batch_size_of(rows) is None


@still("says whether its devices are set up", library="tensorflow", door=REPLICAS)
def test_tensorflow_has_started(monkeypatch):
    tf.constant(1)
    assert keras_replicas.tensorflow_has_started()
    context = SimpleNamespace(_context_handle=None)
    monkeypatch.setattr(keras_replicas, "_context", SimpleNamespace(context=lambda: context))
    assert not keras_replicas.tensorflow_has_started()


@still("has these options of the coordination service", library="tensorflow", door=REPLICAS)
def test_coordination_options(monkeypatch):
    context = keras_replicas._context.context()
    before = context.coordination_service
    with keras_replicas.coordination_options(heartbeat_timeout_in_ms=7, cluster_register_timeout_in_ms=11):
        context.configure_coordination_service(service_type="standalone", service_leader="/job:worker/task:0")
    found = context.coordination_service
    monkeypatch.setattr(context, "_coordination_service_config", before)
    assert found.heartbeat_timeout_in_ms == 7 and found.cluster_register_timeout_in_ms == 11
    assert "configure_coordination_service" not in vars(context)


@still("begins the keys of a strategy with a number that can be set", library="tensorflow", door=REPLICAS)
def test_fresh_collective_keys():
    bases = []
    for _ in range(2):
        with keras_replicas.fresh_collective_keys(tf.distribute.MirroredStrategy):
            bases.append(tf.distribute.MirroredStrategy(["CPU:0"]).extended._collective_key_base)
    assert tf.distribute.MirroredStrategy._collective_key_base == 0
    with keras_replicas.fresh_collective_keys(tf.distribute.MultiWorkerMirroredStrategy):
        bases.append(tf.distribute.MultiWorkerMirroredStrategy._collective_key_base)
    assert len(set(bases)) == 3 and max(bases) < 2**31

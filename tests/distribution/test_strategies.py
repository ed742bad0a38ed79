"""Under strategies a model ends with the weights that it gets on one device; what cannot work is refused before."""

import contextlib
import functools
import os
import re
import signal
import time
import types
import warnings

import keras
import numpy as np
import pytest

from keras_tx import models, under_strategy
from keras_tx.distribution import mirrored_strategy, multi_worker_strategy
from keras_tx.internals import keras_replicas
from keras_tx.training import PaddedAccuracy, PaddedCrossentropy, Perplexity
from tests.distribution import cases, equal
from tests.distribution.processes import Workers, free_addresses, tf_config

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tensorflow
PROCESS = pytest.mark.process
# With KERAS_TX_TEST_ALL_CASES=1 every case is trained under every strategy, which takes minutes.
ALL = os.environ.get("KERAS_TX_TEST_ALL_CASES") == "1"
ON_DEVICES = "text_classifier masked_lm causal_lm seq2seq checkpoint functional float16".split()
ON_WORKERS = ["functional"]


def chosen(names):
    return list(cases.CASES) if ALL else names


@functools.cache
def on_one_device(name):
    return cases.train(name)[0]


@functools.cache
def untrained(name):
    return cases.built(name).get_weights()


def assert_equal_weights(path, name):
    with np.load(path) as weights:
        found = [weights[one] for one in weights.files]
    expected = on_one_device(name)
    assert any(np.abs(one - two).max() > 0.01 for one, two in zip(expected, untrained(name), strict=True))
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=cases.CASES[name].atol, rtol=0)


# Equal weights.


def train(strategy, name, path):
    weights, _ = cases.train(name, strategy)
    np.savez(path, *weights)
    return strategy.num_replicas_in_sync


def train_in_worker(strategy, name, paths):
    return train(strategy, name, paths[strategy.cluster_resolver.task_id])


@PROCESS
@pytest.mark.parametrize("name", chosen(ON_DEVICES))
def test_two_devices_end_with_the_weights_of_one(name, devices, tmp_path):
    assert devices(train, name=name, path=f"{tmp_path}/weights.npz") == 2
    assert_equal_weights(f"{tmp_path}/weights.npz", name)


@PROCESS
@pytest.mark.parametrize("name", chosen(["small"]))
def test_four_devices_end_with_the_weights_of_one(name, devices, tmp_path):
    assert devices(train, replicas=4, name=name, path=f"{tmp_path}/weights.npz") == 4
    assert_equal_weights(f"{tmp_path}/weights.npz", name)


@PROCESS
@pytest.mark.parametrize("name", chosen(ON_WORKERS))
def test_two_workers_end_with_the_weights_of_one_device(name, workers, tmp_path):
    paths = [f"{tmp_path}/{i}.npz" for i in range(2)]
    assert workers(train_in_worker, name=name, paths=paths) == [2, 2]
    for path in paths:
        assert_equal_weights(path, name)


@PROCESS
@pytest.mark.parametrize("name", equal.CASES if ALL else ["chunks"])
def test_two_workers_with_unequal_numbers_of_tokens_end_as_one_device(name, workers):
    for found in workers(equal.run, name=name):
        equal.assert_equal(found, equal.on_one_device(name), name)


@PROCESS
@pytest.mark.skipif(not ALL, reason="takes minutes; KERAS_TX_TEST_ALL_CASES=1 runs it")
def test_three_workers_end_with_the_weights_of_one_device(tmp_path):
    workers = Workers(3)
    for name in cases.CASES:
        paths = [f"{tmp_path}/{name}-{i}.npz" for i in range(3)]
        assert workers(train_in_worker, name=name, paths=paths) == [3, 3, 3]
        for path in paths:
            assert_equal_weights(path, name)
    workers.stop()


# What a model says of data: uneven batches, the results of evaluate and predict.

ROWS = 33  # with batches of 8, one row is left for the last


def evaluated(strategy, name="small", eager=False):
    """The results of `evaluate` and the sums of the rows of predictions for 33 rows."""
    model = cases.built(name, strategy, metrics=lambda: [PaddedAccuracy(), Perplexity()], run_eagerly=eager)
    x, y = (one[:ROWS] for one in cases.CASES[name].data())
    results = model.evaluate(x, y, batch_size=8, verbose=0)
    outputs = model.predict(x, batch_size=8, verbose=0)
    batch = model.predict_on_batch(x[:8])
    return results, outputs.sum((1, 2)).tolist(), batch.sum((1, 2)).tolist()


@functools.cache
def evaluated_on_one_device():
    return evaluated(None, eager=True)


def assert_evaluated(found):
    for one, two in zip(found, evaluated_on_one_device(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


@PROCESS
def test_two_devices_evaluate_and_predict_as_one(devices):
    assert_evaluated(devices(evaluated))


@PROCESS
def test_two_workers_evaluate_and_predict_as_one_device(workers):
    for found in workers(evaluated):
        assert_evaluated(found)


def on_batches(strategy, reduction, eager=False):
    """Losses, accuracies, predictions and the sum of the weights after steps on single batches with unlike padding."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = cases.small()
        loss = PaddedCrossentropy(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=[PaddedAccuracy()], run_eagerly=eager)
    x, y = (one[:7] for one in cases.tokens())
    y = y * (np.arange(7) < np.array([5, 1, 2, 3, 4, 5, 1])[:, None])
    weights = (np.arange(7) / 3).astype("float32")
    found = [model.test_on_batch(x, y), *(model.train_on_batch(x, y, weights) for _ in range(2))]
    if reduction == "mean":
        found.append(model.train_on_batch(x[:1], y[:1]))
    elif strategy is not None:  # its replicas cannot share a row
        rule = r"`x`, `y` and `sample_weight` must have at least 2 rows, one for each .* Received: .* \(1, 7\)"
        with pytest.raises(ValueError, match=rule):
            model.train_on_batch(x[:1], y[:1])
    found.append(model.predict_on_batch(x).sum((1, 2)).tolist())
    return [*found, float(sum(np.abs(w).sum() for w in model.get_weights()))]


@PROCESS
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_single_batches_on_two_devices_are_as_on_one(devices, reduction):
    found, expected = devices(on_batches, reduction=reduction), on_batches(None, reduction, eager=True)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def a_mean_and_a_sum_on_batches(strategy):
    """The losses, of each output too, and the weights after batches of other sizes, some of which replicas retrace."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = equal.two_outputs()
        losses = [cases.sparse(), keras.losses.MeanSquaredError(reduction="sum")]
        model.compile(keras.optimizers.SGD(0.01), losses)
    x, y = equal.whole_and_half()
    found = [model.train_on_batch(x[:rows], [one[:rows] for one in y]) for rows in (5, 4, 7)]
    return [*found, *(weight.tolist() for weight in model.get_weights())]


@PROCESS
def test_single_batches_of_other_sizes_with_a_mean_and_a_sum_are_as_on_one_device(devices):
    found, expected = devices(a_mean_and_a_sum_on_batches, replicas=3), a_mean_and_a_sum_on_batches(None)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def plain_on_batches(strategy):
    """As `on_batches`, of a model and a loss of Keras, whose rows two replicas cannot share evenly."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((4, 1)), keras.layers.Conv1D(3, 2), keras.layers.MaxPooling1D(2), keras.layers.LSTM(5)]
        model = keras.Sequential([*layers, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    x = np.random.default_rng(5).normal(size=(3, 4, 1)).astype("float32")
    found = [model.test_on_batch(x, x[:, 0]), *(model.train_on_batch(x[:n], x[:n, 0]) for n in (3, 1))]
    return [*found, model.predict_on_batch(x[:1]).tolist(), float(sum(np.abs(w).sum() for w in model.get_weights()))]


@PROCESS
def test_single_batches_of_keras_models_are_as_on_one_device_too(devices):
    for one, two in zip(devices(plain_on_batches), plain_on_batches(None), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4)


def fit_uneven(strategy):
    """The weights' sums after a first batch of three rows, and after batches whose last leaves a replica none."""
    sums, model = [], cases.built("causal_lm", strategy)
    for rows in (3, ROWS):
        x, y = (one[:rows] for one in cases.tokens())
        model.fit(x, y, batch_size=8, verbose=0)
        sums.append(float(sum(np.abs(w).sum() for w in model.get_weights())))
    return sums


@PROCESS
def test_a_replica_without_rows_gives_no_nan(devices):
    assert np.isfinite(devices(fit_uneven)).all()


def normalize_uneven(strategy, rows):
    """The weights, and the moving averages of a normalization in each replica, after two batches; the last has a row.

    Keras keeps such averages by themselves in each replica, and saves those of the first.
    """
    with strategy.scope():
        norm = keras.layers.BatchNormalization(momentum=0.6)
        model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.array(rows, "float32")
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0)
    averages = [strategy.experimental_local_results(one.value) for one in (norm.moving_mean, norm.moving_variance)]
    return keras.tree.map_structure(lambda one: np.asarray(one).tolist(), [model.get_weights(), *averages])


@PROCESS
def test_a_replica_without_rows_keeps_the_averages_of_a_normalization(devices):
    x = np.random.default_rng(5).normal(2.0, 3.0, (9, 3)).astype("float32")
    weights, means, variances = devices(normalize_uneven, rows=x.tolist())
    assert all(np.isfinite(one).all() for one in weights)
    for (first, second), of_rows, begun in ((means, np.mean, 0.0), (variances, np.var, 1.0)):
        of_first, of_second = (0.6 * begun + 0.4 * of_rows(half, axis=0) for half in (x[:4], x[4:8]))
        np.testing.assert_allclose(first, 0.6 * of_first + 0.4 * of_rows(x[8:], axis=0), rtol=1e-5)
        np.testing.assert_allclose(second, of_second, rtol=1e-5)


def fit_generator(strategy):
    """How many batches of a generator `fit` trains on."""
    model, seen = cases.built("small", strategy), []
    batches = (tuple(one[i : i + 8] for one in cases.tokens()) for i in range(0, 40, 8))
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: seen.append(batch))
    with warnings.catch_warnings(action="ignore"):
        model.fit(batches, verbose=0, callbacks=[count])
    return len(seen)


@PROCESS
def test_no_batch_of_a_generator_is_lost(devices):
    assert devices(fit_generator) == 5


def test_a_stock_strategy_is_enough_for_the_models_of_keras_tx(monkeypatch):
    guarded = []
    monkeypatch.setattr(under_strategy, "guard_training", lambda: guarded.append(True))
    model = cases.built("causal_lm", tf.distribute.OneDeviceStrategy("CPU:0"), run_eagerly=True)
    model.fit(*(one[:8] for one in cases.tokens()), verbose=0)
    assert guarded


def callbacks_in(strategy):
    """The batches of which callbacks hear with `steps_per_execution`, and the loss of the epoch."""
    model, seen = cases.built("small", strategy, steps_per_execution=2), []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: seen.append(batch))
    history = model.fit(*cases.tokens(), batch_size=8, shuffle=False, verbose=0, callbacks=[count])
    return seen, history.history["loss"]


@PROCESS
def test_callbacks_are_called_once_for_steps_per_execution(devices):
    (seen, loss), (expected_seen, expected_loss) = devices(callbacks_in), callbacks_in(None)
    assert seen == expected_seen
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)


def of_constant_size(strategy, is_known=False):
    """What `evaluate` and `fit` of a model of Keras return for batches of a constant size."""
    x = np.random.default_rng(5).normal(size=(20, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4, drop_remainder=True)
    dataset = dataset if is_known else dataset.filter(lambda *_: True)
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    found = [model.evaluate(dataset, verbose=0)]
    found += model.fit(dataset, epochs=2, verbose=0, shuffle=False).history.values()
    return [*np.hstack(found).tolist(), int(model.optimizer.iterations.numpy())]


@PROCESS
def test_nothing_runs_after_the_end_of_data_of_unknown_size(devices):
    np.testing.assert_allclose(devices(of_constant_size), of_constant_size(None, is_known=True), rtol=1e-5)


# What is refused.


def fit_with(strategy, batch_size=8, kind="arrays", labels=0, **compile):
    model = cases.built("causal_lm", strategy, **compile)
    x, y = cases.tokens()
    y = np.where(y == 0, 0, y + labels)
    if kind == "dataset":
        return model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size), verbose=0)
    return model.fit(x, y, batch_size=batch_size, verbose=0)


@PROCESS
def test_xla_is_refused_for_several_replicas(devices):
    expected = "`jit_compile` must be False or 'auto' under a strategy.*Received: jit_compile=True, 2 replicas"
    with pytest.raises(ValueError, match=expected):
        devices(fit_with, jit_compile=True)


@PROCESS
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_a_batch_smaller_than_the_number_of_replicas_is_refused(kind, devices):
    expected = "The batch size must be at least the number of replicas, 4.*Received: batches of 3"
    with pytest.raises(ValueError, match=expected):
        devices(fit_with, replicas=4, batch_size=3, kind=kind)


@PROCESS
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_wrong_labels_are_named_as_on_one_device(kind, devices):
    with pytest.raises(ValueError, match=re.escape("The labels must be in [0, 13) or the `padding_id` 0. Received:")):
        devices(fit_with, labels=9, kind=kind)


def fit_with_a_part_from_outside(strategy, outside):
    def scope(*parts):
        return strategy.scope() if outside not in parts else contextlib.nullcontext()

    with scope("layers", "model", "all"):
        layers = cases.small()
    with scope("model", "all"):
        model = keras.Model(layers.inputs, layers.outputs)
    with scope("optimizer", "all"):
        optimizer = keras.optimizers.SGD()
    with scope("metric", "all"):
        metrics = [Perplexity()]
    with scope("all"):
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer), PaddedCrossentropy(), metrics=metrics)
    with strategy.scope() if outside == "all" else contextlib.nullcontext():
        model.fit(*cases.tokens(), verbose=0)


@PROCESS
@pytest.mark.parametrize("outside", ["model", "layers", "optimizer", "metric", "all"])
def test_what_was_made_outside_of_the_scope_is_refused(outside, devices):
    part = outside if outside in ("optimizer", "metric") else "model"
    with pytest.raises(ValueError, match=f"The {part} was made outside of the scope of the strategy: .* inside `with"):
        devices(fit_with_a_part_from_outside, outside=outside)


def fit_alone(strategy, case="small"):
    model = cases.built(case, run_eagerly=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(*(one[:8] for one in cases.tokens()), verbose=0)
    return [str(one.message) for one in told]


@PROCESS
def test_a_model_that_trains_alone_is_told_about(devices, workers):
    expected = "`fit` trains the model '.*' in this process alone, because it was made outside of the scope"
    for case in ("small", "causal_lm"):  # a model of Keras, and one that checks its data before
        assert len([text for text in devices(fit_alone, case=case) if re.search(expected, text)]) == 1
    with pytest.raises(ValueError, match=expected):
        workers(fit_alone)


def test_keras_distribution_is_refused_on_tensorflow():
    model = cases.causal()
    model.compile("sgd", PaddedCrossentropy())
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.raises(ValueError, match="`keras.distribution` does nothing on the TensorFlow backend. Use"):
            model.fit(*cases.tokens())
    finally:
        keras.distribution.set_distribution(None)


def test_parameter_servers_are_refused(monkeypatch):
    model = cases.causal()
    model.compile("sgd", PaddedCrossentropy())
    servers = tf.distribute.ParameterServerStrategy.__new__(tf.distribute.ParameterServerStrategy)
    monkeypatch.setattr(keras_replicas, "strategy_of", lambda _: servers)
    with pytest.raises(ValueError, match="`ParameterServerStrategy` is not supported: use"):
        model.fit(*cases.tokens())


@pytest.mark.parametrize("strategy", [mirrored_strategy, multi_worker_strategy])
def test_another_backend_is_refused(strategy, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="needs the TensorFlow backend. On JAX use `keras.distribution.*='jax'"):
        strategy()


@pytest.mark.parametrize("wrong", [["CPU:9"], ["CPU:0", "/device:cpu:0"], [], "CPU:0", ["XPU:0"], [0]])
def test_devices_that_do_not_exist_or_come_twice_are_refused(wrong):
    with pytest.raises(ValueError, match=re.escape("`devices` must be names from ['CPU:0'")):
        mirrored_strategy(wrong)


def test_one_machine_of_several_is_told_about(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(["a:1", "b:2"], 0))
    with pytest.warns(UserWarning, match="ignores TF_CONFIG, .*: use `multi_worker_strategy`"):
        mirrored_strategy()


def test_workers_are_refused_when_tensorflow_has_started(monkeypatch):
    tf.constant(1)
    monkeypatch.setenv("TF_CONFIG", tf_config(free_addresses(2), 0))
    with pytest.raises(RuntimeError, match="`multi_worker_strategy` must be called before anything else uses Tensor"):
        multi_worker_strategy()
    with pytest.raises(ValueError, match="The argument `timeout` must be a positive finite number"):
        multi_worker_strategy(timeout=0)


def test_a_worker_that_does_not_come_is_named_in_time(monkeypatch):
    addresses = free_addresses(2)
    monkeypatch.setenv("TF_CONFIG", tf_config(addresses, 0))
    monkeypatch.setattr(keras_replicas, "tensorflow_has_started", lambda: False)
    expected = re.escape(f"worker 1 ({addresses[1]}) could not be reached within 0.1 seconds")
    with pytest.raises(TimeoutError, match=expected):
        multi_worker_strategy(timeout=0.1)


def test_a_cluster_resolver_is_checked():
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["a:1", "b:2"]}), task_type="worker", task_id=2
    )
    with pytest.raises(ValueError, match=re.escape("The task index in `cluster_resolver` must be in [0, 2)")):
        multi_worker_strategy(cluster_resolver=resolver)


def test_who_is_lost_is_read_from_the_error(monkeypatch):
    monkeypatch.setattr(keras_replicas, "is_multi_worker", lambda _: True)
    cluster = tf.train.ClusterSpec({"worker": ["a:1", "b:2", "c:3"]})
    for own, kind, text, name in (
        (0, tf.errors.UnavailableError, "remote target /job:worker/replica:0/task:2 failed", "worker 2 (c:3)"),
        (1, tf.errors.UnavailableError, "/job:worker/task:1: from /job:worker/task:2", "worker 2 (c:3)"),
        (1, tf.errors.DeadlineExceededError, "RPC: /tensorflow.CoordinationService/Heartbeat", "worker 0 (a:1)"),
        (0, tf.errors.AbortedError, "aborted", "another worker"),
    ):
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=own)
        lost = under_strategy._lost_worker(types.SimpleNamespace(cluster_resolver=resolver), kind(None, None, text))
        assert isinstance(lost, ConnectionError) and f"The connection to {name} was lost" in str(lost)
    assert under_strategy._lost_worker(None, tf.errors.InvalidArgumentError(None, None, "")) is None


# The end of a worker. This test is the last, because it ends the workers.


def train_until_killed(strategy, victim, pids):
    if pids is None:
        return os.getpid()

    def on_batch_end(batch, logs=None):
        if batch == 5 and strategy.cluster_resolver.task_id == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    model = cases.built("small", strategy)
    data = tf.data.Dataset.from_tensor_slices(cases.tokens()).batch(8).repeat()
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)]
    model.fit(data, steps_per_epoch=10**6, verbose=0, callbacks=callbacks)


@PROCESS
def test_the_others_name_a_worker_that_was_killed(workers):
    for process in workers.processes:
        process.ask(train_until_killed, victim=0, pids=[])
    start = time.monotonic()
    expected = re.escape(f"The connection to worker 0 ({workers.addresses[0]}) was lost, so the training has ended")
    with pytest.raises(ConnectionError, match=expected):
        workers.processes[1].answer()
    assert time.monotonic() - start < 60


# Without a strategy, on a device that is not the first.


def generated_on(strategy, names):
    found = []
    for name in names:
        keras.utils.set_random_seed(7)
        with tf.device(name):
            model = models.CausalLM(23, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=12)
            found.append(model.generate([[5, 7, 11], [3]], max_new_tokens=4))
    return found


@PROCESS
def test_a_model_generates_on_the_device_that_it_is_on(devices):
    """XLA refuses weights that are on another device, and another thread compiles the prefill."""
    first, second = devices(generated_on, names=["CPU:0", "CPU:1"])
    assert first == second

"""The same objective on several devices: unequal numbers of tokens and of examples, and batches that do not divide.

What is trained is in `tests.distribution.equal`. With KERAS_TX_TEST_ALL_CASES=1 all cases are trained on 2 and on 4
replicas, which takes minutes.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.distribution import equal

ALL = os.environ.get("KERAS_TX_TEST_ALL_CASES") == "1"
ON_DEVICES = [
    ("sample_weight", 2),
    ("keras_loss_with_weights", 2),
    ("two_outputs", 2),
    ("accumulation_and_clipping", 2),
    ("chunks", 2),
]
ON_JAX = ["keras_loss_with_weights", "accumulation"]
RUN = "import sys; from tests.distribution import test_objectives; test_objectives.{}(*sys.argv[1:])"


@pytest.mark.tensorflow
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "replicas"), [(name, n) for name in equal.CASES for n in (2, 4)] if ALL else ON_DEVICES
)
def test_replicas_end_with_the_weights_losses_and_outputs_of_one_device(devices, name, replicas):
    equal.assert_equal(devices(equal.run, replicas=replicas, name=name), equal.train(name), name)


def run(command, **environment):
    """What a process prints as JSON in its last line."""
    process = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.tensorflow
@pytest.mark.process
def test_devices_of_jax_share_batches_that_do_not_divide():
    pytest.importorskip("jax")
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    names = list(equal.CASES) if ALL else ON_JAX
    command = [sys.executable, "-W", "ignore", "-c", RUN.format("on_jax"), *names]
    for name, (found, expected) in run(command, KERAS_BACKEND="jax", XLA_FLAGS=flags).items():
        equal.assert_equal(found, expected, name)


def on_jax(*names):
    import keras

    found = {}
    for name in names:
        keras.distribution.set_distribution(None)
        expected = equal.train(name)
        devices = [f"cpu:{i}" for i in range(4)]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        found[name] = equal.train(name), expected
    model = equal.built("sample_weight")
    x, y, _ = equal.weighted()
    rows = model.predict_on_batch(x[:5])
    np.testing.assert_allclose(rows, model.predict(x[:5], verbose=0), atol=1e-6)
    whole = model.evaluate(x[:5], y[:5], verbose=0)
    np.testing.assert_allclose(model.test_on_batch(x[:5], y[:5]), whole, rtol=1e-5)
    print(json.dumps(found))

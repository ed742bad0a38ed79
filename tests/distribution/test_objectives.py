"""The same objective on several devices: unequal numbers of tokens and of examples, and batches that do not divide.

What is trained is in `tests.distribution.equal`; on JAX `test_jax_devices` trains it. With KERAS_TX_TEST_ALL_CASES=1
all cases are trained on 2 and on 4 replicas, which takes minutes.
"""

import os

import pytest

from tests.distribution import equal

ALL = os.environ.get("KERAS_TX_TEST_ALL_CASES") == "1"
ON_DEVICES = [
    ("sample_weight", 2),
    ("keras_loss_with_weights", 2),
    ("two_outputs", 2),
    ("ignored_tokens", 2),
    ("chunks", 2),  # and accumulation, and clipping
]


@pytest.mark.tensorflow
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "replicas"), [(name, n) for name in equal.CASES for n in (2, 4)] if ALL else ON_DEVICES
)
def test_replicas_end_with_the_weights_losses_and_outputs_of_one_device(devices, name, replicas):
    equal.assert_equal(devices(equal.run, replicas=replicas, name=name), equal.on_one_device(name), name)

import pytest

from tests.distribution.processes import Devices, Workers


@pytest.fixture(scope="module")
def devices():
    """A process with four logical devices, in which `devices(function, replicas=2, ...)` calls `function(strategy)`."""
    devices = Devices()
    yield devices
    devices.stop()


@pytest.fixture(scope="module")
def workers():
    """Two workers of a cluster, in which `workers(function, ...)` calls `function(strategy, ...)`."""
    workers = Workers(2)
    yield workers
    workers.stop()

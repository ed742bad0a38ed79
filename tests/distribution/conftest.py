import pytest

from tests.distribution.processes import Devices, Workers


@pytest.fixture(scope="session")
def devices():
    """A process with four logical devices, in which `devices(function, replicas=2, ...)` calls `function(strategy)`."""
    devices = Devices()
    yield devices
    devices.stop()


@pytest.fixture(scope="session")
def clusters():
    clusters = []
    yield clusters
    for workers in clusters:
        workers.stop()


@pytest.fixture(scope="module")
def workers(clusters):
    """Two workers of a cluster, in which `workers(function, ...)` calls `function(strategy, ...)`.

    All files share them, until a test ends one of them.
    """
    if not clusters or not clusters[-1].are_alive():
        clusters.append(Workers(2))
    return clusters[-1]

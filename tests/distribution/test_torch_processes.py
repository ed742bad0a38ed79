"""Two processes of PyTorch that average their gradients train as one, with `DistributedDataParallel` and without."""

import pytest

from tests.distribution import children

pytestmark = [pytest.mark.process, pytest.mark.tensorflow]


@pytest.fixture(scope="module")
def reports():
    return children.run("torch_pair", backend="torch", processes=2)


@pytest.mark.parametrize("way", ["wrapped", "plain"])
@pytest.mark.parametrize("tokens", ["equal", "unequal"])
def test_weights_equal_those_of_one_process(reports, tokens, way):
    for found in reports:
        assert found[f"{tokens}, {way}"] < 2e-6

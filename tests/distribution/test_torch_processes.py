"""Two processes of PyTorch that average their gradients train as one, with `DistributedDataParallel` and without."""

import numpy as np
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


def test_processes_share_the_mean_over_all_tokens(reports):
    """Two processes with 6 and 10 rows and DistributedDataParallel, and one with all rows."""
    for report in reports:
        (found, loss), (expected, loss_of_one) = report["objectives"]
        for one, two in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, two, atol=2e-6, rtol=0)
        np.testing.assert_allclose(loss, loss_of_one, rtol=1e-5)  # in evaluation, of the process itself

"""`NoamSchedule` against equation 3 of the paper in float64."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.training import NoamSchedule
from tests.tools import assert_close, to_numpy


@given(st.integers(0, 10**7), st.integers(1, 4096), st.integers(1, 20000), st.floats(0.01, 10))
def test_rates_are_those_of_the_paper(step, hidden_dim, warmup_steps, scale):
    n = step + 1
    expected = scale * hidden_dim**-0.5 * min(n**-0.5, n * warmup_steps**-1.5)
    assert_close(NoamSchedule(hidden_dim, warmup_steps=warmup_steps, scale=scale)(step), expected, atol=0, rtol=2e-6)


def test_the_highest_rate_is_that_of_the_last_step_of_the_warmup():
    schedule = NoamSchedule(512)
    rates = np.array([to_numpy(schedule(step)) for step in (0, 1999, 3998, 3999, 4000, 15999)])
    assert rates.dtype == "float32"
    assert rates.argmax() == 3
    np.testing.assert_allclose(rates / rates[3], [1 / 4000, 0.5, 3999 / 4000, 1, (4000 / 4001) ** 0.5, 0.5], rtol=2e-6)
    np.testing.assert_allclose(rates[3], 6.987712429686843e-4, rtol=2e-6)  # 512^-0.5 * 4000^-0.5


def test_an_optimizer_follows_it():
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.SGD(NoamSchedule(4, warmup_steps=2))
    optimizer.build([variable])
    for _ in range(3):
        optimizer.apply([keras.ops.ones(1)], [variable])
    assert_close(variable, [-0.5 * (2**-1.5 + 2 * 2**-1.5 + 3**-0.5)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_dim": 0}, "`hidden_dim` must be a positive integer. Received: hidden_dim=0"),
        ({"warmup_steps": 0.5}, "`warmup_steps` must be a positive integer. Received: warmup_steps=0.5"),
        ({"scale": -1.0}, "`scale` must be a positive finite number. Received: scale=-1.0"),
    ],
)
def test_what_is_not_positive_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NoamSchedule(**{"hidden_dim": 8, **arguments})

"""Learning-rate schedules: step -> learning rate."""

from typing import Any

import keras
from keras import ops

from keras_tx import checks
from keras_tx.types import Tensor


@keras.saving.register_keras_serializable(package="keras_tx")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """The schedule of "Attention is all you need": linear warmup, then decay with the inverse square root of the step.

    rate(n) = scale * hidden_dim^-0.5 * min(n^-0.5, n * warmup_steps^-1.5), equation 3 of the paper, counts updates from
    n = 1. Keras counts them from 0, so `schedule(step)` is the rate of n = step + 1: small but not zero at step 0,
    highest at step `warmup_steps - 1`. Computed in float32.

    Args:
        hidden_dim: the hidden size of the model; wider models get lower rates.
        warmup_steps: number of updates until the rate is highest; the default is the paper's.
        scale: a factor for the rate.

    Call arguments:
        step: the number of updates so far, an integer or a scalar tensor. Keras gives schedules the number of
            batches: with `gradient_accumulation_steps=N`, multiply `warmup_steps` by N and `scale` by sqrt(N).

    Returns:
        The learning rate, a float32 scalar.

    Raises:
        ValueError: for an argument that is not positive.

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762, equation 3.

    Examples:
        >>> schedule = keras_tx.training.NoamSchedule(512, warmup_steps=4000)
        >>> for step in (0, 3999, 15999):
        ...     print(f"{float(schedule(step)):.7f}")
        0.0000002
        0.0006988
        0.0003494
        >>> optimizer = keras.optimizers.Adam(schedule, beta_2=0.98, epsilon=1e-9)
    """

    def __init__(self, hidden_dim: int, *, warmup_steps: int = 4000, scale: float = 1.0):
        self.hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        self.warmup_steps = checks.positive_int("warmup_steps", warmup_steps)
        self.scale = checks.positive_float("scale", scale)

    def __call__(self, step: Tensor) -> Tensor:
        n = ops.cast(step, "float32") + 1.0
        return self.scale * self.hidden_dim**-0.5 * ops.minimum(ops.rsqrt(n), n * self.warmup_steps**-1.5)

    def get_config(self) -> dict[str, Any]:
        return {"hidden_dim": self.hidden_dim, "warmup_steps": self.warmup_steps, "scale": self.scale}

"""Learning-rate schedules: the number of the update -> the rate."""

import keras
from keras import ops

from keras_tx import checks


@keras.saving.register_keras_serializable(package="keras_tx")
class NoamSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly for `warmup_steps` updates, then falls with the root of their number.

    rate(n) = scale * hidden_dim^-0.5 * min(n^-0.5, n * warmup_steps^-1.5) is equation 3 of Vaswani et al. 2017,
    arXiv:1706.03762, which counts the updates from n = 1. Keras counts them from 0, so `schedule(step)` is the rate of
    n = step + 1: finite and small at step 0, highest at step `warmup_steps - 1`. Computed in float32.

    Args:
        hidden_dim: the width of the model; wider models get lower rates.
        warmup_steps: updates until the rate is highest.
        scale: multiplies the rate.

    Raises:
        ValueError: for an argument that is not positive.
    """

    def __init__(self, hidden_dim, *, warmup_steps=4000, scale=1.0):
        self.hidden_dim = checks.positive_int("hidden_dim", hidden_dim)
        self.warmup_steps = checks.positive_int("warmup_steps", warmup_steps)
        self.scale = checks.positive_float("scale", scale)

    def __call__(self, step):
        n = ops.cast(step, "float32") + 1.0
        return self.scale * self.hidden_dim**-0.5 * ops.minimum(ops.rsqrt(n), n * self.warmup_steps**-1.5)

    def get_config(self):
        return {"hidden_dim": self.hidden_dim, "warmup_steps": self.warmup_steps, "scale": self.scale}

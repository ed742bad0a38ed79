"""One attention layer with fused kernels, without them, and Keras' own layer: tokens a second.

KERAS_BACKEND=torch python -m benchmarks fused
KERAS_BACKEND=jax python -m benchmarks fused --policy mixed_bfloat16   # on a GPU

Width 512, 8 heads, causal attention; training with stochastic gradient descent, and inference. "keras_tx" chooses by
itself whether it uses a kernel, as it does in a model.
"""

import os
from collections.abc import Callable

os.environ.setdefault("KERAS_BACKEND", "torch")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_tx
from benchmarks import alternating
from benchmarks.encoder import HEADS, WIDTH, sizes

STEPS = 4  # batches in one run


def sides(layer: keras.layers.Layer, size: int, length: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Training and inference, `STEPS` batches each."""
    inputs = keras.Input((length, WIDTH), batch_size=size)
    model = keras.Model(inputs, layer(inputs, inputs, use_causal_mask=True))
    model.compile(keras.optimizers.SGD(1e-4), "mean_squared_error")
    x = keras.ops.convert_to_tensor(np.random.default_rng(7).normal(size=(size, length, WIDTH)).astype("float32"))

    def train() -> None:
        for _ in range(STEPS):
            value = model.train_on_batch(x, x)
        assert np.isfinite(value)

    def infer() -> None:
        for _ in range(STEPS):
            model.predict_on_batch(x)

    return train, infer


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["16x128", "4x512", "1x2048"])
    parser.add_argument("--policy", default="float32", help="dtype policy")
    arguments = parser.parse_args()
    keras.config.set_dtype_policy(arguments.policy)
    for shape in arguments.shapes:
        size, length = sizes(shape)
        layers = {
            alternating.OURS: keras_tx.layers.MultiHeadAttention(HEADS, WIDTH // HEADS),
            "without kernels": keras_tx.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, flash_attention=False),
            "keras.layers": keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS),
        }
        made = {name: sides(layer, size, length) for name, layer in layers.items()}
        alternating.warm_up(made)
        for part, case in enumerate(("training", "inference")):
            runs = {name: side[part] for name, side in made.items()}
            times = alternating.in_turns(runs, arguments.rounds)
            case = f"{case}, {shape}, {arguments.policy}, {keras.backend.backend()}"
            alternating.report(case, times, STEPS * size * length, "tokens", file=arguments.json, steps=STEPS)


if __name__ == "__main__":
    main()

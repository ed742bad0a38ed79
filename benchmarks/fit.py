"""Options of Keras' `compile`: tokens a second of `fit` with the defaults, with XLA, and with 16 steps in a call.

python -m benchmarks fit
python -m benchmarks fit --width 512 --batch 16 --length 128 --rounds 3

A CausalLM of 4 layers and 4 heads over 65 characters, dropout 0.1, AdamW, 32 steps of `fit` on a tf.data.Dataset.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from benchmarks import alternating
from keras_tx import models
from keras_tx.training import PaddedCrossentropy

STEPS, AT_ONCE, VOCABULARY = 32, 16, 65
OPTIONS = {
    alternating.OURS: {},
    "jit_compile=True": {"jit_compile": True},
    f"steps_per_execution={AT_ONCE}": {"steps_per_execution": AT_ONCE},
}


def run(arguments: argparse.Namespace, options: dict):
    """A function that trains `STEPS` steps."""
    ids = np.random.default_rng(7).integers(1, VOCABULARY, (arguments.batch, arguments.length), dtype="int32")
    width = arguments.width
    model = models.CausalLM(VOCABULARY, num_layers=4, hidden_dim=width, num_heads=4, intermediate_dim=4 * width)
    model.compile(keras.optimizers.AdamW(1e-3), PaddedCrossentropy(), **options)
    data = tf.data.Dataset.from_tensors((ids, ids)).repeat(STEPS).prefetch(4)
    return lambda: model.fit(data, shuffle=False, verbose=0)


def main() -> None:
    parser = alternating.parser(__doc__)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=64)
    arguments = parser.parse_args()
    runs = {name: run(arguments, options) for name, options in OPTIONS.items()}
    for function in runs.values():  # compiles
        function()
    case = f"fit, width {arguments.width}, {arguments.batch} x {arguments.length}"
    amount = STEPS * arguments.batch * arguments.length
    alternating.report(case, alternating.in_turns(runs, arguments.rounds), amount, "tokens", file=arguments.json)


if __name__ == "__main__":
    main()

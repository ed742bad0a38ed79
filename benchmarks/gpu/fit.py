"""`model.fit` of the four models: whether the loss falls, and how long a step takes.

KERAS_BACKEND=jax python -m benchmarks.gpu.fit --policies mixed_bfloat16 float32
KERAS_BACKEND=torch python -m benchmarks.gpu.fit --small

The tasks are made up and easy: to find the word that tells the class, to fill in or continue a count, and to copy.
They take a tenth of the vocabulary, which a model learns in a few steps.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from benchmarks import alternating
from keras_tx import models
from keras_tx.training import PaddedCrossentropy

START, MASK, FIRST = 1, 1, 2  # ids; 0 is padding, words begin at FIRST
EPOCHS = 8
FALL = 0.9  # the last epoch's loss is at most this times that of the untrained model


class Size(NamedTuple):
    vocabulary: int
    layers: int
    width: int
    heads: int
    batch: int
    length: int
    steps: int


ON_A_GPU = Size(vocabulary=1000, layers=2, width=512, heads=8, batch=32, length=256, steps=16)
SMALL = Size(vocabulary=50, layers=1, width=32, heads=2, batch=8, length=16, steps=16)
Data = tuple[dict[str, np.ndarray], np.ndarray]  # inputs and labels
Made = tuple[keras.Model, keras.losses.Loss, Data]


def counts(size: Size) -> np.ndarray:
    """(rows, T) ids that count up from a random one. Every other row has padding in its second half."""
    rows = size.batch * size.steps
    starts = np.random.default_rng(7).integers(0, size.vocabulary, (rows, 1))
    ids = FIRST + (starts + np.arange(size.length)) % (size.vocabulary // 10)
    ids[1::2, size.length // 2 :] = 0
    return ids.astype("int32")


def text_classifier(size: Size) -> Made:
    random, shape = np.random.default_rng(7), (size.batch * size.steps, size.length)
    labels = random.integers(0, 2, shape[0])
    ids = FIRST + 2 + random.integers(0, size.vocabulary // 10, shape)
    ids[:, ::4] = FIRST + labels[:, None]
    ids[1::2, size.length // 2 :] = 0
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return (
        models.TextClassifier(size.vocabulary, 2, **options(size)),
        loss,
        ({"token_ids": ids.astype("int32")}, labels),
    )


def masked_lm(size: Size) -> Made:
    ids = counts(size)
    hidden = (np.random.default_rng(8).random(ids.shape) < 0.15) & (ids > 0)
    data = {"token_ids": np.where(hidden, MASK, ids).astype("int32")}, np.where(hidden, ids, 0).astype("int32")
    return models.MaskedLM(size.vocabulary, **options(size)), PaddedCrossentropy(), data


def causal_lm(size: Size) -> Made:
    ids = counts(size)
    data = {"token_ids": ids[:, :-1]}, ids[:, 1:]
    return models.CausalLM(size.vocabulary, **options(size)), PaddedCrossentropy(), data


def seq2seq(size: Size) -> Made:
    ids = counts(size)
    targets = np.concatenate([np.full_like(ids[:, :1], START), ids[:, :-1]], axis=1)
    model = models.Seq2Seq(size.vocabulary, **options(size))
    return model, PaddedCrossentropy(), ({"source_ids": ids, "target_ids": targets}, ids)


MODELS: dict[str, Callable[[Size], Made]] = {
    "TextClassifier": text_classifier,
    "MaskedLM": masked_lm,
    "CausalLM": causal_lm,
    "Seq2Seq": seq2seq,
}


def options(size: Size) -> dict[str, Any]:
    """Without dropout, with which attention on JAX takes no kernel in training."""
    return {"num_layers": size.layers, "hidden_dim": size.width, "num_heads": size.heads, "dropout": 0.0}


class Clock(keras.callbacks.Callback):
    """`seconds` of each epoch."""

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds.append(time.perf_counter() - self._started)


def row(name: str, size: Size) -> dict[str, Any]:
    """Trains the model `name`; the losses before and of the epochs, seconds of the first, and of a step later on."""
    keras.utils.set_random_seed(7)
    model, loss, (inputs, labels) = MODELS[name](size)
    model.compile(keras.optimizers.Adam(3e-4), loss)
    before = model.evaluate(inputs, labels, batch_size=size.batch, verbose=0)
    clock = Clock()
    history = model.fit(inputs, labels, batch_size=size.batch, epochs=EPOCHS, verbose=0, callbacks=[clock])
    losses = [before, *history.history["loss"]]
    ok = bool(np.all(np.isfinite(losses)) and losses[-1] <= FALL * losses[0])
    return {"losses": losses, "first": clock.seconds[0], "step": min(clock.seconds[1:]) / size.steps, "ok": ok}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file that gets a JSON line for each model")
    parser.add_argument("--small", action="store_true", help="small sizes, for a machine without a GPU")
    parser.add_argument("--policies", nargs="+", default=["mixed_bfloat16"], help="dtype policies")
    arguments = parser.parse_args()
    failed = []
    for policy in arguments.policies:
        keras.config.set_dtype_policy(policy)
        for name in MODELS:
            title = f"{name}, {policy}"
            try:
                made = row(name, SMALL if arguments.small else ON_A_GPU)
            except Exception as problem:  # the other models are still worth having
                print(f"{title:32} FAILED  {type(problem).__name__}: {problem}", flush=True)
                failed.append(title)
                continue
            failed += [] if made["ok"] else [title]
            one = {"kind": "fit", "case": name, "policy": policy, "backend": keras.backend.backend(), **made}
            alternating.write(arguments.json, one)
            losses = " ".join(f"{loss:.3f}" for loss in made["losses"])
            result = "" if made["ok"] else "  FAILED: the loss does not fall"
            print(f"{title:32} losses {losses}  {1000 * made['step']:.1f} ms a step{result}", flush=True)
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "the loss of every model falls")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

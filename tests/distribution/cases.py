"""What is trained under strategies and on one device, to end with the same weights: `CASES`, and `train`.

The tests add a case here, and it is trained by every engine: in the test process on one device, and in the processes of
`tests.distribution.processes` under strategies. The same number of tokens lies on every replica, unless a case says
otherwise.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_tx import models
from keras_tx.pretrained import from_pretrained
from keras_tx.training import Muon, PaddedCrossentropy
from tests.pretrained import tiny

ROWS, BATCH, VOCABULARY = 48, 12, 13  # batches that 2, 3 and 4 replicas share evenly
SIZES = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "intermediate_dim": 12, "dropout": 0.0}


def ids(seed, length=5, padding=2):
    """(ROWS, length + padding) random ids, each row with `length` real tokens."""
    real = np.random.default_rng(seed).integers(1, VOCABULARY, size=(ROWS, length))
    return np.pad(real, ((0, 0), (0, padding))).astype("int32")


def tokens(seed=1):
    return ids(seed), ids(seed + 10)


def classes():
    return ids(1), ids(2)[:, 0] % 3


def pairs():
    return {"source_ids": ids(1), "target_ids": ids(2, 4, 3)}, ids(3, 4, 3)


def masked():
    x, labels = tokens()
    return x, np.where(np.arange(7) % 2, labels, 0)


def of_a_checkpoint():
    x, y = tokens()
    return {"input_ids": x}, {"logits": y}


def causal(**options):
    return models.CausalLM(VOCABULARY, **{**SIZES, **options})


def seq2seq(**options):
    return models.Seq2Seq(VOCABULARY, **{**SIZES, **options})


def classifier(**options):
    return models.TextClassifier(VOCABULARY, 3, **{**SIZES, **options})


def of_a_user():
    """A functional model without a layer of keras_tx, with a regularizer and two inputs."""
    inputs = [keras.Input((None,), dtype="int32", name="ids"), keras.Input((3,), name="numbers")]
    x = keras.layers.GRU(5)(keras.layers.Embedding(VOCABULARY, 6, mask_zero=True)(inputs[0]))
    x = keras.layers.concatenate([x, keras.layers.Dense(4, kernel_regularizer="l2")(inputs[1])])
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def numbers():
    generator = np.random.default_rng(5)
    return [ids(1), generator.normal(size=(ROWS, 3)).astype("float32")], generator.normal(size=(ROWS, 1))


def sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def scaled():
    return keras.optimizers.LossScaleOptimizer(sgd())


def padded(**options):
    return lambda: PaddedCrossentropy(**options)


def by_name():
    return {"logits": PaddedCrossentropy()}


def sparse():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Case(NamedTuple):
    """A model that is trained for 20 updates.

    `model`, `optimizer` and `loss` are called in the scope of the strategy; `data()` are arrays for `fit`, or a data
    set of batches; `compile` are further arguments. Weights may be `atol` off those from one device.
    """

    model: Callable[[], keras.Model]
    data: Callable[[], Any] = tokens
    optimizer: Callable[[], Any] = sgd
    loss: Callable[[], Any] = padded()
    compile: dict[str, Any] = {}
    atol: float = 2e-6


def small(dtype=None):
    """A model with a matrix, a table and a vector, for optimizers."""
    x = keras.Input((7,), dtype="int32")
    vectors = keras.layers.Embedding(VOCABULARY, 6, dtype=dtype)(x)
    return keras.Model(x, keras.layers.Dense(VOCABULARY, dtype=dtype)(vectors))


CASES = {
    "text_classifier": Case(lambda: classifier(encoder_options={"skip_padding": True}), classes, loss=sparse),
    "masked_lm": Case(lambda: models.MaskedLM(VOCABULARY, **SIZES), masked),
    "causal_lm": Case(causal, loss=padded(chunk_size=16), compile={"steps_per_execution": 2}),
    "seq2seq": Case(seq2seq, pairs),
    "checkpoint": Case(lambda: from_pretrained(tiny.checkpoint("llama")), of_a_checkpoint, loss=by_name),
    "functional": Case(
        of_a_user,
        numbers,
        optimizer=lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
        loss=keras.losses.MeanSquaredError,
    ),
    "remat": Case(lambda: causal(decoder_options={"remat": True})),
    "blockwise": Case(lambda: causal(decoder_options={"attention_options": {"blockwise": True}})),
    "float16": Case(lambda: small("mixed_float16"), optimizer=scaled, atol=2e-4),
    "float16_model": Case(lambda: causal(dtype="mixed_float16"), atol=2e-4),
    "bfloat16": Case(lambda: causal(dtype="mixed_bfloat16"), atol=2e-3),
    "small": Case(small),
    "adam": Case(small, optimizer=lambda: keras.optimizers.Adam(0.001), atol=1e-4),
    "adamw": Case(small, optimizer=lambda: keras.optimizers.AdamW(0.001), atol=1e-4),
    "muon": Case(small, optimizer=lambda: Muon(0.001), atol=1e-4),
    "ema": Case(small, optimizer=lambda: sgd(use_ema=True, ema_momentum=0.9)),
    "ema_overwrite": Case(small, optimizer=lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)),
    "eager": Case(small, compile={"run_eagerly": True}),
}


def built(case, strategy=None, metrics=lambda: [], **compile):
    """The compiled model of a case; `metrics()` are its metrics."""
    case = CASES[case]
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = case.model()
        model.compile(case.optimizer(), case.loss(), metrics=metrics(), **{**case.compile, **compile})
    return model


def train(name, strategy=None, **compile):
    """The weights of a case after 20 updates, and its model."""
    data = CASES[name].data()
    model = built(name, strategy, **compile)
    if isinstance(data, tf.data.Dataset):
        model.fit(data, epochs=5, verbose=0)
    else:
        model.fit(*data, batch_size=BATCH, epochs=5, shuffle=False, verbose=0)
    return model.get_weights(), model

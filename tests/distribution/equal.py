"""Models that are trained on one device and on several, with unequal numbers of tokens: `CASES`, `train`, `run`.

Rows have from 0 to 7 real tokens, and the last batch is not full, so that replicas have different numbers of tokens and
of examples.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_tx import data, models
from keras_tx.models.checked_data import CheckedModel
from keras_tx.pretrained import from_pretrained
from keras_tx.training import Muon, PaddedAccuracy, PaddedCrossentropy, Perplexity
from tests.pretrained import tiny

try:
    import tensorflow as tf
except ImportError:  # on JAX, where it is only needed for data sets
    tf = None

ROWS, LENGTH, BATCH, VOCABULARY = 37, 7, 8, 13  # 5 batches in an epoch, the last with 5 rows
SIZES = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "intermediate_dim": 12, "dropout": 0.0}
LENGTHS = np.concatenate([[7, 7, 7, 7, 1, 1, 0, 0], np.random.default_rng(3).integers(1, 8, ROWS - 8)])


def ids(seed):
    values = np.random.default_rng(seed).integers(1, VOCABULARY, size=(ROWS, LENGTH))
    return np.where(np.arange(LENGTH) < LENGTHS[:, None], values, 0).astype("int32")


def tokens():
    return ids(1), ids(2)


def weighted():
    """Tokens, and weights some of which are 0."""
    generator = np.random.default_rng(6)
    return *tokens(), (generator.uniform(size=(ROWS, LENGTH)) * generator.integers(0, 2, (ROWS, LENGTH))).astype(
        "float32"
    )


def classes():
    return np.where(np.arange(LENGTH) == 0, 1, ids(1)), np.random.default_rng(4).integers(0, 3, ROWS)


def weighted_classes():
    return *classes(), np.random.default_rng(5).uniform(0, 2, ROWS).astype("float32")


def pairs():
    return {"source_ids": ids(1), "target_ids": ids(2)}, ids(3)


def masked():
    x, labels = tokens()
    return x, np.where(np.arange(LENGTH) % 3 == 1, labels, -100)


def partly_ignored():
    """Token labels, many of which are -1, in some rows all."""
    x, labels = tokens()
    return x, np.where((np.arange(LENGTH) < 1 + LENGTHS[::-1, None]) & (np.arange(ROWS) % 3 > 0)[:, None], -1, labels)


def partly_ignored_classes():
    x, labels = weighted_classes()[:2]
    return x, np.where(np.arange(ROWS) % 8 < 3, -1, labels)


def of_a_checkpoint():
    x, y = tokens()
    return {"input_ids": x}, {"logits": y}


def unpadded():
    x, y = tokens()

    def elements():
        for row, labels, length in zip(x, y, LENGTHS, strict=True):
            if length:
                yield {"token_ids": row[:length]}, labels[:length]

    spec = tf.TensorSpec([None], "int32")
    return tf.data.Dataset.from_generator(elements, output_signature=({"token_ids": spec}, spec))


def bucketed(multiple_of=None):
    # a model with one input takes the array alone; for a dict Keras would warn
    rows = unpadded().map(lambda x, y: (x["token_ids"], y))
    return data.bucket_by_length(rows, BATCH, boundaries=(3, 5), multiple_of=multiple_of)


def bucketed_and_filled():
    return bucketed(4)


def packed():
    return data.pack_sequences(unpadded(), 9).batch(BATCH)


def packed_and_filled():
    return data.pack_sequences(unpadded(), 9, multiple_of=BATCH).batch(BATCH)


def causal(**options):
    return models.CausalLM(VOCABULARY, **{**SIZES, **options})


def classifier():
    return models.TextClassifier(VOCABULARY, 3, **SIZES)


def small():
    """A model of tokens that is compiled in a moment."""
    x = keras.Input((None,), dtype="int32", name="token_ids")
    return CheckedModel(x, keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(VOCABULARY, 6)(x)))


def masking():
    """As `small`, but Keras passes a mask of the tokens to the loss."""
    x = keras.Input((None,), dtype="int32", name="token_ids")
    return CheckedModel(x, keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(VOCABULARY, 6, mask_zero=True)(x)))


def pooling():
    """A classifier that is compiled in a moment."""
    x = keras.Input((None,), dtype="int32", name="token_ids")
    pooled = keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(VOCABULARY, 6)(x))
    return CheckedModel(x, keras.layers.Dense(3)(pooled))


def two_outputs():
    """Classes, and their halves."""
    x = keras.Input((None,), dtype="int32", name="token_ids")
    pooled = keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(VOCABULARY, 6)(x))
    return CheckedModel(x, [keras.layers.Dense(3, name="whole")(pooled), keras.layers.Dense(1, name="half")(pooled)])


def whole_and_half():
    x, y = classes()
    return x, (y, (y / 2).astype("float32")[:, None])


def with_weights_of_halves():
    return *whole_and_half(), (None, np.random.default_rng(5).uniform(0, 2, ROWS).astype("float32"))


def packed_small():
    x = {name: keras.Input((None,), dtype="int32", name=name) for name in ("token_ids", "document_ids", "positions")}
    hidden = keras.layers.Embedding(VOCABULARY, 6)(x["token_ids"]) + keras.layers.Embedding(9, 6)(x["positions"])
    hidden += keras.layers.Embedding(9, 6)(x["document_ids"])
    return CheckedModel(list(x.values()), keras.layers.Dense(VOCABULARY)(hidden))


def sgd(learning_rate=0.1, **options):
    return lambda: keras.optimizers.SGD(learning_rate, **options)


def padded(**options):
    return lambda: PaddedCrossentropy(**options)


def sparse(**options):
    return lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Case(NamedTuple):
    """A model that is trained for 20 updates; see `tests.distribution.cases`.

    `metrics()` are arguments of `compile`; with metrics the model is also evaluated, and predicts.
    """

    model: Callable[[], keras.Model] = small
    data: Callable[[], Any] = tokens
    optimizer: Callable[[], Any] = sgd()
    loss: Callable[[], Any] = padded()
    metrics: Callable[[], dict[str, Any]] = dict
    compile: dict[str, Any] = {}
    epochs: int = 4
    atol: float = 2e-6

    @property
    def evaluates(self):
        """Whether `train` evaluates and predicts too, which takes as long again as training."""
        return bool(self.metrics())


def of_tokens():
    return {"metrics": [PaddedAccuracy(), Perplexity()], "weighted_metrics": [PaddedAccuracy(name="weighted")]}


def of_classes():
    return {
        "metrics": ["accuracy"],
        "weighted_metrics": [keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    }


CASES = {
    # The four models, a checkpoint, and data with batches of their own sizes
    "causal_lm": Case(causal, metrics=of_tokens),
    "chunks": Case(
        causal,
        optimizer=sgd(gradient_accumulation_steps=2, global_clipnorm=0.5),
        loss=padded(chunk_size=11),
    ),
    "masked_lm": Case(lambda: models.MaskedLM(VOCABULARY, **SIZES), masked, loss=padded(padding_id=-100)),
    "seq2seq": Case(lambda: models.Seq2Seq(VOCABULARY, **SIZES), pairs),
    "text_classifier": Case(classifier, weighted_classes, loss=sparse(), metrics=of_classes),
    "checkpoint": Case(
        lambda: from_pretrained(tiny.checkpoint("llama")),
        of_a_checkpoint,
        loss=lambda: {"logits": PaddedCrossentropy()},
    ),
    "packed": Case(lambda: causal(packed=True), packed, metrics=of_tokens, epochs=9),
    # What losses and metrics count
    "tokens": Case(metrics=of_tokens),
    "sample_weight": Case(data=weighted, metrics=of_tokens),
    "mean_with_sample_weight": Case(data=weighted, loss=padded(reduction="mean_with_sample_weight"), metrics=of_tokens),
    "sum": Case(loss=padded(reduction="sum"), optimizer=sgd(0.01)),
    "none": Case(loss=padded(reduction=None), optimizer=sgd(0.01)),
    "keras_loss": Case(pooling, classes, loss=sparse(), metrics=of_classes),
    "keras_loss_with_weights": Case(pooling, weighted_classes, loss=sparse(), metrics=of_classes),
    "keras_mean_with_weights": Case(pooling, weighted_classes, loss=sparse(reduction="mean_with_sample_weight")),
    "keras_loss_with_mask": Case(masking, loss=sparse(), metrics=lambda: {"metrics": ["accuracy"]}),
    "ignored_tokens": Case(data=partly_ignored, loss=sparse(ignore_class=-1)),
    "ignored_classes": Case(pooling, partly_ignored_classes, loss=sparse(ignore_class=-1)),
    "ignored_classes_with_mask": Case(masking, partly_ignored, loss=sparse(ignore_class=-1)),
    "two_outputs": Case(
        two_outputs, with_weights_of_halves, loss=lambda: [sparse()(), keras.losses.MeanSquaredError()]
    ),
    "bucketed": Case(data=bucketed, metrics=of_tokens),
    "bucketed_and_filled": Case(data=bucketed_and_filled, metrics=of_tokens),
    "packed_and_filled": Case(packed_small, packed_and_filled, metrics=of_tokens, epochs=9),
    # Optimizers
    "accumulation": Case(optimizer=sgd(gradient_accumulation_steps=3), epochs=12),
    "accumulation_and_clipping": Case(optimizer=sgd(gradient_accumulation_steps=2, global_clipnorm=0.5)),
    "accumulation_of_sums": Case(optimizer=sgd(0.01, gradient_accumulation_steps=2), loss=padded(reduction="sum")),
    "accumulation_of_examples": Case(pooling, weighted_classes, sgd(gradient_accumulation_steps=2), sparse()),
    "clipnorm": Case(optimizer=sgd(clipnorm=0.1)),
    "global_clipnorm": Case(optimizer=sgd(global_clipnorm=0.2)),
    "clipvalue": Case(optimizer=sgd(clipvalue=0.02)),
    "adam": Case(optimizer=lambda: keras.optimizers.Adam(0.001), atol=1e-4),
    "adamw": Case(optimizer=lambda: keras.optimizers.AdamW(0.001, gradient_accumulation_steps=2), atol=1e-4),
    "muon": Case(optimizer=lambda: Muon(0.001, global_clipnorm=0.5), atol=1e-4),
}
WHOLE_MODELS = ("causal_lm", "chunks", "masked_lm", "seq2seq", "text_classifier", "checkpoint", "packed")


def built(name, strategy=None):
    """The compiled model of a case."""
    case = CASES[name]
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(3)
        model = case.model()
        model.compile(case.optimizer(), case.loss(), **case.metrics(), **case.compile)
    return model


def train(name, strategy=None):
    """The weights after the updates of a case, the history of `fit` with validation, and the outputs of `predict`."""
    case, model = CASES[name], built(name, strategy)
    given = case.data()
    is_dataset = tf is not None and isinstance(given, tf.data.Dataset)
    arguments = {"x": given} if is_dataset else dict(zip(("x", "y", "sample_weight"), given, strict=False))
    size = {} if is_dataset else {"batch_size": BATCH}
    options = {"shuffle": False}
    if case.evaluates:
        options |= {"validation_data": given, "validation_freq": case.epochs}
    history = model.fit(**arguments, **size, **options, epochs=case.epochs, verbose=0)
    if not case.evaluates or (is_dataset and keras.backend.backend() != "tensorflow"):  # lengths differ
        return [weight.tolist() for weight in model.get_weights()], history.history, []
    outputs = keras.tree.flatten(model.predict(arguments["x"], **size, verbose=0))[0]
    outputs = outputs.to_tensor().numpy() if hasattr(outputs, "to_tensor") else outputs  # ragged
    return [weight.tolist() for weight in model.get_weights()], history.history, np.asarray(outputs).tolist()


@functools.cache
def on_one_device(name):
    """`train` for several tests."""
    return train(name)


def run(strategy, name):
    """`train` in a process of `tests.distribution.processes`."""
    return train(name, strategy)


def assert_equal(found, expected, name):
    """Compares what `run` returns on several devices and what `train` returns on one."""
    weights, history, outputs = expected
    begun = built(name).get_weights()
    assert max(np.abs(np.array(one) - two).max() for one, two in zip(weights, begun, strict=True)) > 0.001
    for one, two in zip(found[0], weights, strict=True):
        np.testing.assert_allclose(one, two, atol=CASES[name].atol, rtol=0)
    assert found[1].keys() == history.keys()
    for key, values in history.items():
        np.testing.assert_allclose(found[1][key], values, rtol=1e-5, atol=1e-6, err_msg=key)
    np.testing.assert_allclose(found[2], outputs, atol=10 * CASES[name].atol)

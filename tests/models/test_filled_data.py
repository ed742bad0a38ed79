"""`predict` for batches that several devices cannot share: rows of padding fill them up, and leave no outputs.

What devices compute of them is in tests/distribution.
"""

import keras
import numpy as np
import pytest

from keras_tx.models import TextClassifier, filled_data
from keras_tx.models.checked_data import CheckedModel

X = np.random.default_rng(0).integers(1, 31, (11, 6))


@pytest.fixture(scope="module")
def model():
    model = TextClassifier(31, 3, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, model.predict(X, verbose=0)


@pytest.mark.parametrize("batch_size", [4, 5])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "generator"])
def test_predictions_are_those_of_the_examples(model, batch_size, parts, kind, monkeypatch):
    model, expected = model
    monkeypatch.setattr(filled_data, "num_shares", lambda _: 3)
    given = (X, X[:, 0] % 3, np.arange(11.0, dtype="float32") % 2)[:parts]  # a weight of 0 is no padding
    if kind == "arrays":
        found = model.predict(X, batch_size=batch_size, verbose=0)
    elif kind == "dataset":
        tf = pytest.importorskip("tensorflow")
        dataset = tf.data.Dataset.from_tensor_slices(given if parts > 1 else X).batch(batch_size)
        found = model.predict(dataset, verbose=0)
    else:
        batches = (tuple(x[i : i + batch_size] for x in given) for i in range(0, 11, batch_size))
        found = model.predict(batches, verbose=0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


class Outputs(keras.callbacks.Callback):
    """Collects what `predict` tells callbacks of the outputs of each batch."""

    def on_predict_begin(self, logs=None):
        self.found = []

    def on_predict_batch_end(self, batch, logs=None):
        assert isinstance(self.model, keras.Model) and self.params["steps"]
        self.found.append({name: np.asarray(one) for name, one in logs.items()})


def named_outputs():
    """A model with a dict of outputs, which Keras spreads over the logs."""
    x = keras.Input((None,), dtype="int32", name="token_ids")
    pooled = keras.layers.GlobalMaxPooling1D()(keras.layers.Embedding(31, 4)(x))
    return CheckedModel(x, {"a": keras.layers.Dense(2)(pooled), "b": keras.layers.Dense(1)(pooled)})


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("steps", [1] if keras.backend.backend() == "torch" else [1, 2])
def test_callbacks_get_the_outputs_of_the_examples(model, several, steps, monkeypatch):
    model = named_outputs() if several else model[0]
    model.compile("sgd", keras.losses.MeanSquaredError(), steps_per_execution=steps)
    for given in (lambda one: [one], lambda one: keras.callbacks.CallbackList([one], model=model, steps=3)):
        outputs = [Outputs(), Outputs()]
        for shares, one in zip((1, 3), outputs, strict=True):
            monkeypatch.setattr(filled_data, "num_shares", lambda _, shares=shares: shares)
            model.predict(X, batch_size=5, verbose=0, callbacks=given(one))
        expected, found = (one.found for one in outputs)
        assert [sorted(one) for one in expected] == [["a", "b"] if several else ["outputs"]] * (4 - steps)
        for one, two in zip(found, expected, strict=True):
            assert one.keys() == two.keys()
            for name, values in two.items():
                np.testing.assert_allclose(one[name], values, atol=1e-6)


def test_one_progress_bar_is_shown(model, monkeypatch, capsys):
    monkeypatch.setattr(filled_data, "num_shares", lambda _: 3)
    shown = []
    for callbacks in (None, [Outputs()], [Outputs(), keras.callbacks.ProgbarLogger()]):
        model[0].predict(X, batch_size=5, callbacks=callbacks, verbose=2)
        shown.append(capsys.readouterr().out.count("3/3"))
    assert shown == [1, 1, 1]


class Quiet(keras.callbacks.Callback):
    """Overrides nothing that gets outputs."""

    def on_predict_batch_begin(self, batch, logs=None):
        self.begun = batch


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda model: None, 1),
        (lambda model: [Quiet(), keras.callbacks.LambdaCallback(), keras.callbacks.ProgbarLogger()], 1),
        (lambda model: keras.callbacks.CallbackList([Quiet()], model=model, steps=3), 1),
        (lambda model: [keras.callbacks.CallbackList([Quiet()])], 1),
        (lambda model: [Quiet(), keras.callbacks.LambdaCallback(on_predict_batch_end=lambda batch, logs: None)], 4),
        (lambda model: [Quiet(), keras.callbacks.CallbackList([Outputs()])], 4),
    ],
)
def test_outputs_of_each_batch_are_awaited_only_for_callbacks_that_get_them(model, make, calls, monkeypatch):
    """In the three batches and at the end; Keras runs ahead of the device in the others."""
    model, expected = model
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    counted, drop = [], filled_data._drop_padding_rows
    monkeypatch.setattr(filled_data, "_drop_padding_rows", lambda outputs: counted.append(1) or drop(outputs))
    monkeypatch.setattr(filled_data, "num_shares", lambda _: 3)
    found = model.predict(X, batch_size=5, verbose=0, callbacks=make(model))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert len(counted) == calls


def test_outputs_without_padding_rows_are_not_copied():
    outputs = {"a": X, "b": X[:, 0]}
    assert filled_data._drop_padding_rows((outputs, np.ones(11))) is outputs

"""`predict` for batches that several devices cannot share: rows of padding fill them up, and leave no outputs.

What devices compute of them is in tests/distribution.
"""

import keras
import numpy as np
import pytest

from keras_tx.models import TextClassifier, filled_data

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

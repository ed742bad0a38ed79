"""In several processes of JAX, each takes its share of a data set before the batches are checked."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_tx


class Distribution:
    """One of two processes, as `keras.distribution` sees it."""

    num_processes, auto_shard_dataset = 2, True

    def distribute_dataset(self, dataset):
        assert self.auto_shard_dataset and type(dataset).__name__ == "_BatchDataset"  # whose batch size is known
        return dataset.rebatch(2).shard(2, 0)


def test_a_process_takes_its_share_before_the_checks(monkeypatch):
    distribution = Distribution()
    monkeypatch.setattr(keras.distribution, "distribution", lambda: distribution)
    seen = []

    def fit(self, x=None, y=None, validation_data=None):
        seen.append((distribution.auto_shard_dataset, x, validation_data))

    monkeypatch.setattr(keras.Model, "fit", fit)
    model = keras_tx.models.MaskedLM(26, num_layers=1, hidden_dim=8, num_heads=2)
    model.compile("sgd", keras_tx.training.PaddedCrossentropy())
    x = np.arange(24).reshape(8, 3)
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(4)
    model.fit(data, validation_data=data)
    [(is_shared_again, *given)] = seen
    assert not is_shared_again and distribution.auto_shard_dataset
    for share in given:
        batches = [batch.numpy() for batch, _ in share]
        np.testing.assert_array_equal(batches, [x[:2], x[4:6]])


def test_the_distribution_is_as_before_after_an_error(monkeypatch):
    distribution = Distribution()
    monkeypatch.setattr(keras.distribution, "distribution", lambda: distribution)
    model = keras_tx.models.MaskedLM(26, num_layers=1, hidden_dim=8, num_heads=2)
    with pytest.raises(ValueError, match="must be in"):
        model.predict(np.full((2, 3), 26), verbose=0)
    assert distribution.auto_shard_dataset

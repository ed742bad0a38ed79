"""In several processes of JAX, each takes its share of a data set before the batches are checked."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_tx.data.streams import of_worker
from keras_tx.models.shared_data import with_own_share


class Distribution:
    """One of two processes, as `keras.distribution` sees it."""

    num_processes, auto_shard_dataset = 2, True

    def distribute_dataset(self, dataset):
        assert self.auto_shard_dataset and type(dataset).__name__ == "_BatchDataset"  # whose batch size is known
        return dataset.rebatch(2).shard(2, 0)


@pytest.fixture
def distribution(monkeypatch):
    found = Distribution()
    monkeypatch.setattr(keras.distribution, "distribution", lambda: found)
    return found


def test_a_process_takes_its_share_once(distribution):
    seen = []

    @with_own_share
    def called(self, name, args, kwargs, has_labels=True):
        seen.extend([*args, *kwargs.values()])
        assert (self, name, has_labels) == ("model", "fit", False)
        return distribution.auto_shard_dataset

    x = np.arange(24).reshape(8, 3)
    data = tf.data.Dataset.from_tensor_slices(x).batch(4)
    assert called("model", "fit", [data], {"validation_data": data, "verbose": 0}, has_labels=False) is False
    assert distribution.auto_shard_dataset
    for share in seen[:2]:
        np.testing.assert_array_equal([batch.numpy() for batch in share], [x[:2], x[4:6]])
    assert seen[2] == 0


def test_a_part_of_the_data_is_not_divided_again(distribution):
    data = of_worker(tf.data.Dataset.range(8).batch(4), (2, 0))
    for args, kwargs in (([data], {}), ([], {"validation_data": data})):
        with pytest.raises(ValueError, match="must be those of all processes.*Received: a dataset with only the part"):
            with_own_share(lambda *_: None)("model", "fit", args, kwargs)
    distribution.auto_shard_dataset = False
    assert with_own_share(lambda self, called, args, kwargs: args[0])("model", "fit", [data], {}) is data


def test_the_distribution_is_as_before_after_an_error(distribution):
    @with_own_share
    def called(self, name, args, kwargs):
        raise KeyError("it")

    with pytest.raises(KeyError, match="it"):
        called("model", "fit", [], {})
    assert distribution.auto_shard_dataset

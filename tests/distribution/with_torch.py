"""Training with DistributedDataParallel of PyTorch by hand, with every reduction and unequal numbers of tokens."""

import keras
import numpy as np
import torch.distributed

from keras_tx.training import PaddedCrossentropy

ROWS, LENGTH, VOCABULARY = 16, 7, 13
PARTS = [slice(0, 6), slice(6, ROWS)]  # the rows of each process


def model():
    keras.utils.set_random_seed(3)
    x = keras.Input((None,), dtype="int32")
    return keras.Model(x, keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(VOCABULARY, 6)(x)))


def train(whole, rows, wrapped, part):
    """The weights after 6 updates with these rows, and then the loss of a part of them."""
    generator = np.random.default_rng(1)
    x, y = torch.from_numpy(generator.integers(1, VOCABULARY, (2, ROWS, LENGTH)))
    y = torch.where(torch.arange(LENGTH) < torch.arange(ROWS)[:, None] // 2, y, 0)  # from 0 to 7 real tokens
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.5)
    for reduction, weights in (
        ("sum_over_batch_size", None),
        ("mean_with_sample_weight", torch.arange(ROWS) % 3 / 2),
        ("sum", torch.full((ROWS,), 0.01)),
    ):
        loss = PaddedCrossentropy(reduction=reduction)
        for _ in range(2):
            optimizer.zero_grad()
            given = () if weights is None else (weights[rows],)
            loss(y[rows], wrapped(x[rows]), *given).backward()
            optimizer.step()
    with torch.no_grad():
        value = float(PaddedCrossentropy()(y[part], whole(x[part])))
    return [weight.tolist() for weight in whole.get_weights()], value


def alone(rank):
    """What one process gets with all rows; before there is a group of processes."""
    whole = model()
    return train(whole, slice(None), whole, PARTS[rank])


def together(rank):
    """What two processes get, each with its rows."""
    whole = model()
    return train(whole, PARTS[rank], torch.nn.parallel.DistributedDataParallel(whole), PARTS[rank])

"""Training with PyTorch's DistributedDataParallel by hand, without TensorFlow, which would take seconds to import."""

import json
import sys

import keras
import numpy as np
import torch.multiprocessing

from keras_tx.training import PaddedCrossentropy

ROWS, LENGTH, VOCABULARY = 16, 7, 13
PARTS = [slice(0, 6), slice(6, ROWS)]  # the rows of each process


def model():
    keras.utils.set_random_seed(3)
    x = keras.Input((None,), dtype="int32")
    return keras.Model(x, keras.layers.Dense(VOCABULARY)(keras.layers.Embedding(VOCABULARY, 6)(x)))


def train(whole, rows, wrapped):
    """The weights after 5 updates with these rows."""
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
        value = float(PaddedCrossentropy()(y[PARTS[0]], whole(x[PARTS[0]])))
    return [weight.tolist() for weight in whole.get_weights()], value


def run(rank, store):
    alone = model()
    expected = train(alone, slice(None), alone)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    together = model()
    found = train(together, PARTS[rank], torch.nn.parallel.DistributedDataParallel(together))
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps([found, expected]), flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)

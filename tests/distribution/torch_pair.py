"""A program for two processes of PyTorch: half batches in each give the weights of whole batches in one.

    python -m tests.distribution.torch_pair PROCESS PORT

It prints as JSON how much the weights differ, for `DistributedDataParallel` and for a plain loop that averages the
gradients, with equal numbers of tokens in the processes and with different ones; and what `with_torch` finds.
"""

import json
import sys

import keras
import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import keras_tx
from keras_tx.training import PaddedCrossentropy
from tests.distribution import with_torch

VOCABULARY, ROWS, LENGTH, STEPS = 26, 8, 10, 20


def batches(real):
    """Ids and labels (B, T), of which row b has `real[b]` tokens."""
    for seed in range(4):
        values = np.random.default_rng(seed).integers(1, VOCABULARY, (ROWS, LENGTH)).astype("int32")
        values[np.arange(LENGTH) >= np.array(real)[:, None]] = 0
        yield values, np.roll(values, -1, axis=1) * (np.arange(LENGTH) < np.array(real)[:, None])


def trained(real, rows, wrap=None, average=False):
    keras.utils.set_random_seed(3)
    sizes = {"num_layers": 1, "hidden_dim": 16, "num_heads": 4, "intermediate_dim": 24, "dropout": 0.0}
    model = keras_tx.models.CausalLM(VOCABULARY, **sizes)
    loss_of = PaddedCrossentropy()
    if average:
        optimizer = keras.optimizers.SGD(0.3)
        optimizer.build(model.trainable_variables)
    else:
        wrapped = wrap(model) if wrap else model
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
    data = list(batches(real))
    for step in range(STEPS):
        x, y = (torch.as_tensor(part[rows]) for part in data[step % len(data)])
        model.zero_grad()
        loss_of(y, model(x, training=True) if average else wrapped(x)).backward()
        if average:
            gradients = [variable.value.grad for variable in model.trainable_variables]
            for gradient in gradients:
                distributed.all_reduce(gradient)
            with torch.no_grad():
                optimizer.apply([gradient / 2 for gradient in gradients])
        else:
            optimizer.step()
    return model.get_weights()


def main(process, port):
    found = {}
    cases = {"equal": [LENGTH] * ROWS, "unequal": range(2, 2 + ROWS)}
    whole = {name: trained(real, slice(None)) for name, real in cases.items()}
    alone = with_torch.alone(process)
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=process, world_size=2)
    half = slice(process * ROWS // 2, (process + 1) * ROWS // 2)
    for name, real in cases.items():
        for way, options in (("wrapped", {"wrap": DistributedDataParallel}), ("plain", {"average": True})):
            pairs = zip(trained(real, half, **options), whole[name], strict=True)
            found[f"{name}, {way}"] = max(float(np.abs(a - b).max()) for a, b in pairs)
    found["objectives"] = with_torch.together(process), alone
    distributed.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

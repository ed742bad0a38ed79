"""Small models of transformers with random weights, saved as checkpoints, and what they compute."""

import numpy as np

from keras_tx import pretrained
from tests.tools import assert_close, to_numpy

IDS = np.array([[5, 9, 2, 7, 11, 3, 8, 6, 19], [13, 4, 17, 10, 5, 1, 1, 1, 1], [6, 3, 9, 14, 2, 12, 7, 1, 1]])
PADDING_ID = 1
MASK = (IDS != PADDING_ID).astype("int32")


def make(directory, name, seed=0, **config):
    """Saves a model of this class with random weights, and returns it in float64, so that our rounding alone counts."""
    import torch
    import transformers

    kind = getattr(transformers, name)
    with torch.device("cpu"):
        model = kind(kind.config_class(**config)).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(directory)
    return model.double()


def answer(model, ids=IDS, mask=MASK, **inputs):
    """{name: array} of the outputs of a model of transformers; hidden states are a list of arrays."""
    import torch

    tensors = {name: torch.tensor(x, device="cpu") for name, x in inputs.items()}
    with torch.no_grad(), torch.device("cpu"):
        found = model(torch.tensor(ids), attention_mask=torch.tensor(mask), output_hidden_states=True, **tensors)
    return {
        name: [x.numpy() for x in value] if isinstance(value, tuple) else value.numpy()
        for name, value in found.items()
        if name not in ("cache", "past_key_values")  # the cache, as transformers calls it since 5.24 and before
    }


def check(directory, theirs, atol=2e-5, **inputs):
    """Loads the model of a directory; raises unless it computes what `theirs` computes, at real tokens."""
    expected = answer(theirs, **inputs)
    model = pretrained.from_pretrained(directory, output_hidden_states=True)
    outputs = model({"input_ids": IDS.astype("int32"), "attention_mask": MASK, **inputs})
    assert set(outputs) == set(expected)
    real = MASK.astype(bool)
    for name, value in expected.items():
        pairs = zip(outputs[name], value, strict=True) if name == "hidden_states" else [(outputs[name], value)]
        for one, other in pairs:
            at = real if other.shape[:2] == IDS.shape else slice(None)
            largest = max(1.0, np.abs(other[at]).max())  # sums round by the size of what they sum
            assert_close(to_numpy(one)[at], other[at], atol=atol * largest, rtol=0)
    return model

"""Gradient checkpointing of attention in blocks, which has a gradient of its own.

JAX asks for this gradient when the tensors that the layer had computed for it, its masks and seeds, are gone.
"""

import contextlib

import keras
import numpy as np
import pytest

from keras_tx.layers import Encoder
from tests.layers.test_remat import slopes
from tests.tools import assert_close, gradients, normal, randomize

BLOCKS = {"attention_options": {"blockwise": True, "sliding_window": 4}}


@pytest.mark.parametrize(("kind", "rate"), [("encoder", 0.2), ("decoder", 0.0)])
def test_masks_and_seeds_are_the_same_when_it_is_computed_again(monkeypatch, kind, rate):
    options = {
        **BLOCKS,
        "attention_dropout": rate,
        "attention_mask": np.random.default_rng(3).random((2, 11, 11)) < 0.8,
    }
    got = slopes(kind, **options)
    monkeypatch.setattr(keras, "remat", lambda function: function)
    for one, expected in zip(got, slopes(kind, **options), strict=True):
        assert_close(one, expected, atol=1e-5 if keras.backend.backend() == "jax" else 2e-6)


def test_a_scope_of_keras_changes_no_gradient():
    found = []
    masks = {
        "mask": np.arange(5)[None] < [[5], [3]],
        "attention_mask": np.random.default_rng(3).random((2, 5, 5)) < 0.8,
    }
    for scope in (contextlib.nullcontext(), keras.RematScope(mode="full")):
        with scope:
            keras.utils.set_random_seed(5)
            layer = Encoder(1, 7, 3, **BLOCKS)
            layer.build((2, 5, 6))
            randomize(layer)
            found.append(gradients(lambda x: layer(x, **masks), [normal(2, 5, 6)]))  # noqa: B023
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, atol=5e-6)

"""Speculative decoding of checkpoints: the tokens of greedy decoding, for every family."""

import keras
import numpy as np
import pytest

from keras_tx.generation import Speculative, compiled_loop
from tests.pretrained.tiny import GENERATIVE, loaded, prompts_of


@pytest.mark.parametrize("name", GENERATIVE)
def test_tokens_are_those_of_greedy_alone(name, monkeypatch):
    if keras.backend.backend() == "tensorflow":  # tracing a loop takes longer than a few tiny steps
        monkeypatch.setattr(compiled_loop, "_compiled", lambda function, models, jit_compile: function)
    model, prompts = loaded(name), prompts_of(name)
    options = {"max_new_tokens": 7, "jit_compile": False}
    expected = model.generate(prompts, **options)
    for given in ({}, {"draft_model": model}):
        found = model.generate(prompts, Speculative(num_draft_tokens=3, **given), **options)
        np.testing.assert_array_equal(found, expected)

"""Speculative decoding of checkpoints: the tokens of greedy decoding, for every family."""

import numpy as np
import pytest

from keras_tx.generation import Speculative
from tests.pretrained.tiny import GENERATIVE, loaded, prompts_of


@pytest.mark.parametrize("name", GENERATIVE)
@pytest.mark.usefixtures("eager")
def test_tokens_are_those_of_greedy_alone(name):
    model, prompts = loaded(name), prompts_of(name)
    options = {"max_new_tokens": 7, "jit_compile": False}
    expected = model.generate(prompts, **options)
    for given in ({}, {"draft_model": model}):
        found = model.generate(prompts, Speculative(num_draft_tokens=3, **given), **options)
        np.testing.assert_array_equal(found, expected)

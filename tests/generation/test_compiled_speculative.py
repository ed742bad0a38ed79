"""What the backend makes of the loops of speculative decoding gives the tokens of the strategy alone."""

import keras
import numpy as np
import pytest

from keras_tx.generation import Sample, Speculative, generate
from tests.generation import built
from tests.tools import assert_close

PROMPTS, SOURCES = [[5, 7, 11, 3, 17, 5, 7], [9], [2, 2, 13]], [[4, 3, 21], [8, 28, 6, 1, 26], [12]]
RULES = {"stop_tokens": (8, 11, 5), "repetition_penalty": 1.2, "no_repeat_ngram_size": 4, "forced_tokens": {1: 9}}
DRAFTS = 3


@pytest.fixture(scope="module")
def draft_model():
    keras.utils.set_random_seed(9)
    return built.made("untied")


def test_compiled_loops_generate_the_same_tokens(draft_model, request):
    model, prompts = built.made("causal_lm"), np.array(PROMPTS[:1])
    options = {"max_new_tokens": 11, "forced_tokens": {2: 5, 3: 7}}
    sample = Sample(0.7, top_k=9, seed=3)
    strategies = [Speculative(sample, num_draft_tokens=DRAFTS, draft_model=draft) for draft in (None, draft_model)]
    found = [generate(model, prompts, strategy, **options) for strategy in strategies]
    vars(model).pop("_keras_tx_loops")
    request.getfixturevalue("eager")
    np.testing.assert_array_equal(found[0], generate(model, prompts, sample, **options))
    np.testing.assert_array_equal(found[1], generate(model, prompts, strategies[1], **options))


@pytest.mark.parametrize("name", ["causal_lm", "encoder_and_decoder"])
def test_a_batch_under_rules_gets_the_tokens_of_greedy_in_a_graph(name, draft_model):
    model = built.made(name)
    names = [x.name for x in model.inputs]
    inputs = PROMPTS if len(names) == 1 else {names[0]: SOURCES, names[1]: PROMPTS}
    options = {**RULES, "max_new_tokens": 6, "jit_compile": False, "return_scores": True}
    expected, scores = generate(model, inputs, **options)
    for draft in (None, draft_model):
        strategy = Speculative(num_draft_tokens=2, draft_model=draft)
        found, found_scores = generate(model, inputs, strategy, **options)
        assert found == expected
        assert_close(found_scores, scores, atol=1e-5)

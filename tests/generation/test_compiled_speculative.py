"""Speculative decoding on TensorFlow: graphs, the rule that keeps drafts, the distribution of samples.

`test_speculative` has the rest, which `scripts/check` runs on PyTorch, where Python loops are fast.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
from keras import ops

from keras_tx.generation import Sample, Speculative, generate, stream
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.speculative_loop import SpeculativeLoop
from keras_tx.models import CausalLM
from tests.generation import built
from tests.generation.test_speculative import DRAFTS, PROMPTS, RULES, SHORT, SOURCES
from tests.tools import assert_close, randomize, to_numpy


def test_compiled_loops_generate_the_same_tokens(lm, draft_model, request):
    prompts = np.array(PROMPTS[:1])
    options = {"max_new_tokens": 11, "forced_tokens": {2: 5, 3: 7}}
    sample = Sample(0.7, top_k=9, seed=3)
    strategies = [Speculative(sample, num_draft_tokens=DRAFTS, draft_model=draft) for draft in (None, draft_model)]
    found = [generate(lm, prompts, strategy, **options) for strategy in strategies]
    vars(lm).pop("_keras_tx_loops")
    request.getfixturevalue("eager")
    np.testing.assert_array_equal(found[0], generate(lm, prompts, sample, **options))
    np.testing.assert_array_equal(found[1], generate(lm, prompts, strategies[1], **options))


# Look-ups in `causal_lm` are compiled above for one row, an encoder-decoder with a draft model in `test_in_graph.py`.
@pytest.mark.parametrize(("name", "has_draft_model"), [("causal_lm", True), ("encoder_and_decoder", False)])
def test_a_batch_under_rules_gets_the_tokens_of_greedy_in_a_graph(name, has_draft_model, draft_model, request):
    model = built.made(name)
    names = [x.name for x in model.inputs]
    inputs = PROMPTS if len(names) == 1 else {names[0]: SOURCES, names[1]: PROMPTS}
    options = {**RULES, **SHORT, "return_scores": True}
    strategy = Speculative(num_draft_tokens=2, draft_model=draft_model if has_draft_model else None)
    found, found_scores = generate(model, inputs, strategy, **options)
    request.getfixturevalue("eager")
    expected, scores = generate(model, inputs, **options)
    assert found == expected
    assert_close(found_scores, scores, atol=1e-5)


def reference(logits, drafts, temperature, noise, step, done):
    """The rule in NumPy, in float64: logits (R, K + 1, V), drafts (R, K), noise (M, R) -> the tokens (R, n)."""
    scaled = (logits - logits.max(axis=-1, keepdims=True)).astype("float64") / temperature
    cumulative = np.cumsum(np.exp(scaled), axis=-1)
    chosen = []
    for i in range(logits.shape[1]):
        targets = noise[step + i].astype("float64") * cumulative[:, i, -1]
        tokens = np.array(
            [np.searchsorted(*pair, side="right") for pair in zip(cumulative[:, i], targets, strict=True)]
        )
        chosen.append(np.where(done, 0, tokens))
        if i == drafts.shape[1] or ((tokens != drafts[:, i]) & ~done).any():
            return np.stack(chosen, axis=1)
    raise AssertionError


@pytest.mark.parametrize("seed", range(6))
def test_the_rule_is_that_of_numpy(seed):
    rows, size, temperature, num_new, step = 1 + seed % 3, 13, 0.3, 9, 4
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(rows, DRAFTS + 1, size)).astype("float32")
    logits[:, :, 5] += 2.0
    drafts = np.where(generator.random((rows, DRAFTS)) < 0.9, 5, 3).astype("int32")
    noise = generator.random((num_new, rows)).astype("float32")
    done = np.arange(rows) == 2
    strategy = Speculative(Sample(temperature), num_draft_tokens=DRAFTS)
    loop = SpeculativeLoop(None, strategy, Constraints(), (), 0, num_new, None)
    prompts = np.ones((rows, 2), "int32")
    state = strategy.initial_state(prompts, prompts > 0, num_new, num_new, size, noise=noise)
    state |= {"step": ops.convert_to_tensor(step, "int32"), "slot": ops.convert_to_tensor(2 + step, "int32")}
    state["done"] = ops.convert_to_tensor(done)
    arrays = [ops.convert_to_tensor(x) for x in (drafts[:, 0], logits, drafts)]
    after, tokens = loop._checked(state, *arrays, None)
    expected = reference(logits, drafts, temperature, noise, step, done)
    assert int(after["step"]) == step + expected.shape[1]
    np.testing.assert_array_equal(to_numpy(after["ids"])[:, 2 + step : 2 + int(after["step"])], expected)
    np.testing.assert_array_equal(to_numpy(tokens), expected[:, -1])
    assert not to_numpy(after["ids"])[:, 2 + int(after["step"]) :].any()


def test_a_draft_is_kept_as_often_as_it_is_likely_and_else_another_token_is_drawn():
    """For a draft that is looked up, this is also the rule of Leviathan et al.: kept with p, else from the rest."""
    rows, size, draft = 4001, 7, 2
    logits = np.random.default_rng(5).normal(size=size).astype("float32")
    p = np.exp(logits.astype("float64")) / np.exp(logits.astype("float64")).sum()
    noise = ((np.arange(rows) + 0.5) / rows).astype("float32")[None].repeat(2, axis=0)
    strategy = Speculative(Sample(), num_draft_tokens=1)
    loop = SpeculativeLoop(None, strategy, Constraints(), (), 0, 2, None)
    prompts = np.ones((rows, 1), "int32")
    state = strategy.initial_state(prompts, prompts > 0, 2, 2, size, noise=noise)
    given = np.broadcast_to(logits, (rows, 2, size)), np.full((rows, 1), draft, "int32")
    after, tokens = loop._checked(state, *[ops.convert_to_tensor(x) for x in (prompts[:, 0], *given)], None)
    assert int(after["step"]) == 1  # not all rows drew the draft
    counts = np.bincount(to_numpy(tokens), minlength=size)
    assert_close(counts / rows, p, atol=2 / rows)


def chi_squared(found, expected):
    """The statistic, as a number with nearly the standard normal distribution (Wilson and Hilferty 1931)."""
    large = np.flatnonzero(expected >= 10)
    assert len(large) >= 5
    counts = np.stack([found, expected]).astype("float64")
    merged = counts[:, large]
    merged[:, merged[1].argmin()] += np.delete(counts, large, axis=1).sum(axis=1)  # rare ones count as one
    degrees = len(large) - 1
    statistic = ((merged[0] - merged[1]) ** 2 / merged[1]).sum()
    return ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))


def test_samples_have_the_distribution_of_the_model():
    """All continuations of three tokens, with the probabilities that the whole model gives them: a chi-squared test."""
    size, new, temperature = 3, 3, 2.0
    sizes = {"num_layers": 1, "hidden_dim": 4, "num_heads": 1, "intermediate_dim": 3, "tie_embeddings": False}
    sizes["embedding_options"] = {"padding_id": None}
    model, draft = (randomize(CausalLM(size, **sizes), seed=seed, scale=0.3) for seed in (2, 1))
    prompt = [1, 2, 1]
    texts = np.array(list(itertools.product(range(size), repeat=new)))
    whole = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1).astype("int32")
    logits = to_numpy(model(whole))[:, len(prompt) - 1 : -1].astype("float64") / temperature
    probabilities = np.exp(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
    expected = np.take_along_axis(probabilities, texts[:, :, None], axis=2)[:, :, 0].prod(axis=1)
    assert_close(expected.sum(), 1.0)
    rows, calls = 4, 300
    for options in ({}, {"draft_model": draft}):
        counts = Counter()
        for seed in range(calls):
            strategy = Speculative(Sample(temperature, seed=seed), num_draft_tokens=2, **options)
            ids = model.generate([prompt] * rows, strategy, max_new_tokens=new, jit_compile=False)
            counts.update(tuple(row[len(prompt) :]) for row in ids)
        found = np.array([counts[tuple(text)] for text in texts.tolist()])
        total = rows * calls
        assert found.sum() == total
        assert chi_squared(found, total * expected) < 3.09  # exceeded once in 1,000 by chance


@pytest.mark.usefixtures("eager")
def test_a_stream_has_every_token(lm, draft_model):
    expected = generate(lm, PROMPTS, stop_tokens=8, **SHORT)
    for options in ({}, {"draft_model": draft_model}):
        strategy = Speculative(num_draft_tokens=DRAFTS, **options)
        columns = np.stack(list(stream(lm, PROMPTS, strategy, stop_tokens=8, **SHORT)), axis=1)
        for row, prompt, column in zip(expected, PROMPTS, columns.tolist(), strict=True):
            new = row[len(prompt) :]
            assert column[: len(new)] == new and not any(column[len(new) :])


@pytest.mark.usefixtures("eager")
def test_a_draft_model_that_gets_other_variables_is_analysed_again(lm):
    draft = built.made("untied")
    strategy = Speculative(draft_model=draft, num_draft_tokens=2)
    expected = generate(lm, PROMPTS, **SHORT)
    assert generate(lm, PROMPTS, strategy, **SHORT) == expected
    loops = vars(lm)["_keras_tx_loops"][1][None][1]
    count = len(loops)
    assert generate(lm, PROMPTS, strategy, **SHORT) == expected and len(loops) == count
    draft.quantize("int8")
    assert generate(lm, PROMPTS, strategy, **SHORT) == expected and len(loops) == count + 1

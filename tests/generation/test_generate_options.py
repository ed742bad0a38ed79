"""`generate` with strategies, constraints and all kinds of models: the tokens of a loop over the whole model."""

import itertools

import keras
import numpy as np
import pytest

from keras_tx.generation import Beam, Greedy, Sample, Speculative, generate, stream
from tests.generation import built
from tests.generation.asked import (
    BEAM,
    FAST,
    NEW,
    PADDED,
    PROMPTS,
    SHORT,
    SOURCES,
    WRITE,
    Letters,
)
from tests.generation.built import V, logits_of, naive
from tests.tools import assert_close

LM = "untied"

pytestmark = pytest.mark.usefixtures("eager")


@pytest.mark.parametrize("name", ["attention_and_operators", "biases_and_a_skip", "sequential", "encoder_and_decoder"])
def test_models_that_users_put_together_generate(name, tmp_path):
    model = built.made(name)
    sources = PADDED if name == "encoder_and_decoder" else None
    inputs = PROMPTS if sources is None else {"source": SOURCES, "target": PROMPTS}
    found = generate(model, inputs, **FAST)
    expected = naive(model, PROMPTS, NEW, sources=sources)
    if sources is not None:
        expected = [row[len(prompt) :] for row, prompt in zip(expected, PROMPTS, strict=True)]
    assert found == expected
    if name == "attention_and_operators":
        model.save(tmp_path / "model.keras")
        assert generate(keras.saving.load_model(tmp_path / "model.keras"), inputs, **FAST) == found


def test_one_beam_is_greedy_and_scores_are_sums_of_log_probabilities(lm):
    greedy, score = generate(lm, PROMPTS, return_scores=True, **FAST)
    one, one_score = generate(lm, PROMPTS, Beam(1, length_penalty=0.0), return_scores=True, **FAST)
    assert one == greedy
    for text, prompt, total in zip(greedy, PROMPTS, score, strict=True):
        logits = logits_of(lm, [text])[0, len(prompt) - 1 : len(text) - 1].astype("float64")
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert_close(total, log_probs[np.arange(NEW), text[len(prompt) :]].sum(), atol=1e-4)
    assert_close(one_score, score, atol=1e-4)


def test_beams_come_best_first_as_many_as_asked_for(translator):
    rows, scores = generate(translator, SOURCES, BEAM, return_scores=True, **WRITE)
    assert [len(found) for found in rows] == [3, 3, 3] and scores.shape == (3, 3)
    assert (np.diff(scores) <= 0).all()
    ids = generate(translator, PADDED, BEAM, **WRITE)
    assert ids.shape == (3, 3, NEW) and ids.tolist() == rows
    one, alone = generate(translator, SOURCES[1], BEAM, return_scores=True, **WRITE)
    assert one == rows[1] and alone.shape == (3,)
    assert_close(alone, scores[1], atol=1e-5)
    greedy, score = generate(translator, SOURCES, return_scores=True, **WRITE)
    assert len(greedy) == 3 and (scores[:, 0] >= score - 1e-5).mean() > 0.5


@pytest.mark.parametrize("name", ["sequential", "nested"])
def test_layers_added_to_a_sequential_are_used(name):
    model = built.made(name)
    sequential = model if name == "sequential" else model.layers[-1]
    before = generate(model, PROMPTS, **SHORT)
    sequential.add(keras.layers.Rescaling(-1.0))  # it has no variables
    assert generate(model, PROMPTS, **SHORT) == naive(model, PROMPTS, 2) != before
    sequential.pop()
    assert generate(model, PROMPTS, **SHORT) == before


def test_rows_end_with_the_first_of_the_stop_tokens(lm):
    plain = naive(lm, PROMPTS, NEW)
    new = [row[len(prompt) :] for row, prompt in zip(plain, PROMPTS, strict=True)]

    def lengths(stop):
        return {min([row.index(token) for token in stop if token in row], default=NEW) for row in new}

    stop = max(itertools.combinations(sorted(set(sum(new, []))), 2), key=lambda stop: len(lengths(stop)))
    expected = naive(lm, PROMPTS, NEW, stop=stop)
    assert len({len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True)}) > 1
    assert generate(lm, PROMPTS, stop_tokens=stop, **FAST) == expected
    prompts = np.array([row + [0] * (5 - len(row)) for row in PROMPTS])
    found = generate(lm, prompts, stop_tokens=stop, **FAST)
    width = 5 + max(len(row) - len(prompt) for row, prompt in zip(expected, PROMPTS, strict=True))
    assert found.shape == (3, width)
    for row, prompt, line in zip(expected, PROMPTS, found, strict=True):
        end = 5 + len(row) - len(prompt)
        assert line[5 - len(prompt) : end].tolist() == row
        assert not line[: 5 - len(prompt)].any() and not line[end:].any()


def test_pieces_of_a_stream_join_to_the_answer(lm, translator):
    expected = generate(lm, PROMPTS, **FAST)
    pieces = list(stream(lm, PROMPTS, **FAST))
    assert len(pieces) == NEW and np.stack(pieces, 1).tolist() == [row[-NEW:] for row in expected]
    one = list(stream(lm, PROMPTS[0], **FAST))
    assert PROMPTS[0] + one == expected[0] and type(one[0]) is int
    stop = [expected[0][7]]
    pieces = np.stack(list(stream(lm, PROMPTS, stop_tokens=stop, **FAST)), 1)
    stopped = generate(lm, PROMPTS, stop_tokens=stop, **FAST)
    for row, line, prompt in zip(stopped, pieces, PROMPTS, strict=True):
        assert line.tolist()[: len(row) - len(prompt)] == row[len(prompt) :]
        assert not line[len(row) - len(prompt) :].any()
    options = {**FAST, "tokenizer": Letters()}
    assert "adc" + "".join(stream(lm, "adc", **options)) == generate(lm, "adc", **options)
    options["source_tokenizer"] = Letters()
    pieces = zip(*stream(translator, ["cb"], **options), strict=True)
    assert ["".join(texts) for texts in pieces] == generate(translator, ["cb"], **options)


@pytest.mark.parametrize("strategy", [Greedy(), Beam(3), Sample(seed=5), Speculative()])
def test_ids_without_a_row_in_the_embedding_are_generated_as_stop_tokens_alone(strategy):
    """Outputs are often padded to a multiple of 64; some have a class for the end, which is never an input."""
    model, ids = built.padded_output(), built.ids_of()
    unknown = keras.Model(ids, model(keras.ops.minimum(ids, V - 1)))  # nothing shows how many rows the embedding has
    assert logits_of(model, PROMPTS)[0].argmax(-1).max() >= V

    def rules(stop):
        return {"stop": stop, "never": [0, *[token for token in range(V, V + 7) if token not in stop]]}

    def ends_at_two_lengths(stop):  # so that the model runs with a stop token, too
        rows = naive(unknown, PROMPTS, NEW, **rules(stop))
        return len({len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)}) > 1

    for stop in ([], next(filter(ends_at_two_lengths, itertools.combinations(range(V, V + 7), 2)))):
        rows = generate(model, PROMPTS, strategy, stop_tokens=stop, **FAST)
        options = {**FAST, "stop_tokens": stop, "forbidden_tokens": rules(stop)["never"]}
        assert rows == generate(unknown, PROMPTS, strategy, **options)
        if strategy == Greedy():
            assert rows == naive(unknown, PROMPTS, NEW, **rules(stop))


def test_samples_depend_on_the_seed_and_the_row_alone(lm):
    sample = lambda prompts, seed: generate(lm, prompts, Sample(1.5, seed=seed), **FAST)
    first = sample(PROMPTS, 3)
    assert sample(PROMPTS, 3) == first != sample(PROMPTS, 4)
    assert sample(PROMPTS[0], 3) == first[0]
    assert np.stack(list(stream(lm, PROMPTS, Sample(1.5, seed=3), **FAST)), 1).tolist() == [x[-NEW:] for x in first]


def test_constraints_reach_what_is_generated(lm):
    plain = naive(lm, PROMPTS, NEW)
    never = (0, plain[0][len(PROMPTS[0])])
    assert generate(lm, PROMPTS, **{**FAST, "forbidden_tokens": never}) == naive(lm, PROMPTS, NEW, never=never)
    stop = [token for token in range(1, V) if token % 4 == 0]
    rules = {"forced_tokens": {1: 23, -1: 25}, "no_repeat_ngram_size": 1, "repetition_penalty": 1.1}
    found = generate(lm, PROMPTS[0], **FAST, **rules, stop_tokens=stop, min_new_tokens=NEW)
    new = found[len(PROMPTS[0]) :]
    assert (new[1], new[-1], len(set(found))) == (23, 25, len(PROMPTS[0]) + NEW)
    assert not set(stop) & set(new)

"""`Constraints` against the logits processors of transformers, with and without padding before the prompt."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_tx.generation.constraints import Constraints
from keras_tx.generation.state import append_tokens, initial_state
from tests.tools import normal, to_numpy

SIZE, PAD = 11, 0
NEVER = -np.inf


def state_of(ids, padding=0, new=0, free=3, limit=20):
    """A state whose rows hold `ids` (R, N), the last `new` of them generated, behind `padding` slots of padding."""
    ids = np.asarray(ids)
    prompt = np.pad(ids[:, : ids.shape[1] - new], ((0, 0), (padding, 0)), constant_values=PAD)
    real = np.arange(prompt.shape[1]) >= padding
    state = initial_state(
        prompt, np.tile(real, (len(ids), 1)), rows_per_prompt=1, num_new=new + free, limit=limit, padding_id=PAD
    )
    for place in range(ids.shape[1] - new, ids.shape[1]):
        state |= append_tokens(state, state["ids"], ids[:, place].astype("int32"), np.ones(len(ids), bool))
    return state


def theirs(name, ids, scores, *options, **named):
    """`scores` through a processor of transformers, as NumPy."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    processor = getattr(transformers.generation.logits_process, name)(*options, **named)
    return processor(torch.tensor(np.asarray(ids)).long(), torch.tensor(scores)).numpy()


rows_of_ids = st.integers(1, 9).flatmap(
    lambda length: st.lists(st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=3)
)


@given(rows_of_ids, st.integers(1, 4), st.integers(0, 3))
def test_no_n_gram_occurs_twice_as_in_transformers_and_whatever_the_padding(ids, size, padding):
    scores = normal(len(ids), SIZE)
    expected = theirs("NoRepeatNGramLogitsProcessor", ids, scores, size)
    found = Constraints(no_repeat_ngram_size=size)(scores, state_of(ids, padding, new=len(ids[0]) // 2), ())
    np.testing.assert_array_equal(to_numpy(found), expected)


@given(rows_of_ids, st.integers(0, 3))
def test_forbidden_sequences_end_as_in_transformers_and_never_begin_in_padding(ids, padding):
    scores, forbidden = normal(len(ids), SIZE), [[7], [3], [1, 2], [0, 1, 4], [2, 2, 4], [0, 0, 0, 9]]
    expected = theirs("NoBadWordsLogitsProcessor", ids, scores, forbidden)
    state = state_of(ids, padding, new=len(ids[0]) // 2)
    assert Constraints(forbidden_tokens=[7, 3, *forbidden[2:]]) == Constraints(forbidden_tokens=forbidden)
    np.testing.assert_array_equal(to_numpy(Constraints(forbidden_tokens=forbidden)(scores, state, ())), expected)


@given(rows_of_ids, st.sampled_from([0.5, 1.3, 4]), st.integers(0, 3))
def test_tokens_of_a_row_are_penalized_once_as_in_transformers_and_padding_never(ids, penalty, padding):
    scores = 5 * normal(len(ids), SIZE)
    scores[:, 1] = NEVER
    expected = theirs("RepetitionPenaltyLogitsProcessor", ids, scores, float(penalty))
    found = Constraints(repetition_penalty=penalty)(scores, state_of(ids, padding, new=len(ids[0]) // 2), ())
    np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-6)


@pytest.mark.parametrize("new", [0, 2, 3])
def test_stop_tokens_wait_as_in_transformers(new):
    ids, scores = [[5, 6, 7, 8], [1, 2, 3, 4]], normal(2, SIZE)
    expected = theirs("MinNewTokensLengthLogitsProcessor", ids, scores, 4 - new, 3, [2, 9])
    found = Constraints(min_new_tokens=3)(scores, state_of(ids, new=new), (2, 9))
    np.testing.assert_array_equal(to_numpy(found), expected)
    assert np.isneginf(expected).sum() == (4 if new < 3 else 0)
    np.testing.assert_array_equal(to_numpy(Constraints(min_new_tokens=3)(scores, state_of(ids, new=new), ())), scores)


def test_what_the_rules_left_is_normalized():
    scores = np.random.default_rng(3).normal(size=(3, SIZE)).astype("float32")
    state = state_of(np.array([[5, 7], [3, 4], [2, 6]]), new=1)
    found = to_numpy(Constraints(forbidden_tokens=[3, 5], renormalize_logits=True)(scores, state, ()))
    left = np.where(np.isin(np.arange(SIZE), [3, 5]), -np.inf, scores.astype("float64"))
    np.testing.assert_allclose(found, left - np.log(np.exp(left).sum(-1, keepdims=True)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, rtol=0, atol=1e-6)


def test_forced_tokens_win_over_everything_as_in_transformers():
    scores = normal(2, SIZE)
    rules = Constraints(forced_tokens={0: 3, 2: 7, -1: 9}, forbidden_tokens=[8, 9], min_new_tokens=20)
    forced = {}
    for new in range(6):
        found = to_numpy(rules(scores, state_of([[3] * 6] * 2, new=new, limit=6), (9,)))
        if new in (0, 2, 5):
            forced[new] = np.flatnonzero(found[0] > NEVER).tolist()
            np.testing.assert_array_equal(found, theirs("ForcedBOSTokenLogitsProcessor", [[1]], scores, *forced[new]))
        else:
            kept = np.where(np.isin(np.arange(SIZE), [8, 9]), NEVER, scores)
            np.testing.assert_array_equal(found, kept)
    assert forced == {0: [3], 2: [7], 5: [9]}


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no float64 by default")
def test_forced_tokens_keep_the_dtype_of_the_scores():
    scores, state = keras.ops.convert_to_tensor(normal(2, SIZE)), state_of([[3] * 6] * 2, new=1)
    before = keras.config.floatx()
    try:
        keras.config.set_floatx("float64")
        found = Constraints(forced_tokens={1: 5})(scores, state, ())
    finally:
        keras.config.set_floatx(before)
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    np.testing.assert_array_equal(to_numpy(found) > NEVER, [np.arange(SIZE) == 5] * 2)


def test_ids_outside_the_vocabulary_of_the_scores_are_passed_over():
    """Some models embed more ids than they have logits for."""
    rules = Constraints(repetition_penalty=2.0, no_repeat_ngram_size=2)
    scores = np.abs(normal(1, SIZE))
    found = to_numpy(rules(scores, state_of([[50, 3, 50]]), ()))
    expected = scores.copy()
    expected[0, 3] = NEVER
    np.testing.assert_array_equal(found, expected)


def test_no_rules_change_nothing_and_equal_rules_are_equal_keys():
    scores = normal(2, SIZE)
    assert Constraints()(scores, state_of([[1, 1]] * 2), (2,)) is scores
    rules = Constraints(forbidden_tokens=[3, (4, 5)], forced_tokens={-1: 2, 0: 1})
    same = Constraints(forbidden_tokens=(np.int64(3), [4, 5]), forced_tokens={0: 1, -1: 2})
    assert rules == same and hash(rules) == hash(same) and eval(repr(rules)) == rules
    assert rules != Constraints() == Constraints(forced_tokens={})
    assert rules == Constraints(forbidden_tokens=[3, (4, 5)], forced_tokens=[(-1, 2), (0, 1), (0, 1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0}, "`repetition_penalty` must be a positive finite number. .*repetition_penalty=0"),
        ({"no_repeat_ngram_size": -1}, "`no_repeat_ngram_size` must be an integer of at least 0. .*size=-1"),
        ({"min_new_tokens": 1.5}, "`min_new_tokens` must be an integer of at least 0. .*min_new_tokens=1.5"),
        ({"forbidden_tokens": 3}, "`forbidden_tokens` must hold ids .*Received: forbidden_tokens=3"),
        ({"forbidden_tokens": [[]]}, r"`forbidden_tokens` must hold ids .*Received: forbidden_tokens=\[\[\]\]"),
        ({"forbidden_tokens": [-1]}, r"`forbidden_tokens` must hold ids .*Received: forbidden_tokens=\[-1\]"),
        ({"forbidden_tokens": [[1, 0.5]]}, r"`forbidden_tokens` must hold .*forbidden_tokens=\[\[1, 0.5\]\]"),
        ({"forbidden_tokens": "ab"}, "`forbidden_tokens` must hold ids .*Received: forbidden_tokens='ab'"),
        ({"forced_tokens": {-2: 1}}, r"`forced_tokens` must map indices .*Received: forced_tokens=\{-2: 1\}"),
        ({"forced_tokens": {0: "a"}}, r"`forced_tokens` must map indices .*Received: forced_tokens=\{0: 'a'\}"),
        ({"forced_tokens": [(0, 1), (0, 2)]}, r"not have two tokens for one .*forced_tokens=\[\(0, 1\), \(0, 2\)\]"),
        ({"forced_tokens": [3]}, r"`forced_tokens` must map indices .*Received: forced_tokens=\[3\]"),
    ],
)
def test_invalid_rules_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Constraints(**options)


@pytest.mark.parametrize(
    ("options", "stop", "message"),
    [
        ({}, (11,), r"`stop_tokens` must be ids in \[0, 11\), the vocabulary. Received: 11 in stop_tokens"),
        ({}, (-1,), r"`stop_tokens` must be ids in \[0, 11\), the vocabulary. Received: -1 in stop_tokens"),
        ({"forbidden_tokens": [[1, 12]]}, (), r"`forbidden_tokens` must be ids in \[0, 11\).* 12 in forbidden_tokens"),
        ({"forced_tokens": {0: 13}}, (), r"`forced_tokens` must be ids in \[0, 11\).* 13 in forced_tokens"),
        ({"min_new_tokens": 6}, (2,), "not be above `max_new_tokens`. .*min_new_tokens=6, max_new_tokens=5"),
        ({"forbidden_tokens": [2, 3]}, (2,), "`forbidden_tokens` must not hold a stop token; .*Received: 2 in both"),
        ({"forbidden_tokens": range(SIZE)}, (), "`forbidden_tokens` must leave a token .*vocabulary_size=11"),
        ({"forbidden_tokens": range(1, SIZE), "min_new_tokens": 1}, (0,), "must leave a token .*vocabulary_size=11"),
        ({"forced_tokens": {5: 1}}, (), r"must be below `max_new_tokens`. .*=\{5: 1\}, max_new_tokens=5"),
        ({"forced_tokens": {4: 1, -1: 2}}, (), r"two tokens for one index, .*\{-1: 2, 4: 1\}, max_new_tokens=5"),
        (
            {"forced_tokens": {1: 3}, "forbidden_tokens": [3]},
            (),
            r"not be in `forbidden_tokens`. .*\{1: 3\}, 3 in both",
        ),
        (
            {"forced_tokens": {1: 2}, "min_new_tokens": 2},
            (2,),
            r"at an index below `min_new_.*\{1: 2\}, min_new_tokens=2",
        ),
    ],
)
def test_rules_that_contradict_are_refused(options, stop, message):
    with pytest.raises(ValueError, match=message):
        Constraints(**options).check(5, SIZE, stop)


def test_rules_that_can_be_kept_pass():
    rules = Constraints(min_new_tokens=4, forced_tokens={4: 2, -1: 9, 0: 3}, forbidden_tokens=[(2, 2), 7])
    rules.check(6, SIZE, (2, 9))
    Constraints(min_new_tokens=5, forced_tokens={-1: 2}).check(5, SIZE, (2,))  # as transformers: forced all the same
    Constraints(forced_tokens={4: 2, -1: 2}).check(5, SIZE, ())

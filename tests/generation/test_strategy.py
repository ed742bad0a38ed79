"""A strategy of one's own generates in Python, as a stream and in an exported model."""

from dataclasses import dataclass

import numpy as np
import pytest
from keras import ops

from keras_tx.generation import Beam, Greedy, Sample, Speculative, Strategy, generate, stream
from tests.generation import built
from tests.generation.built import V, logits_of
from tests.generation.driver import drive, markov
from tests.tools import to_numpy

LM = "untied"

PROMPTS, NEW = [[5, 7, 11, 3, 17], [9], [2, 2, 13]], 6


@dataclass(frozen=True)
class Ranked(Strategy):
    """Takes the token in the place `rank`, the likeliest at even steps."""

    rank: int = 2

    def choose(self, scores, state):
        tokens = ops.top_k(scores, self.rank)[1]
        return ops.where(state["step"] % 2 == 0, tokens[:, 0], tokens[:, -1])


@dataclass(frozen=True)
class Noisy(Strategy):
    def noise(self, batch_size, num_new):
        return np.zeros((num_new, batch_size), "float32")


@dataclass
class Unhashable(Strategy):
    tokens: list


def by_hand(model, rows, rank=2):
    """What `Ranked` chooses but for the padding id, by the whole model for each token.

    The whole model takes this id for padding, `generate` a generated one for a token.
    """
    rows = [list(row) for row in rows]
    for step in range(NEW):
        for row, logits in zip(rows, logits_of(model, rows), strict=True):
            best = 1 + np.argsort(-logits[len(row) - 1][1:])
            row.append(int(best[rank - 1 if step % 2 else 0]))
    return rows


def test_it_generates_and_streams_what_a_loop_by_hand_gives(lm):
    expected = by_hand(lm, PROMPTS)
    options = {"max_new_tokens": NEW, "forbidden_tokens": [0], "jit_compile": False}
    found, scores = generate(lm, PROMPTS, Ranked(), return_scores=True, **options)
    assert found == expected and scores.shape == (3,)
    assert np.stack(list(stream(lm, PROMPTS, Ranked(), **options)), 1).tolist() == [row[-NEW:] for row in expected]
    assert lm.generate(PROMPTS[1], Ranked(2), **options) == expected[1]


@pytest.mark.slow
@pytest.mark.tensorflow
def test_an_exported_model_generates_with_it_and_with_a_draft_model(lm, tmp_path):
    import tensorflow as tf

    import keras_tx

    strategy = Speculative(Ranked(), draft_model=built.made("nested"), num_draft_tokens=2)
    options = {"strategy": strategy, "max_new_tokens": NEW, "forbidden_tokens": [0]}
    version = keras_tx.serving.export(lm, tmp_path / "ranked", generation=options)
    signature = tf.saved_model.load(str(version)).signatures["serving_default"]
    ids = np.array([row + [0] * (5 - len(row)) for row in PROMPTS], "int32")
    lengths = np.array([len(row) for row in PROMPTS], "int32")
    answers = signature(token_ids=tf.constant(ids), lengths=tf.constant(lengths))
    assert answers["token_ids"].numpy().tolist() == [row[-NEW:] for row in by_hand(lm, PROMPTS)]


@pytest.mark.tensorflow
def test_noise_of_ones_own_cannot_be_exported(lm):
    from keras_tx.serving.text_generator import TextGenerator

    message = "a strategy without a `noise` method .* Received: strategy=Noisy"
    with pytest.raises(ValueError, match=message):
        TextGenerator(lm, generation={"strategy": Noisy()})


def test_a_strategy_that_is_none_or_cannot_be_a_key_is_refused(lm):
    with pytest.raises(TypeError, match=r"must be `Greedy\(\)`, .* or another `Strategy`. Received: strategy='greedy'"):
        generate(lm, PROMPTS, "greedy", max_new_tokens=NEW)
    with pytest.raises(TypeError, match=r"must be hashable, .* Received: strategy=Unhashable\(tokens=\[3\]\)"):
        generate(lm, PROMPTS, Unhashable([3]), max_new_tokens=NEW)


def test_a_strategy_without_a_choice_says_so():
    with pytest.raises(NotImplementedError, match="Strategy must define `choose`"):
        drive(Strategy(), markov(5), [[1, 2]], new=2, size=5)
    assert to_numpy(Greedy().choose(np.array([[1.0, 3.0, 3.0]]), {})) == [1]


@dataclass(frozen=True)
class Wrong(Strategy):
    kind: str

    def choose(self, scores, state):
        tokens = ops.argmax(scores, axis=-1)
        return {"none": None, "floats": ops.max(scores, axis=-1), "scores": scores, "column": tokens[:, None]}[
            self.kind
        ]


@pytest.mark.parametrize(
    ("kind", "received"),
    [
        ("none", "None"),
        ("floats", r"dtype float32, shape \(3,\)"),
        ("scores", "dtype float32, shape"),
        ("column", r"dtype int\d\d, shape \(3, 1\)"),
    ],
)
def test_what_is_no_token_for_each_row_is_refused(lm, kind, received):
    with pytest.raises(ValueError, match=f"`choose` of Wrong must return integers of the shape .*Received: {received}"):
        generate(lm, PROMPTS, Wrong(kind), max_new_tokens=NEW, jit_compile=False)


@dataclass(frozen=True)
class Outside(Strategy):
    """Returns an id that is none in the row of the first prompt, at the third step."""

    token: int

    def choose(self, scores, state):
        tokens = ops.cast(ops.argmax(scores, axis=-1), "int32")
        is_here = ops.logical_and(ops.arange(3) == 0, state["step"] == 2)
        return ops.where(is_here, self.token, tokens)


@pytest.mark.parametrize("token", [-1, V, 1000])
def test_ids_outside_of_the_vocabulary_are_refused(lm, eager, token):
    message = rf"`choose` of Outside must return ids in \[0, {V}\), the vocabulary. Received: {token}"
    drafted = Speculative(Outside(token), draft_model=built.made("nested"), num_draft_tokens=3)
    for strategy in (Outside(token), Speculative(Outside(token)), drafted):
        with pytest.raises(ValueError, match=message):
            generate(lm, PROMPTS, strategy, max_new_tokens=NEW)
    pieces = stream(lm, PROMPTS, Outside(token), max_new_tokens=NEW)
    assert len([next(pieces), next(pieces)]) == 2
    with pytest.raises(ValueError, match=message):
        next(pieces)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_compiled_loop_stops_at_an_id_outside_of_the_vocabulary(lm, jit_compile):
    with pytest.raises(ValueError, match=rf"`choose` of Outside must return ids in \[0, {V}\), .*Received: 999"):
        generate(lm, PROMPTS, Outside(999), max_new_tokens=NEW, jit_compile=jit_compile)


def test_an_id_outside_of_the_vocabulary_after_the_end_does_not_matter(lm, eager):
    expected = generate(lm, PROMPTS, max_new_tokens=2)
    stop = expected[0][-1]
    rows = generate(lm, PROMPTS, Outside(1000), stop_tokens=[stop], max_new_tokens=NEW)
    assert rows == generate(lm, PROMPTS, stop_tokens=[stop], max_new_tokens=NEW)


@dataclass(frozen=True)
class InNumPy(Strategy):
    def choose(self, scores, state):
        import tensorflow as tf

        return tf.numpy_function(lambda x: x.argmax(axis=-1), [scores], tf.int64)  # of unknown rank


@pytest.mark.tensorflow
def test_tokens_of_a_shape_that_a_graph_does_not_know_are_taken(lm):
    options = {"max_new_tokens": NEW, "jit_compile": False}
    assert generate(lm, PROMPTS, InNumPy(), **options) == generate(lm, PROMPTS, **options)


def test_numbers_of_numpy_are_numbers():
    ours = Sample(np.float32(0.5), top_k=np.int64(5), top_p=np.float64(0.9), min_p=np.float32(0), seed=np.int64(-3))
    plain = Sample(0.5, top_k=5, top_p=0.9, min_p=0.0, seed=-3)
    assert ours == plain
    np.testing.assert_array_equal(ours.noise(2, 3), plain.noise(2, 3))
    flag = np.bool_(True)
    ours = Beam(np.int32(4), length_penalty=np.float32(0.5), early_stopping=flag, num_return_sequences=np.int64(2))
    assert repr(ours) == repr(Beam(4, length_penalty=0.5, early_stopping=True, num_return_sequences=2))


def test_numbers_of_numpy_are_options(lm, eager):
    options = {
        "max_new_tokens": np.int64(4),
        "min_new_tokens": np.int32(2),
        "stop_tokens": np.int64(3),
        "repetition_penalty": np.float32(1.5),
        "no_repeat_ngram_size": np.int64(2),
        "forbidden_tokens": [np.int64(0), (np.int32(5), np.int64(6))],
        "forced_tokens": {np.int64(1): np.int64(V - 1)},
    }
    plain = {"max_new_tokens": 4, "min_new_tokens": 2, "stop_tokens": 3, "repetition_penalty": 1.5}
    plain |= {"no_repeat_ngram_size": 2, "forbidden_tokens": [0, (5, 6)], "forced_tokens": {1: V - 1}}
    rows = generate(lm, PROMPTS, jit_compile=np.bool_(False), **options)
    assert rows == generate(lm, PROMPTS, jit_compile=False, **plain)
    assert len(vars(lm)["_keras_tx_loops"][1][None][1]) >= 1

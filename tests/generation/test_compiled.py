"""Strategies and constraints in one compiled loop give the results of single steps."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.generation import Greedy, compiled_loop, stream
from keras_tx.generation.beam import Beam
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.decode_loop import DecodeLoop
from keras_tx.generation.sample import Sample
from keras_tx.layers import xla
from keras_tx.models import CausalLM
from tests.generation.built import naive
from tests.generation.driver import drive, markov
from tests.tools import assert_close, randomize, to_numpy

SIZE, NEW, LIMIT, STOP, PAD = 17, 11, 9, (2, 5), 1
RULES = Constraints(
    repetition_penalty=1.2,
    no_repeat_ngram_size=2,
    min_new_tokens=2,
    forbidden_tokens=[3, (4, 7), (6, 7, 8)],
    forced_tokens={0: 9, -1: 2},
)
TABLE = markov(SIZE, order=1)(np.arange(SIZE)[:, None], None)
IDS = np.random.default_rng(1).integers(4, SIZE, size=(3, 5)).astype("int32")
REAL = np.arange(5) >= np.array([[0], [2], [4]])
IDS[~REAL] = PAD


def program(strategy, rules):
    """A whole generation as one function; the model is a table of the logits after each token."""

    def run(ids, real, limit, noise=None):
        state = strategy.initial_state(ids, real, NEW, limit, SIZE, padding_id=PAD, noise=noise)
        tokens = ops.repeat(ids[:, -1], strategy.rows_per_prompt, axis=0)

        def step(state, tokens):
            logits = ops.take(ops.convert_to_tensor(TABLE), tokens, axis=0)
            state, tokens, _ = strategy.advance(logits, state, rules, STOP)
            return state, tokens

        state, _ = ops.while_loop(lambda state, tokens: strategy.is_running(state), step, (state, tokens))
        return strategy.result(state)

    return run


def arguments(strategy):
    noise = strategy.noise(len(IDS), NEW)
    arrays = [IDS, REAL, np.int32(LIMIT)] + ([] if noise is None else [noise])
    return [ops.convert_to_tensor(array) for array in arrays]


def step_by_step(strategy, rules):
    run = {"new": NEW, "limit": LIMIT, "size": SIZE, "stop": STOP, "padding": PAD, "constraints": rules}
    return drive(strategy, lambda ids, real: TABLE[ids[:, -1]], IDS, REAL, **run)[:2]


@pytest.mark.parametrize(
    ("strategy", "rules"),
    [(Sample(0.8, top_k=7, min_p=0.01, seed=3), Constraints()), (Beam(3, num_return_sequences=2), RULES)],
    ids=["sample", "beam"],
)
def test_a_compiled_loop_gives_what_single_steps_give(strategy, rules):
    backend = keras.backend.backend()
    if backend == "torch":
        pytest.skip("PyTorch runs the loop as it is")
    if backend == "jax":
        import jax

        compiled = jax.jit(program(strategy, rules))
    else:
        import tensorflow as tf

        compiled = tf.function(program(strategy, rules), jit_compile=True)
    ids, scores = compiled(*arguments(strategy))
    expected_ids, expected_scores = step_by_step(strategy, rules)
    np.testing.assert_array_equal(to_numpy(ids), expected_ids)
    assert_close(scores, expected_scores, atol=1e-4)


@pytest.mark.tensorflow
def test_graphs_of_generate_have_hardly_any_constant_twice(monkeypatch):
    """Without sharing them, they are half of the operations that the first call has to make."""
    import tensorflow as tf

    graphs = []

    def function(*args, **options):
        traced = tf.function(*args, **options)

        def get_concrete_function(*args):
            made = traced.get_concrete_function(*args)
            graphs.append(made.graph.as_graph_def())
            return made

        return SimpleNamespace(get_concrete_function=get_concrete_function)

    monkeypatch.setattr(compiled_loop, "tf", SimpleNamespace(function=function, device=tf.device, zeros=tf.zeros))
    model = CausalLM(SIZE, num_layers=3, hidden_dim=8, num_heads=2, intermediate_dim=12)
    model.generate(IDS[2:, 1:], max_new_tokens=4, jit_compile=True)
    assert len(graphs) == 2
    for graph in graphs:
        made, different = 0, 0
        for nodes in (graph.node, *(one.node_def for one in graph.library.function)):
            constants = [node.attr["value"].SerializeToString() for node in nodes if node.op == "Const"]
            made, different = made + len(constants), different + len({*constants})
        assert 10 < different and made <= 1.2 * different


@pytest.fixture
def traced(monkeypatch):
    """The names of the functions that are traced, in order."""
    names = []

    def recorded(name, method):
        return lambda *arguments: names.append(name) or method(*arguments)

    for name in ("prefill", "decode"):
        monkeypatch.setattr(DecodeLoop, name, recorded(name, getattr(DecodeLoop, name)))
    return names


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("where", "name", "value", "soon"),
    [
        (compiled_loop, "MOST_ZEROS", 2**28, True),
        (compiled_loop, "MOST_ZEROS", 100, False),  # bytes, less than the cache has
        (xla, "has_only_cpus", lambda: False, False),
        (xla, "keeps_programs", lambda: True, False),
    ],
    ids=["small", "large", "gpu", "kept"],
)
def test_decode_steps_are_compiled_while_the_first_prefill_is(where, name, value, soon, traced, monkeypatch):
    monkeypatch.setattr(where, name, value)
    model = randomize(CausalLM(SIZE, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=12), scale=0.4)
    tokens = stream(model, IDS[2], max_new_tokens=NEW, forbidden_tokens=[0], jit_compile=False)
    found = [next(tokens)]
    assert traced == (["prefill", "decode"] if soon else ["prefill"])
    found += tokens
    assert traced == ["prefill", "decode"]
    assert found == naive(model, [IDS[2].tolist()], NEW)[0][5:]


def test_whether_tensorflow_keeps_programs_is_read_when_it_is_asked(monkeypatch):
    for flags in ("", "--tf_xla_auto_jit=2"):
        monkeypatch.setenv("TF_XLA_FLAGS", flags)
        assert not xla.keeps_programs()
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2 --tf_xla_persistent_cache_directory=programs")
    assert xla.keeps_programs()
    monkeypatch.delenv("TF_XLA_FLAGS")
    assert not xla.keeps_programs()


@pytest.mark.tensorflow
def test_an_error_in_decode_steps_is_raised_by_the_first_call_and_by_later_ones():
    class Broken(Greedy):
        def is_running(self, state):
            raise ArithmeticError("is_running")

    model = CausalLM(SIZE, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=12)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="is_running"):
            model.generate(IDS[2:], Broken(), max_new_tokens=4, jit_compile=False)
    assert len(model.generate(IDS[2], max_new_tokens=4, jit_compile=False)) == 9

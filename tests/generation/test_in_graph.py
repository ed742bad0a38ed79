"""Generation in a TensorFlow graph for any shapes, NumPy's random numbers in it, and strategies for each row."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_tx.generation import Beam, Greedy, Sample, Speculative, generate, in_graph, philox
from keras_tx.generation.config import GenerationConfig
from keras_tx.generation.constraints import Constraints
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.per_row import PerRowStrategy
from keras_tx.generation.speculative import without_drafts
from keras_tx.internals.tensorflow_graphs import shared_shapes
from keras_tx.layers.exported_weights import exported_weights
from tests.generation import built
from tests.generation.driver import drive, markov
from tests.tools import assert_close, normal, to_numpy

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

V, NEW = built.V, 6
PROMPTS = [[5, 7, 11, 3, 17], [9], [2, 2, 13]]
SOURCES = [[4, 3, 21], [8, 30, 6, 1, 36], [12]]
STOP = {"stop_tokens": (8, 11)}
RULES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "forbidden_tokens": [0, (5, 6)], **STOP}
RULES |= {"min_new_tokens": 2, "forced_tokens": {0: 9, -1: 8}}


def ragged(rows):
    return tf.ragged.constant(rows, dtype=tf.int32)


def traced(model, strategy, **options):
    """A graph of prompts and sources of any number and any length."""
    incremental_model = IncrementalModel(model)
    config = GenerationConfig(incremental_model, strategy, max_new_tokens=NEW, **options)

    @tf.function(
        input_signature=[tf.RaggedTensorSpec([None, None], tf.int32), tf.RaggedTensorSpec([None, None], tf.int32)]
    )
    def run(prompts, sources):
        noise = None
        if isinstance(strategy, Sample):
            noise = philox.uniform(tf.fill([prompts.nrows()], tf.constant(strategy.seed, tf.int64)), NEW)
        sources = [in_graph.right_padded(sources, 0)] if incremental_model.sources else []
        return in_graph.generate(config.decode_loop(NEW), prompts, sources, tf.constant(NEW), noise)

    with shared_shapes():  # as exports are traced
        return run.get_concrete_function()


@pytest.mark.parametrize(
    ("name", "strategy", "rules"),
    [
        ("biases_and_a_skip", Beam(3, num_return_sequences=2), RULES),
        ("nested", Sample(0.8, top_k=9, top_p=0.9, min_p=0.02, seed=3), STOP),
        ("encoder_and_decoder", Beam(2), STOP),
        ("packed", Greedy(), RULES),
        ("seq2seq", Speculative(num_draft_tokens=3), STOP),  # with a draft model
    ],
)
@pytest.mark.usefixtures("eager")
def test_a_graph_for_any_shapes_generates_what_generate_does(name, strategy, rules):
    model = built.made(name)
    if isinstance(strategy, Speculative):
        strategy = replace(strategy, draft_model=built.made("untied"))
    run = traced(model, strategy, **rules)
    nodes = run.graph.as_graph_def()
    nodes = [*nodes.node, *(node for one in nodes.library.function for node in one.node_def)]
    assert not [node.op for node in nodes if "Xla" in node.op or "PyFunc" in node.op]
    count = 1 if isinstance(strategy, Sample) else 3  # in a graph each row has the noise of a first row
    names = [x.name for x in model.inputs]
    inputs = dict(zip(names, (SOURCES, PROMPTS), strict=True)) if len(names) > 1 else PROMPTS[:count]
    options = {**rules, "max_new_tokens": NEW, "jit_compile": False, "return_scores": True}
    rows, scores = generate(model, inputs, without_drafts(strategy), **options)
    ids, found = run(ragged(PROMPTS), ragged(SOURCES))
    lengths = in_graph.lengths(ids, rules["stop_tokens"], NEW).numpy()
    for index, prompt in enumerate(PROMPTS[:count]):
        expected = rows[index] if ids.shape[1] > 1 else [rows[index]]
        for n, row in enumerate(expected):
            new = row if isinstance(inputs, dict) else row[len(prompt) :]
            assert ids[index, n, : lengths[index, n]].numpy().tolist() == new
    assert_close(np.squeeze(found[:count]), np.squeeze(scores), atol=1e-4)
    for index, (prompt, source) in enumerate(zip(PROMPTS, SOURCES, strict=True)):
        alone, score = run(ragged([prompt]), ragged([source]))
        np.testing.assert_array_equal(alone[0], ids[index])
        assert_close(score[0], found[index], atol=1e-5)


def test_random_numbers_are_those_of_numpys_philox():
    seeds = np.array([0, 1, -3, 2**62 + 7, -(2**63), 987654321], "int64")
    for count in (1, 7, 8, 31):
        drawn = philox.uniform(tf.constant(seeds), count)
        strategies = [Sample(seed=int(seed)) for seed in seeds]
        np.testing.assert_array_equal(drawn, np.concatenate([one.noise(1, count) for one in strategies], axis=1))
    assert philox.uniform(tf.zeros([0], tf.int64), 5).shape == (5, 0)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 2.5]),
            st.sampled_from([0, 1, 2, 5, 36, 37, 99]),
            st.sampled_from([0.05, 0.5, 0.9, 1.0]),
            st.integers(0, 2**24 - 1),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 1000),
)
def test_each_row_is_chosen_as_by_a_strategy_of_its_own(rows, seed):
    scores = normal(len(rows), 37, seed=seed) * 3
    scores[:, 5] = -np.inf
    temperature, top_k, top_p, noise = (np.array(column) for column in zip(*rows, strict=True))
    noise = (noise / 2**24).astype("float32")
    by_row = PerRowStrategy(
        tf.constant(temperature, "float32"), tf.constant(top_k, "int32"), tf.constant(top_p, "float32")
    )
    state = {"noise": tf.constant(noise[None]), "step": tf.constant(0)}
    found = by_row.choose(tf.constant(scores), state).numpy()
    for index, (heat, k, p, _) in enumerate(rows):
        strategy = Sample(heat, top_k=k or None, top_p=p) if heat else Greedy()
        own = {"noise": tf.constant(noise[None, index : index + 1]), "step": tf.constant(0)}
        assert found[index] == to_numpy(strategy.choose(tf.constant(scores[index : index + 1]), own))[0]


def test_each_row_has_a_limit_of_its_own():
    size, limits = 17, np.array([2, 5, 1, 4], "int32")
    model = markov(size, order=1)
    ids = np.random.default_rng(3).integers(1, size, (4, 3)).astype("int32")
    rules = Constraints(forced_tokens={-1: 7}, min_new_tokens=1, no_repeat_ngram_size=3)
    run = {"new": 6, "size": size, "stop": (2,), "constraints": rules}
    together, scores, state = drive(Greedy(), model, ids, limit=ops.convert_to_tensor(limits), **run)
    assert state["done"].all() and state["step"] == max(limits)
    for index, limit in enumerate(limits):
        alone, score, _ = drive(Greedy(), model, ids[index : index + 1], limit=int(limit), **run)
        np.testing.assert_array_equal(together[index], alone[0])
        assert_close(scores[index], score[0], atol=1e-5)
        assert together[index, 0, limit - 1] == 7 or 2 in together[index, 0]


@given(
    minimum=st.integers(0, 5),
    forced=st.dictionaries(st.integers(-1, 6), st.integers(3, 5), max_size=4),
)
def test_the_least_limit_is_the_first_that_the_rules_allow(minimum, forced):
    rules = Constraints(min_new_tokens=minimum, forced_tokens=forced)

    def allowed(limit):
        try:
            rules.check(limit, 10, (2,))
        except ValueError:
            return False
        return True

    assert [limit for limit in range(1, 12) if allowed(limit)] == list(range(rules.least_new_tokens, 12))


def test_rows_end_in_the_same_place():
    ids, real = in_graph.left_padded(ragged([[3], [4, 5, 6], [7, 8]]), 9)
    np.testing.assert_array_equal(ids, [[9, 9, 3], [4, 5, 6], [9, 7, 8]])
    np.testing.assert_array_equal(real, [[0, 0, 1], [1, 1, 1], [0, 1, 1]])
    ids, real = in_graph.left_padded(tf.RaggedTensor.from_tensor(tf.zeros([0, 0], tf.int32)), 9)
    assert ids.shape == real.shape == (0, 1)
    assert in_graph.right_padded(ragged([[3], [4, 5, 6]]), 9).numpy().tolist() == [[3, 9, 9], [4, 5, 6]]
    ids, real = in_graph.left_padded(ragged([[3], [4, 5]]), 9, 4)
    np.testing.assert_array_equal(ids, [[9, 9, 9, 3], [9, 9, 4, 5]])
    np.testing.assert_array_equal(real, [[0, 0, 0, 1], [0, 0, 1, 1]])
    assert in_graph.ragged_rows(tf.constant([[0, 3, 0], [4, 0, 5]]), 0).to_list() == [[3], [4, 5]]
    assert in_graph.ragged_rows(tf.constant([[0, 3]]), None).to_list() == [[0, 3]]


def test_rows_of_an_export_are_at_least_eight_tokens_together():
    def least(num_rows, limit=None):
        return tf.function(lambda: tf.convert_to_tensor(in_graph.least_columns(num_rows, limit)))

    assert least(1)().numpy() == 1
    with exported_weights(constants=False):
        assert [least(rows)().numpy() for rows in (0, 1, 2, 3, 7, 8, 9)] == [8, 8, 4, 3, 2, 1, 1]
        assert [least(rows, 5)().numpy() for rows in (1, 2)] == [5, 4]
        model = IncrementalModel(built.encoder_and_decoder())
        for model.buckets_sources, expected in ((True, 4), (False, 1)):
            graph = tf.function(lambda: tf.convert_to_tensor(in_graph.least_source_columns(2, model)))
            assert graph().numpy() == expected


def test_lengths_count_the_stop_token_and_no_more_than_the_limit():
    ids = tf.constant([[[4, 2, 5, 2]], [[4, 4, 4, 4]], [[4, 4, 4, 3]]])
    assert in_graph.lengths(ids, (2, 3), 4).numpy().tolist() == [[2], [4], [4]]
    assert in_graph.lengths(ids, (2, 3), tf.constant([[1], [3], [3]])).numpy().tolist() == [[1], [3], [3]]
    assert in_graph.lengths(ids, (), 4).numpy().tolist() == [[4], [4], [4]]


def test_a_step_without_xla_transposes_nothing_that_grows_and_copies_no_buffer():
    definition = traced(built.language_model(), Greedy()).graph.as_graph_def()
    bodies = [one for one in definition.library.function if "while_body" in one.signature.name]
    body = max(bodies, key=lambda one: len(one.node_def))
    nodes = {node.name: node for node in body.node_def}
    reached, places = set(), [name.split(":")[0] for name in body.ret.values()]
    while places:
        name = places.pop()
        if name in nodes and name not in reached:
            reached.add(name)
            places += [source.lstrip("^").split(":")[0] for source in nodes[name].input]
    kinds = [nodes[name].op for name in reached]
    assert kinds.count("TensorStridedSliceUpdate") == 2 and "TensorScatterUpdate" not in kinds
    assert kinds.count("Bitcast") == 6  # both write wide numbers: of the buffer, of the token, and back
    assert kinds.count("BatchMatMulV3") == 2 and "Einsum" not in kinds
    assert kinds.count("Transpose") == 1  # of the logits, not of the table

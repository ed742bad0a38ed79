"""Speculative decoding: the tokens of the strategy alone, in fewer steps of the model."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import layers
from keras_tx.generation import Beam, Greedy, Sample, Speculative, Strategy, generate, stream
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.locks import all_locked, lock_of
from keras_tx.models import CausalLM, Seq2Seq
from tests.generation import built
from tests.generation.built import LENGTH, SOURCE_V, V
from tests.tools import assert_close, randomize

PROMPTS, NEW, DRAFTS = [[5, 7, 11, 3, 17, 5, 7], [9], [2, 2, 13]], 11, 3
SOURCES = [[4, 3, 21], [8, 28, 6, 1, 26], [12]]
RULES = {"min_new_tokens": 3, "stop_tokens": (8, 11, 5), "repetition_penalty": 1.2, "no_repeat_ngram_size": 4}
RULES |= {"forbidden_tokens": [0, (5, 6)], "forced_tokens": {1: 9}}
EAGER = {"max_new_tokens": NEW, "jit_compile": False}
SHORT = {**EAGER, "max_new_tokens": 6}  # two steps with right drafts; an eager step takes a twentieth of a second


def permuted(size=V, sources=False):
    """A model that continues each token with a fixed other one, and that other tokens do not change."""
    ids, source = built.ids_of("target"), built.ids_of("source")
    order = np.random.default_rng(3).permutation(size)
    following = np.empty(size, int)
    following[order] = np.roll(order, -1)  # one cycle of all tokens
    x = layers.Decoder(1, 5, 1)(layers.TokenEmbedding(size, 2, padding_id=None)(ids)) * 0.0
    if sources:
        memory = layers.TokenEmbedding(size, 2)(source)
        x = x + layers.MultiHeadAttention(1, 2)(x, memory) * 0.0
    x = keras.layers.Dense(size)(x) + layers.TokenEmbedding(size, size, padding_id=None, name="table")(ids)
    model = keras.Model([source, ids] if sources else ids, x)
    model.get_layer("table").set_weights([9.0 * np.eye(size)[following]])
    return model, following


def chain(following, token, count):
    """A token and the `count` tokens after it."""
    row = [int(token)]
    for _ in range(count):
        row.append(int(following[row[-1]]))
    return row


def steps_of(monkeypatch, run):
    """The number of tokens in each call of the model, and what `run()` returns."""
    lengths, step = [], IncrementalModel.step

    def counted(self, ids, *args, **kwargs):
        lengths.append(int(ids.shape[1]))
        return step(self, ids, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(IncrementalModel, "step", counted)
        patched.setattr(IncrementalModel, "check_drafts", lambda self: None)  # which takes steps, too
        return lengths, run()


@pytest.mark.parametrize("name", built.MODELS)
@pytest.mark.usefixtures("eager")
def test_greedy_tokens_are_those_of_greedy_alone(name, draft_model):
    model = built.made(name)
    names, inputs = [x.name for x in model.inputs], PROMPTS
    if len(names) > 1:
        inputs = {names[0]: SOURCES, names[1]: PROMPTS}
    for rows, rules, drafts, new in ((slice(None), RULES, (None, draft_model), 6), (slice(0, 1), {}, (None,), 4)):
        given = {key: value[rows] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[rows]
        options = {**EAGER, **rules, "max_new_tokens": new, "return_scores": True}
        expected, scores = generate(model, given, **options)
        for draft in drafts:
            strategy = Speculative(draft_model=draft, num_draft_tokens=2)
            found, found_scores = generate(model, given, strategy, **options)
            assert found == expected
            assert_close(found_scores, scores, atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_samples_with_looked_up_drafts_are_those_of_the_seed(lm):
    for sample in (Sample(0.7, top_k=9, top_p=0.9, min_p=0.01, seed=3), Sample(1.5, seed=-2)):
        for rows in (PROMPTS, PROMPTS[:1]):
            expected, scores = generate(lm, rows, sample, return_scores=True, stop_tokens=8, **SHORT)
            strategy = Speculative(sample, num_draft_tokens=2)
            found, found_scores = generate(lm, rows, strategy, return_scores=True, stop_tokens=8, **SHORT)
            assert found == expected
            assert_close(found_scores, scores, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.usefixtures("eager")
def test_right_drafts_save_steps(monkeypatch, batch_size):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX calls the model only when it compiles")
    model, following = permuted()
    prompts = [chain(following, token, V + 2) for token in range(batch_size)]  # the last tokens occurred before
    expected = generate(model, prompts, **EAGER)
    for base, draft in ((Greedy(), None), (Greedy(), model), (Sample(0.2, seed=1), model)):
        strategy = Speculative(base, num_draft_tokens=DRAFTS, draft_model=draft)
        lengths, found = steps_of(monkeypatch, lambda strategy=strategy: generate(model, prompts, strategy, **EAGER))
        assert found == expected  # also samples: the model is certain
        # The prefill gives a token, and each step four: three drafts and the one after them.
        assert lengths.count(DRAFTS + 1) == -(-(NEW - 1) // (DRAFTS + 1)) == 3
        if draft:  # three steps of the draft model before each, the first over two tokens
            assert lengths[2:] == [2, 1, 1, DRAFTS + 1] * 3
        else:
            assert lengths[1:] == [DRAFTS + 1] * 3


@pytest.mark.usefixtures("eager")
def test_wrong_drafts_cost_no_token(monkeypatch):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX calls the model only when it compiles")
    (model, _), (other, _) = permuted(), permuted()
    table = other.get_layer("table")
    table.set_weights([np.roll(table.get_weights()[0], 1, axis=1)])  # every token is followed by another one
    strategy = Speculative(draft_model=other, num_draft_tokens=DRAFTS)
    expected = generate(model, [4], **EAGER)
    lengths, found = steps_of(monkeypatch, lambda: generate(model, [4], strategy, **EAGER))
    assert found == expected
    assert lengths.count(DRAFTS + 1) == NEW - 1


@pytest.mark.usefixtures("eager")
def test_a_batch_advances_by_the_fewest_right_drafts(monkeypatch):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX calls the model only when it compiles")
    model, following = permuted()
    repeating = chain(following, 4, 2 * V)
    later = chain(following, repeating[-1], 20)
    start, stop = later[14], later[17]  # the third new token of a row without right drafts
    strategy, prompts = Speculative(num_draft_tokens=DRAFTS), [repeating, [start]]
    options = {**EAGER, "stop_tokens": stop}
    expected = generate(model, prompts, **options)
    lengths, found = steps_of(monkeypatch, lambda: generate(model, prompts, strategy, **options))
    assert found == expected
    # After the token of the prefill, one token; then that row ends, and the other one gets 4 + 4 + 1.
    assert lengths[1:] == [DRAFTS + 1] * 4


@pytest.mark.usefixtures("eager")
def test_samples_of_a_draft_model_keep_the_first_token_of_the_seed_and_all_rules(lm, draft_model):
    sample = Sample(0.9, top_k=9, seed=3)
    strategy = Speculative(sample, draft_model=draft_model, num_draft_tokens=DRAFTS)
    alone, found = (generate(lm, PROMPTS, one, **SHORT, **RULES) for one in (sample, strategy))
    again = generate(lm, PROMPTS, strategy, **SHORT, **RULES)
    assert found == again
    for row, plain, prompt in zip(found, alone, PROMPTS, strict=True):
        new = row[len(prompt) :]
        assert new[0] == plain[len(prompt)] and new[1] == 9 and 0 not in new
        assert not set(new[:2]) & {8, 11, 5}
        stops = [i for i, token in enumerate(new) if token in (8, 11, 5)]
        assert stops == [len(new) - 1] if len(new) < SHORT["max_new_tokens"] else stops in ([], [len(new) - 1])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "rules", [{"no_repeat_ngram_size": 3}, {"forbidden_tokens": [(5, 6), 0]}], ids=lambda x: [*x][0]
)
def test_rules_of_the_last_tokens_hold_up_to_the_last_slot(lm, draft_model, rules):
    options = {**EAGER, "max_new_tokens": 16, **rules}  # all slots of the buffer
    found = generate(lm, PROMPTS, Speculative(draft_model=draft_model, num_draft_tokens=7), **options)
    assert found == generate(lm, PROMPTS, **options)


@pytest.mark.usefixtures("eager")
def test_a_stream_gets_all_right_drafts_from_one_step(monkeypatch):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX calls the model only when it compiles")
    model, _ = permuted()
    strategy = Speculative(draft_model=model, num_draft_tokens=DRAFTS)
    expected = generate(model, [4], **EAGER)
    lengths, tokens = steps_of(monkeypatch, lambda: list(stream(model, [4], strategy, **EAGER)))
    assert [4, *tokens] == expected
    assert lengths.count(DRAFTS + 1) == 3


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("number", [14, 17, 22])  # the loop has room for more new tokens than are asked for
def test_drafts_beyond_the_learned_positions_are_no_error(draft_model, number):
    model = built.made("learned")
    prompt = ([5, 7] * 11)[:number]
    options = {"max_new_tokens": LENGTH - len(prompt), "jit_compile": False}
    expected = generate(model, prompt, **options)
    for given in ({}, {"draft_model": model}, {"draft_model": draft_model}):
        assert generate(model, prompt, Speculative(num_draft_tokens=9, **given), **options) == expected


@pytest.mark.usefixtures("eager")
def test_sources_with_the_same_vocabulary_are_searched(monkeypatch):
    if keras.backend.backend() == "jax":
        pytest.skip("JAX calls the model only when it compiles")
    model, following = permuted(sources=True)
    source = chain(following, following[0], NEW + 2)  # without the padding id
    inputs = {"source": [source], "target": [source[:1]]}
    expected = generate(model, inputs, **EAGER)
    assert expected == [source[1 : NEW + 1]]
    strategy = Speculative(num_draft_tokens=DRAFTS)
    lengths, found = steps_of(monkeypatch, lambda: generate(model, inputs, strategy, **EAGER))
    assert found == expected and lengths[1:] == [DRAFTS + 1] * 3


@pytest.mark.usefixtures("eager")
def test_a_draft_model_may_have_the_same_sources():
    sizes = {"num_layers": 1, "hidden_dim": 8, "num_heads": 2, "intermediate_dim": 9}
    model, draft = (randomize(Seq2Seq(SOURCE_V, V, **sizes), seed=seed, scale=0.4) for seed in (1, 2))
    options = {**SHORT, "start_token": 1}
    strategy = Speculative(draft_model=draft, num_draft_tokens=DRAFTS)
    assert generate(model, SOURCES, strategy, **options) == generate(model, SOURCES, **options)


def test_strategies_that_differ_in_the_seed_share_a_loop(lm, draft_model):
    first, second = (Speculative(Sample(seed=seed), draft_model=draft_model) for seed in (1, 2))
    assert first == second and hash(first) == hash(second)
    assert first != Speculative(Sample(seed=1)) != Speculative(Sample(seed=1), num_draft_tokens=2)


@dataclass(frozen=True)
class Reordering(Strategy):
    def advance(self, logits, state, constraints, stop_tokens):
        state, tokens, _ = Greedy().advance(logits, state, constraints, stop_tokens)
        return state, tokens, ops.zeros_like(tokens)


@pytest.mark.usefixtures("eager")
def test_what_cannot_be_speculative_is_refused(lm):
    for strategy in (Beam(2), Speculative()):
        message = r"must keep one row for each prompt, unlike `Beam`, and not be `Speculative`. Received: strategy="
        with pytest.raises(ValueError, match=message + type(strategy).__name__):
            Speculative(strategy)
    with pytest.raises(TypeError, match=r"`strategy` must be `Greedy\(\)`, .*another `Strategy`. Received: .*'greedy'"):
        Speculative("greedy")
    with pytest.raises(TypeError, match="`draft_model` must be a Keras model or None. Received: draft_model='gpt2'"):
        Speculative(draft_model="gpt2")
    with pytest.raises(ValueError, match="`max_ngram_size` must be None with a `draft_model`.* max_ngram_size=2"):
        Speculative(draft_model=lm, max_ngram_size=2)
    for name in ("num_draft_tokens", "max_ngram_size"):
        with pytest.raises(ValueError, match=f"`{name}` must be .* Received: {name}=0"):
            Speculative(**{name: 0})
    with pytest.raises(ValueError, match="must not reorder rows. Received: strategy=Reordering"):
        generate(lm, [5, 7], Speculative(Reordering()), **EAGER)
    assert Speculative(num_draft_tokens=np.int64(4)).num_draft_tokens == 4


def test_a_draft_model_that_does_not_fit_is_refused(lm):
    translator = built.translator()
    learned = built.language_model(embedding_options={"position_encoding": "learned", "max_length": 7})

    def refused(model, draft, message, inputs=(5, 7)):
        with pytest.raises(ValueError, match=message):
            generate(model, list(inputs), Speculative(draft_model=draft), start_token=1, **EAGER)

    sizes = built.SIZES
    refused(lm, CausalLM(V + 2, **sizes), f"vocabulary of {V + 2} in the draft model, {V} in the model")
    padded = built.padded_output()
    refused(padded, built.padded_output(V - 2), f"vocabulary of {V - 2} in the draft model, {V} in the model")
    refused(padded, lm, f"vocabulary of {V} in the draft model, {V + 7} in the model")
    rule = "`draft_model` must have no sources, or as many as the model, .* Received: "
    refused(lm, translator, rule + r".* of sources \[\(37, 0\)\] in the draft model, \[\] in the model")
    refused(translator, Seq2Seq(V, **sizes), rule + r".*\[\(29, 0\)\] in the draft model, \[\(37, 0\)\] in the model")
    rule = (
        "`draft_model` must have as many learned positions as the model, or none. Received: max_length=7 in the draft"
    )
    refused(lm, learned, rule + " model, None in the model")
    refused(built.made("learned"), learned, rule + f" model, {LENGTH} in the model")
    short = built.translator(embedding_options={"position_encoding": "learned", "max_length": 7})
    refused(translator, short, rule + " model, None in the model")


def test_locks_of_two_models_are_taken_in_one_order(lm, draft_model):
    for models in ([lm, draft_model], [draft_model, lm], [lm, lm]):
        with all_locked(models):
            assert all(lock_of(model)._is_owned() for model in models)
        assert not any(lock_of(model)._is_owned() for model in models)


class Near(layers.DecoderLayer):
    """Looks at near tokens more, and takes a step of several tokens for a prefill."""

    def call(
        self, inputs, memory=None, mask=None, memory_mask=None, attention_mask=None, attention_bias=None,
        return_attention_scores=False, training=None, *, positions=None, document_ids=None, cache=None, start=None,
    ):  # fmt: skip
        length = ops.shape(inputs)[1]
        slots = length if cache is None else ops.shape(cache[0].key)[2]
        places = ops.arange(length, dtype="float32")
        if cache is not None and inputs.shape[1] == 1:
            places = places + ops.cast(start, "float32")
        bias = -0.5 * (places[:, None] - ops.arange(slots, dtype="float32")) ** 2
        return super().call(
            inputs, memory, mask=mask, attention_mask=attention_mask, attention_bias=bias[None, None],
            training=training, positions=positions, document_ids=document_ids, cache=cache, start=start,
        )  # fmt: skip


class NearDecoder(layers.Decoder):
    layer_class = Near


def decoded(decoder, head=lambda x: x):
    ids = keras.Input((None,), dtype="int32")
    model = keras.Model(ids, keras.layers.Dense(V)(head(decoder(layers.TokenEmbedding(V, 8)(ids)))))
    return randomize(model)


STRETCHED = layers.RotaryEmbedding(
    scaling={"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8}
)
DRAFTS_ONLY = [
    (
        lambda: decoded(NearDecoder(1, 16, 2)),
        "must return the logits of each of them, .* differ from the full model by .*near",
    ),
    (
        lambda: decoded(layers.Decoder(1, 16, 2), lambda x: x[:, -1:]),
        r"must return the logits of each of them, .* Received: a model that returns logits for only 1 of \d+ tokens",
    ),
    (
        lambda: decoded(layers.Decoder(1, 16, 2, attention_options={"rotary": STRETCHED}, name="own")),
        r"needs rotary positions that do not depend .* Received: rope_type='dynamic' in the layers \['own'\]",
    ),
]


@pytest.mark.parametrize(("make", "message"), DRAFTS_ONLY)
def test_a_model_that_takes_only_steps_of_one_token_is_refused(make, message):
    model = make()
    generate(model, [3, 5], **SHORT)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            generate(model, [3, 5], Speculative(num_draft_tokens=DRAFTS), **SHORT)


def test_an_own_layer_that_takes_several_tokens_generates_the_same(monkeypatch):
    monkeypatch.setattr(Near, "call", layers.DecoderLayer.call)
    model = decoded(NearDecoder(1, 16, 2))
    expected = generate(model, PROMPTS[0], **EAGER)
    assert_close(generate(model, PROMPTS[0], Speculative(num_draft_tokens=DRAFTS), **EAGER), expected, atol=0)


def test_steps_of_several_tokens_are_tried_once_for_a_model(monkeypatch):
    model, tried = permuted()[0], []
    generate(model, [3, 5], **SHORT)
    monkeypatch.setattr("keras_tx.generation.incremental_model.check_steps", lambda *_, at_once: tried.append(at_once))
    for _ in range(2):
        generate(model, [3, 5], Speculative(num_draft_tokens=DRAFTS), **SHORT)
    assert tried == [True]

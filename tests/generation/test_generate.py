"""`generate`: the tokens that a Python loop over the whole model finds."""

import contextlib
import itertools

import keras
import numpy as np
import pytest

from keras_tx.generation import Beam, Greedy, Sample, Speculative, generate, stream
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.pretrained import PretrainedModel
from tests.generation import built
from tests.generation.asked import (
    BEAM,
    FAST,
    NEW,
    PADDED,
    PROMPTS,
    SHORT,
    SHORT_WRITE,
    SOURCES,
    START,
    WRITE,
    Letters,
)
from tests.generation.built import V, logits_of, naive
from tests.tools import assert_close


@pytest.fixture(autouse=True)
def eager_unless_compiled(request):
    if "compiled" not in request.fixturenames:
        request.getfixturevalue("eager")


@pytest.fixture
def compiled(lm, translator):
    """Tests with this run the loop as users do."""
    for model in (lm, translator):
        vars(model).pop("_keras_tx_loops", None)
    yield
    for model in (lm, translator):
        vars(model).pop("_keras_tx_loops", None)


@pytest.fixture(scope="module")
def lm():
    keras.utils.set_random_seed(7)  # fixtures of modules come before that of each test
    return built.made("untied")


@pytest.mark.usefixtures("compiled")
def test_greedy_generates_what_the_whole_model_finds_likeliest(lm, translator):
    expected = naive(lm, PROMPTS, NEW)
    assert generate(lm, PROMPTS, **FAST) == lm.generate(PROMPTS, Greedy(), **FAST) == expected
    pieces = np.stack(list(stream(lm, PROMPTS, **FAST)), 1)
    assert pieces.tolist() == [row[-NEW:] for row in expected]
    expected = naive(translator, [[START]] * 3, NEW, sources=PADDED)
    assert generate(translator, SOURCES, **WRITE) == [row[1:] for row in expected]


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


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.usefixtures("compiled")
def test_xla_generates_what_single_steps_generate(translator, request):
    found = generate(translator, SOURCES, BEAM, **{**WRITE, "jit_compile": True})
    request.getfixturevalue("eager")
    assert found == generate(translator, SOURCES, BEAM, **WRITE)


@pytest.mark.tensorflow
@pytest.mark.usefixtures("compiled")
def test_a_second_call_compiles_nothing_for_prompts_in_the_same_bucket(lm, monkeypatch):
    calls, step = [], IncrementalModel.step

    def counted(self, *args, **kwargs):
        calls.append(1)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(IncrementalModel, "step", counted)
    generate(lm, PROMPTS, Sample(0.9, seed=1), **FAST)
    traced = len(calls)
    generate(lm, [[3] * 16, [4], [5, 6]], Sample(0.9, seed=2), **{**FAST, "max_new_tokens": 3})
    assert 0 < traced == len(calls) <= 4


def test_a_packed_model_keeps_what_was_compiled():
    model = built.language_model(packed=True)
    assert model._generation_model() is model._generation_model()


def test_weights_that_training_changed_are_used():
    model = built.made("causal_lm")
    before = generate(model, PROMPTS, **FAST)
    eager = keras.backend.backend() == "tensorflow"  # tracing would take longer than the step
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=eager)
    model.fit(np.array(PROMPTS[0])[None], np.array(PROMPTS[0])[None], verbose=0)
    after = generate(model, PROMPTS, **FAST)
    assert after == naive(model, PROMPTS, NEW) != before


@pytest.mark.parametrize("kind", ["functional", "packed", "checkpoint"])
def test_a_callback_that_knows_the_model_generates_within_fit(kind):
    """On JAX, the variables have no values there."""
    if kind == "checkpoint":
        sizes = {"vocab_size": V, "n_embd": 6, "n_layer": 1, "n_head": 2, "n_positions": 16}
        model = PretrainedModel({"model_type": "gpt2", **sizes}, "causal_lm")
    else:
        model = built.language_model(packed=kind == "packed")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=keras.backend.backend() == "tensorflow")
    found, options = [], {"max_new_tokens": 2, "jit_compile": False}

    class Generating(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append((model.generate(PROMPTS, **options), generate(model, PROMPTS, **options)))

    ids = np.arange(1, 11).reshape(2, 5)
    packed = {"token_ids": ids, "document_ids": np.ones_like(ids), "positions": ids * 0 + np.arange(5)}
    inputs = {"checkpoint": {"input_ids": ids}, "packed": packed}.get(kind, ids)
    model.fit(inputs, ids, batch_size=1, verbose=0, callbacks=[Generating()])
    assert len(found) == 2 and found[1] == (model.generate(PROMPTS, **options),) * 2


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


def test_ids_come_back_as_they_came(lm, translator):
    expected = generate(lm, PROMPTS, **SHORT)
    left = np.array([[0] * (5 - len(row)) + row for row in PROMPTS])
    right = np.array([row + [0] * (5 - len(row)) for row in PROMPTS], "int64")
    for prompts in (left, right, keras.ops.convert_to_tensor(right)):
        found = generate(lm, prompts, **SHORT)
        assert isinstance(found, np.ndarray) and found.shape == (3, 5 + 2)
        assert found[:, 5:].tolist() == [row[-2:] for row in expected]
    wider = np.pad(right, ((0, 0), (0, 3)))
    found = generate(lm, wider, **SHORT)
    assert found.shape == (3, 8 + 2) and found[:, 3:].tolist() == generate(lm, left, **SHORT).tolist()
    assert generate(lm, wider[1], **SHORT).tolist() == [0] * 7 + expected[1]
    assert generate(lm, np.array(PROMPTS[0]), **SHORT).tolist() == expected[0]
    assert generate(lm, [np.array(row) for row in PROMPTS], **SHORT) == expected
    found = generate(translator, {"source_ids": SOURCES, "target_ids": [[START, 3], [START], [START]]}, **SHORT)
    assert found[1:] == generate(translator, SOURCES, **SHORT_WRITE)[1:]
    assert generate(translator, PADDED, **SHORT_WRITE).tolist() == generate(translator, SOURCES, **SHORT_WRITE)


@pytest.mark.tensorflow
def test_a_ragged_tensor_comes_back_as_lists(lm):
    import tensorflow as tf

    assert generate(lm, tf.ragged.constant(PROMPTS), **SHORT) == generate(lm, PROMPTS, **SHORT)


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


@pytest.mark.tensorflow
def test_a_bert_tokenizer_can_be_given(lm):
    from keras_tx.text import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "go", "##ne", ".", "a", "dog", "is", "not", "now"]
    tokenizer = BertTokenizer([*words, *[f"word{i}" for i in range(V - len(words))]])
    forced = dict(enumerate([words.index(word) for word in ("is", "not", "go", "##ne", ".", "[SEP]")]))
    options = {**FAST, "tokenizer": tokenizer, "forced_tokens": forced}
    assert generate(lm, ["A dog"], **options) == ["a dog is not gone."]
    assert "".join(stream(lm, "A dog", **options)) == " is not gone."


@pytest.mark.tensorflow
def test_ids_that_the_tokenizer_lacks_are_never_generated(lm):
    """Vocabularies of models are often larger, padded to a multiple of 64."""
    from keras_tx.text import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    tokenizer, prompts = BertTokenizer(words), ["the cat", "cat"]
    options = {"max_new_tokens": 9, "stop_tokens": (), "return_scores": True, "jit_compile": False}
    ids = [[tokenizer.cls_id, *row] for row in ([5, 6], [6])]
    for strategy in (Greedy(), Sample(seed=3), Beam(2)):
        texts, scores = generate(lm, prompts, strategy, tokenizer=tokenizer, **options)
        allowed = {"forbidden_tokens": range(len(words), V)}
        rows, expected = generate(lm, ids, strategy, **options, **allowed)
        assert texts == [tokenizer.decode(row[1:]) for row in rows]
        assert_close(scores, expected)
        assert max(map(max, generate(lm, ids, strategy, **options)[0])) >= len(words)  # else the test shows nothing
    stop = {**options, "stop_tokens": V - 1, "forced_tokens": {2: V - 1}}
    rows, _ = generate(lm, ids, tokenizer=tokenizer, **stop)
    assert [row[-1] for row in rows] == [V - 1, V - 1]  # what was asked for is not forbidden


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


def test_logits_that_are_nan_are_an_error():
    model = built.language_model()
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    with pytest.raises(ValueError, match="must not be NaN, .*Received: no token to choose at the new token 1"):
        generate(model, PROMPTS, **FAST)


@contextlib.contextmanager
def default_dtype(name):
    """Another `floatx` of Keras, or 64-bit types of JAX."""
    backend = keras.backend.backend()
    if name == "x64":
        if backend != "jax":
            pytest.skip("a setting of JAX")
        import jax

        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            yield
        return
    if backend == "jax" and name == "bfloat16":
        pytest.skip("Keras makes int32 float32 there")
    keras.config.set_floatx(name)
    try:
        yield
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64", "x64"])
def test_the_tokens_do_not_depend_on_the_default_dtype(name):
    model, rules = built.language_model(), {**FAST, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    strategies = Greedy(), Sample(1.5, top_k=9, top_p=0.9, seed=3), Beam(3), Speculative(Greedy())
    expected = [generate(model, PROMPTS, strategy, **rules, return_scores=True) for strategy in strategies]
    with default_dtype(name):
        found = [generate(model, PROMPTS, strategy, **rules, return_scores=True) for strategy in strategies]
    for (ids, scores), (expected_ids, expected_scores) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert_close(scores, expected_scores)

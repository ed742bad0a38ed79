"""`generate`: the tokens that a Python loop over the whole model finds."""

import contextlib

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
)
from tests.generation.built import V, naive
from tests.tools import assert_close

LM = "untied"


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


@pytest.mark.usefixtures("compiled")
def test_greedy_generates_what_the_whole_model_finds_likeliest(lm, translator):
    expected = naive(lm, PROMPTS, NEW)
    assert generate(lm, PROMPTS, **FAST) == lm.generate(PROMPTS, Greedy(), **FAST) == expected
    pieces = np.stack(list(stream(lm, PROMPTS, **FAST)), 1)
    assert pieces.tolist() == [row[-NEW:] for row in expected]
    expected = naive(translator, [[START]] * 3, NEW, sources=PADDED)
    assert generate(translator, SOURCES, **WRITE) == [row[1:] for row in expected]


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
    options = {"max_new_tokens": 4, "stop_tokens": (), "return_scores": True, "jit_compile": False}
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


def test_logits_that_are_nan_are_an_error():
    model = built.language_model()
    model.set_weights([np.full_like(weight, np.nan) for weight in model.get_weights()])
    with pytest.raises(ValueError, match="must not be NaN, .*Received: no token to choose at the new token 1"):
        generate(model, PROMPTS, **FAST)


@contextlib.contextmanager
def default_dtype(name):
    """Another `floatx` of Keras, or 64-bit types of JAX."""
    if name == "x64":
        import jax

        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            yield
        return
    keras.config.set_floatx(name)
    try:
        yield
    finally:
        keras.config.set_floatx("float32")


def test_the_tokens_do_not_depend_on_the_default_dtype():
    model, rules = built.language_model(), {**FAST, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    strategies = Greedy(), Sample(1.5, top_k=9, top_p=0.9, seed=3), Beam(3), Speculative(Greedy())
    expected = [generate(model, PROMPTS, strategy, **rules, return_scores=True) for strategy in strategies]
    # On JAX, Keras makes int32 float32 where the default is bfloat16.
    for name in ("float16", "float64", "x64" if keras.backend.backend() == "jax" else "bfloat16"):
        with default_dtype(name):
            found = [generate(model, PROMPTS, strategy, **rules, return_scores=True) for strategy in strategies]
        for (ids, scores), (expected_ids, expected_scores) in zip(found, expected, strict=True):
            assert ids == expected_ids, name
            assert_close(scores, expected_scores)

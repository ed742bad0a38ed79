"""Eight threads that make the first calls of a model at once get what a single thread gets, and build it once."""

import threading

import keras
import numpy as np
import pytest

from keras_tx.generation import Beam, Greedy, Sample, compiled_loop
from keras_tx.locks import lock_of
from keras_tx.models import CausalLM
from keras_tx.pretrained import from_pretrained
from tests.pretrained.tiny import assert_equals_reference, checkpoint, inputs_of, loaded, prompts_of

BACKEND = keras.backend.backend()


def at_once(calls):
    """What the functions return, each in a thread of its own; they begin together."""
    results, barrier = [None] * len(calls), threading.Barrier(len(calls))

    def run(index, call):
        barrier.wait()
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


@pytest.fixture
def traced(monkeypatch):
    """The programs that `generate` traces, by their functions."""
    seen, compiled = [], compiled_loop._compiled

    def recorded(function, *arguments):
        return compiled(lambda *args: seen.append(function.__name__) or function(*args), *arguments)

    monkeypatch.setattr(compiled_loop, "_compiled", recorded)
    return seen


@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "jax", reason="JAX compiles each search for seconds")
@pytest.mark.parametrize(("name", "strategies"), [("bart", [Greedy(), Beam(2)]), ("llama", [Sample(top_k=5, seed=3)])])
def test_some_generate_while_others_predict(name, strategies, traced, monkeypatch):
    model, prompts = from_pretrained(checkpoint(name), output_hidden_states=True), prompts_of(name)
    inputs, family, made = inputs_of(name, model), type(model.family), []
    build = family.generation_model
    monkeypatch.setattr(family, "generation_model", lambda self: made.append(self) or build(self))
    options = {"max_new_tokens": 4, "jit_compile": False}
    calls = [lambda strategy=strategy: model.generate(prompts, strategy, **options) for strategy in strategies]
    calls = (calls * 6)[:6]
    *generated, called, predicted = at_once([*calls, lambda: model(inputs), lambda: model.predict(inputs, verbose=0)])
    assert len(made) == 1
    assert BACKEND == "torch" or sorted(traced) == sorted(["decode", "prefill"] * len(strategies))
    for outputs in (called, predicted):
        assert_equals_reference(outputs, name)
    expected = [loaded(name).generate(prompts, strategy, **options) for strategy in strategies]
    for ids, wanted in zip(generated, expected * (6 // len(expected)), strict=True):
        np.testing.assert_array_equal(ids, wanted)


@pytest.mark.parametrize("name", ["electra", "vit"])
def test_predict_and_calls_of_encoders(name):
    model = from_pretrained(checkpoint(name), output_hidden_states=True)
    inputs = inputs_of(name, model)
    for outputs in at_once([lambda: model(inputs), lambda: model.predict(inputs, verbose=0)] * 4):
        assert_equals_reference(outputs, name)


@pytest.mark.tensorflow
def test_a_search_that_xla_compiles(traced):
    model = CausalLM(13, num_layers=1, hidden_dim=6, num_heads=2, packed=True)
    rows = [[5, 7, 11], [5]]
    results = at_once([lambda: model.generate(rows, max_new_tokens=3)] * 8)
    assert traced == ["prefill", "decode"]
    with lock_of(model), lock_of(model._unpacked):  # as another thread that compiles: this one need not wait for it
        assert at_once([lambda: model.generate(rows, max_new_tokens=3)]) == results[:1]
    assert results == [model.generate(rows, max_new_tokens=3, jit_compile=False)] * 8

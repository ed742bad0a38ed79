"""Loaded versions under load, and exports that are killed; the benchmark `serving_load` has the large numbers."""

import numpy as np
import pytest

pytest.importorskip("tensorflow_text")  # brings the ops of the graph
from benchmarks import fuzzed, killed, loaded
from keras_tx.models import Seq2Seq
from keras_tx.serving import export
from tests.serving.conftest import LABELS, only_signatures
from tests.tools import randomize

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def servables(exported, tokenizer, tmp_path_factory):
    """The classifier that all tests of this folder share, and a tiny translator, which truncates long texts."""
    import tensorflow as tf

    sizes = dict(num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=11)
    translator = randomize(Seq2Seq(len(tokenizer.vocabulary), **sizes))
    with only_signatures("serving_default", "generate", "embed"):
        options = {"tokenizer": tokenizer, "generation": {"max_new_tokens": 5}}
        version = export(translator, tmp_path_factory.mktemp("loaded") / "translator", **options)
    translates = tf.saved_model.load(str(version)).signatures
    return {
        "classifier": loaded.Servable(exported.signatures, tokenizer, new_tokens=5, labels=LABELS),
        "translator": loaded.Servable(translates, tokenizer, new_tokens=5),
    }


def test_threads_get_the_answers_of_one_thread(servables):
    requests = loaded.mixed_requests(servables, 22)
    assert len({(request.model, request.signature) for request in requests}) == 8
    expected = [loaded.answer(servables, request) for request in requests]
    load = loaded.under_load(servables, requests, expected, [*range(22)] * 3, threads=5, parts=2)
    assert not load.errors and len(load.differences) == 66
    assert max(load.differences) <= loaded.TOLERANCE


def test_a_load_tells_of_errors_and_of_other_answers(servables):
    requests = loaded.mixed_requests(servables, 2)
    expected = [loaded.answer(servables, request) for request in requests]
    name = next(name for name, value in expected[0].items() if value.dtype.kind == "f")
    expected[0][name] = expected[0][name] + 0.01
    requests[1].inputs.clear()
    load = loaded.under_load(servables, requests, expected, [0, 1], threads=2, parts=1)
    assert len(load.errors) == 1 and load.differences[0] > loaded.TOLERANCE


def test_texts_of_every_kind_are_answered_in_the_right_shape(servables):
    assert fuzzed.fuzz(servables, fuzzed.fuzzed(len(fuzzed.KINDS))) == []


def test_a_wrong_shape_is_told(servables):
    classifier = servables["classifier"]
    request = loaded.mixed_requests(servables, 1)[0]
    outputs = loaded.answer(servables, request)
    assert "rows" in fuzzed.problem(classifier, request.signature, len(next(iter(outputs.values()))) + 1, outputs)
    name = next(name for name, value in outputs.items() if value.dtype.kind == "f")
    outputs[name] = np.full_like(outputs[name], np.nan)
    wrong = fuzzed.problem(classifier, request.signature, len(outputs[name]), outputs)
    assert "not finite" in wrong


@pytest.mark.process
@pytest.mark.slow
def test_a_watcher_never_sees_what_was_killed(tmp_path):
    base = tmp_path / "killed"
    with killed.Watcher(base) as watcher:
        stages = killed.kill_exports(base, 3)
    assert sum(stages.values()) == 3
    assert watcher.problems == [] and watcher.loaded == len(watcher.seen) > 0

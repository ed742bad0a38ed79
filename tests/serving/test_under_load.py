"""Many threads, odd texts and a watcher: in small what `python -m benchmarks serving_load` runs."""

import shutil
import threading

import numpy as np
import pytest

from keras_tx.serving.versions import write_version

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A classifier and a translator."""
    from benchmarks.loaded import exported

    sizes = {"num_layers": 1, "hidden_dim": 12, "num_heads": 3, "intermediate_dim": 17}
    return exported(tmp_path_factory.mktemp("loaded"), vocabulary_size=300, new_tokens=5, **sizes)


@pytest.fixture(scope="module")
def asked(loaded):
    """Requests of every signature, and their single-threaded answers."""
    from benchmarks.loaded import answer, mixed_requests

    requests = mixed_requests(loaded, 24)
    return requests, [answer(loaded, request) for request in requests]


def test_requests_are_of_all_signatures_and_of_different_lengths(loaded, asked):
    requests, expected = asked
    signatures = {(name, one) for name, servable in loaded.items() for one in servable.signatures}
    assert {(request.model, request.signature) for request in requests} == signatures and len(signatures) == 12
    texts = [text for request in requests if "text" in request.inputs for text in request.inputs["text"].numpy()]
    assert len({len(text.split()) for text in texts}) > 20 and max(len(one.inputs) for one in requests) == 6
    assert len({answer["text"].tobytes() for answer in expected if "text" in answer}) > 3


def test_threads_get_the_answers_that_one_thread_gets(loaded, asked):
    from benchmarks.loaded import TOLERANCE, under_load

    requests, expected = asked
    order = np.random.default_rng(0).permutation(np.arange(72) % len(requests))
    load = under_load(loaded, requests, expected, order, threads=4, parts=3)
    assert not load.errors and len(load.differences) == 72
    assert max(load.differences) <= TOLERANCE
    assert len(load.memory) == 4 and min(load.memory) > 100


def test_what_goes_wrong_under_load_is_counted(loaded, asked):
    from benchmarks.loaded import Request, under_load

    requests, expected = asked
    wrong = Request("classifier", "tokens", {"token_ids": tf.constant([[300]]), "lengths": tf.constant([1])})
    load = under_load(loaded, [requests[0], wrong], [expected[1], expected[0]], [0, 1, 0], threads=2, parts=1)
    assert load.differences == [np.inf, np.inf]  # the answer to another request
    assert len(load.errors) == 1 and "classifier, tokens: " in load.errors[0] and "[0, 300)" in load.errors[0]


def test_a_difference_is_that_of_numbers_and_endless_of_all_else():
    from benchmarks.loaded import difference

    one = {"x": np.array([1.0, 200.0], "float32"), "text": np.array([b"a", b"b"], object)}
    assert difference(one, one) == 0
    assert difference({**one, "x": np.array([1.5, 202.0], "float32")}, one) == 0.5
    assert difference({**one, "x": np.array([1.0, 202.0], "float32")}, one) == pytest.approx(0.01)
    others = ({"x": one["x"]}, {**one, "x": one["x"][:1]}, {**one, "text": one["text"][::-1]})
    assert [difference(other, one) for other in (*others, {**one, "x": one["x"] * np.nan})] == [np.inf] * 4


def test_every_text_has_an_answer_of_the_right_shape(loaded):
    from benchmarks.fuzzed import KINDS, fuzz, fuzzed

    texts = fuzzed(3 * len(KINDS))
    assert sum(len(text) >= 2**20 - 3 for text in texts) == 3 and len(set(texts)) > 2.5 * len(KINDS)
    assert any(b"\x00" in text for text in texts) and any(not valid(text) for text in texts)
    assert fuzz(loaded, texts) == []


def valid(text):
    return text.decode(errors="ignore").encode() == text


def test_an_answer_of_a_wrong_shape_is_seen(loaded, asked):
    from benchmarks.fuzzed import problem

    servable = loaded["classifier"]
    index = next(i for i, one in enumerate(asked[0]) if (one.model, one.signature) == ("classifier", "explain"))
    right, rows = asked[1][index], len(asked[1][index]["label"])
    assert problem(servable, "explain", rows, right) is None
    for name, value, expected in (
        ("label", np.array([b"ugly"] * rows, object), "not of"),
        ("label", np.array([b"\xff"] * rows, object), "no UTF-8"),
        ("probabilities", right["probabilities"] * 2, "sum to"),
        ("probabilities", right["probabilities"] * np.nan, "not finite"),
        ("probabilities", right["probabilities"][:, :1], "of shape"),
        ("scores", right["scores"][..., :-1], "for tokens of shape"),
    ):
        assert expected in problem(servable, "explain", rows, {**right, name: value})
    assert f"for {rows + 1} rows" in problem(servable, "explain", rows + 1, right)


def test_a_watcher_loads_what_it_sees_and_names_what_does_not_load(exported, tmp_path):
    from benchmarks.killed import Watcher, stage

    base, halfway, go_on = tmp_path / "reviews", threading.Event(), threading.Event()

    def copy(folder):
        shutil.copytree(exported.path, folder, dirs_exist_ok=True)

    def copy_and_wait(folder):
        copy(folder)
        (folder / "MODEL_CARD.json").unlink()
        halfway.set()
        go_on.wait(30)
        shutil.copy(exported.path / "MODEL_CARD.json", folder)

    with Watcher(base) as watcher:
        assert write_version(base, copy).name == "1"
        writer = threading.Thread(target=write_version, args=(base, copy_and_wait))
        writer.start()
        assert halfway.wait(30) and stage(base) == "warm-up written"
        go_on.set()
        writer.join()
    assert (watcher.seen, watcher.loaded, watcher.problems) == (["1", "2"], 2, [])

    (base / "3").mkdir()
    with Watcher(base) as watcher:
        pass
    assert sorted(watcher.seen) == ["1", "2", "3"] and watcher.loaded == 2
    assert "version 3 was seen without ['saved_model.pb'" in watcher.problems[0]
    assert "version 3 does not load and answer" in watcher.problems[1] and len(watcher.problems) == 2

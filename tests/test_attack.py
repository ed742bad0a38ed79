"""A small part of `python -m benchmarks attack`: damaged files and strange texts; and what the attack itself does."""

import contextlib
import io
import sys

import keras
import numpy as np
import pytest

pytest.importorskip("tensorflow")
pytest.importorskip("transformers")

from benchmarks.attack import __main__ as command
from benchmarks.attack import kinds, outcome, threads, worker
from benchmarks.attack.outcome import Case, Outcome

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="files are read alike on every backend"),
]
SEED = 7
CASES = {  # how many run here
    "config.json": 10,
    "generation_config.json": 4,
    "model.safetensors": 16,
    "shards and index": 10,
    "tf_model.h5": 12,
    "tokenizer files": 16,
    ".keras": 6,
    "backup of Resume": 4,
    "texts": 2,
}


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_each_ends_in_the_right_answer_or_a_clear_error(kind):
    ends = {number: worker.run(kind, number, SEED, kinds.KINDS[kind].run) for number in range(CASES[kind])}
    wrong = {number: end for number, end in ends.items() if end.result not in ("refused", "right")}
    assert not wrong


def test_a_good_checkpoint_loads_afterwards():
    assert kinds.good(None).result == "right"


def test_eight_threads_use_one_model():
    assert {one.result for one in threads.of_checkpoint("bert_cls")} == {"right"}


# The attack itself


def case(tmp_path):
    return Case(0, np.random.default_rng(7), tmp_path)


@pytest.mark.parametrize(
    ("error", "result", "told"),
    [
        (ValueError("`x` must be 3. Received: x=4"), "refused", "ValueError: `x` must be 3. Received: x=4"),
        (OSError("No space left on device"), "refused", "OSError: No space"),
        (ValueError("x" * 1001), "wrong", "a message of 1001 characters"),
        (ValueError(""), "wrong", "a message of 0 characters"),
        (KeyError("x"), "wrong", "KeyError: 'x'"),
    ],
)
def test_an_error_is_clear_or_not(tmp_path, error, result, told):
    def fail():
        raise error

    found, end = case(tmp_path).attempt(fail)
    assert found is None and end.result == result and told in end.told


def test_time_and_memory_are_limited(tmp_path):
    one = case(tmp_path)
    with one.limited():
        block = np.ones(30 << 20, "uint8")
    assert 25 < one.mebibytes < 200 and len(block) and one.seconds < 10
    one.mebibytes = outcome.MEBIBYTES + 1
    assert one.closed(Outcome("right")).result == "wrong"
    one.seconds = outcome.SECONDS + 1
    assert one.closed(Outcome("right")).result == "hung"


@pytest.mark.process
def test_a_process_that_hangs_or_dies_or_breaks_is_replaced():
    process = worker.Worker(SEED, "tests.attacked", limit=0.5)
    try:
        told = "invalid literal for int"
        for kind, result, text in [
            ("works", "refused", told),
            ("hangs", "hung", "more than 0.5 s of the package"),
            ("dies", "lost", "the process died with the exit status 7"),
            ("fails", "lost", "the attack failed: "),
            ("breaks", "lost", "a good checkpoint does not load any more: broken; but the process"),
            ("works", "refused", told),
        ]:
            end = process.after(process.run(kind, 0), last=True)
            assert (kind, end.result) == (kind, result) and text in end.told
    finally:
        process.close()


def test_a_thread_that_hangs_is_told():
    def fail():
        raise ValueError("no")

    (one, value), (two, error), (three, _) = threads.at_once(
        [lambda: 3, fail, lambda: threads.time.sleep(60)], limit=0.2
    )
    assert (one, two, three, value, str(error)) == ("ends", "raises", "hangs", 3, "no")


def test_the_table_counts(monkeypatch):
    def of_kind(kills, seed):
        return [Outcome("lost", f"{kills} kills, seed {seed}", seconds=2.5)]

    monkeypatch.setitem(command.IN_THIS_PROCESS, "full disk", of_kind)
    monkeypatch.setattr(sys, "argv", ["attack", "--only", "full disk", "--kills", "5"])
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as status:
        command.main()
    assert status.value.code == 1
    assert "lost: : 5 kills, seed 7 (2.5 s, 0 MiB; --seed 7 --only" in printed.getvalue()
    assert printed.getvalue().splitlines()[-1] == "| all | 1 | 0 | 0 | 0 | 0 | 1 |  |  |"


def test_the_plan_has_all_cases():
    counts = command.plan(cases=1000, texts=2000)
    assert sum(count for kind, count in counts.items() if kind != "texts") == 1000
    assert counts["texts"] == 20 * len(command.WITH_TOKENIZER)
    assert all(count > 0 for count in command.plan(cases=10, texts=10).values())

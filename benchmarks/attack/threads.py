"""Eight threads that use one model at once get what one thread gets."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from benchmarks.attack.checkpoints import NEW_TOKENS, TOLERANCE, difference, original, ours
from benchmarks.attack.outcome import Outcome
from keras_tx import models, pretrained
from keras_tx.generation import Beam, Greedy
from tests.pretrained import tiny

THREADS, LIMIT = 8, 120  # seconds for all threads of a model, with what they trace
SIZES = {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "intermediate_dim": 32}
ROWS = [[5, 7, 11], [5]]


def at_once(calls: Sequence[Callable[[], Any]], limit: float = LIMIT) -> list[tuple[str, Any]]:
    """("ends", result), ("raises", error) or ("hangs", None) for each function; they begin together in threads."""
    results: list[tuple[str, Any]] = [("hangs", None)] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(index: int, call: Callable[[], Any]) -> None:
        barrier.wait()
        try:
            results[index] = "ends", call()
        except Exception as error:
            results[index] = "raises", error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
    return results


def of_checkpoint(name: str) -> list[Outcome]:
    """A loaded checkpoint: calls, `predict` and `generate`."""
    source = original(name)
    model, alone = (pretrained.from_pretrained(source.folder) for _ in range(2))
    calls = [lambda: ours(model, source.inputs), lambda: model.predict(_given(model, source.inputs), verbose=0)]
    compare: list[Callable[[Any], bool]] = [lambda x: difference(x, source.outputs, source.masks) <= TOLERANCE] * 2
    if source.prompts is not None:
        for strategy in (Greedy(), Beam(2)):
            options = {"max_new_tokens": NEW_TOKENS, "jit_compile": False}
            expected = alone.generate(source.prompts, strategy, **options)
            calls.append(lambda s=strategy, o=options: model.generate(source.prompts, s, **o))
            compare.append(lambda x, e=expected: np.array_equal(x, e))
    return _judged(name, calls, compare)


def _given(model: Any, inputs: Any) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name in model.family.inputs}


def of_models() -> list[Outcome]:
    """The models of this package: calls, and `generate` compiled by XLA."""
    keras.utils.set_random_seed(7)
    ids = np.array([[5, 7, 11], [3, 2, 0]])
    found = []
    for model in (models.TextClassifier(13, 3, **SIZES), models.MaskedLM(13, **SIZES)):
        expected = keras.ops.convert_to_numpy(model(ids))
        compare = [lambda x, e=expected: np.allclose(keras.ops.convert_to_numpy(x), e, atol=1e-5)] * 2
        calls = [lambda m=model: m(ids), lambda m=model: m.predict(ids, verbose=0)]
        found += _judged(type(model).__name__, calls, compare)
    for model in (models.CausalLM(13, **SIZES), models.Seq2Seq(13, **SIZES)):
        options = {"max_new_tokens": 3} | ({"start_token": 1} if isinstance(model, models.Seq2Seq) else {})
        expected = model.generate(ROWS, jit_compile=False, **options)
        calls = [lambda m=model, o=options: m.generate(ROWS, **o)]
        found += _judged(type(model).__name__, calls, [lambda x, e=expected: x == e])
    return found


def _judged(name: str, calls: Sequence[Callable], compare: Sequence[Callable[[Any], bool]]) -> list[Outcome]:
    """Calls the functions in turn, in eight threads."""
    order = [index % len(calls) for index in range(THREADS)]
    started, found = time.perf_counter(), []
    for index, (how, result) in zip(order, at_once([calls[index] for index in order]), strict=True):
        if how == "ends":
            outcome = Outcome("right" if compare[index](result) else "wrong", f"call {index} of {len(calls)}")
        else:
            outcome = Outcome("hung" if how == "hangs" else "wrong", f"call {index}: {result!r}"[:300])
        outcome.changed, outcome.seconds = f"{name} in {THREADS} threads", time.perf_counter() - started
        found.append(outcome)
    return found


def all_models(count: int, seed: int) -> list[Outcome]:
    """Every architecture, and every model of this package."""
    del count, seed
    found, bar = of_models(), keras.utils.Progbar(len(tiny.NAMES))
    for index, name in enumerate(tiny.NAMES):
        found += of_checkpoint(name)
        bar.update(index + 1)
    return found

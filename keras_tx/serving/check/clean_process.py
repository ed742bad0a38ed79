"""Loads versions as an unmodified TensorFlow Serving does, and prints the findings, one line of JSON for each version.

`audit.check` runs this file as a script, without keras_tx and Keras, and with XLA turned off as in TensorFlow Serving's
main.cc. Usage: python -P clean_process.py VERSION_DIRECTORY...
"""

import base64
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the process that called `check` may use all memory of the GPU
sys.modules["keras"] = None  # type: ignore[assignment]  # a graph that asks for Keras must fail here
sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # last, so that no module in this folder shadows another

import integer_products  # noqa: E402
import numpy as np  # noqa: E402
import session  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_internals  # noqa: E402
import warmup_requests  # noqa: E402

WEIGHTS = os.path.join("variables", "variables.index")
TIMED_CALLS, TIMED_SECONDS = 5, 1.0  # a signature is called this often, or for this long


def main(versions: Sequence[str]) -> None:
    core_ops = become_a_server()
    for version in versions:
        print(json.dumps(_found(version, core_ops)))


def _found(version: str, core_ops: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"signatures": {}, "milliseconds": {}, "problems": []}
    try:
        ops, saved_by = _ops_and_version(version)
        found |= {"custom_ops": sorted(ops - core_ops), "ops": sorted(ops), "saved_by": saved_by}
        if "VarHandleOp" in ops and not os.path.exists(os.path.join(version, WEIGHTS)):  # the loader raises no error
            raise FileNotFoundError(f"the graph has variables, and there is no {WEIGHTS}")
        loaded = session.Session(version, tensorflow_internals.library())
    except Exception as error:  # a damaged file may raise any error
        found["problems"].append(f"it does not load: {_one_line(error)}")
    else:
        _run_signatures(version, loaded.signatures, found)
        found["problems"] += warmup_requests.problems_of_warmup(version, loaded.signatures)
    return found


def become_a_server() -> set[str]:
    """Turns XLA off and loads the text ops. Returns the names of TensorFlow's own ops."""
    tensorflow_internals.turn_xla_off()
    core_ops = {*dir(tf.raw_ops), *integer_products.OPERATIONS}  # one of these has no function in Python
    for path in tensorflow_internals.text_op_libraries():
        tf.load_op_library(path)  # the package itself imports Keras
    return core_ops


def _run_signatures(version: str, signatures: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Adds the signatures, and the errors when they run, to `found`."""
    expected = _expected_answers(version, found)
    for name, signature in signatures.items():
        found["signatures"][name] = {"inputs": _specs(signature.inputs), "outputs": _specs(signature.outputs)}
        examples = (expected or {}).get("signatures", {}).get(name)
        kind = "the requests of the Keras model" if examples else "made-up inputs"
        try:
            if examples:
                inputs = {key: _from_json(value) for key, value in examples[0]["inputs"].items()}
            else:
                inputs = {key: _made_up_input(key, *spec) for key, spec in signature.inputs.items()}
            signature(**inputs)
            found["milliseconds"][name] = _milliseconds(signature, inputs)
        except Exception as error:  # an op may raise any error
            found["problems"].append(f"{name} fails on {kind}: {_one_line(error)}")
    try:
        if expected is not None and ("text" in expected or "signatures" not in expected):
            found["parity"] = _compare_classifier(signatures["serving_default"], expected)
        examples = (expected or {}).get("signatures", {})
        if any(examples.values()):
            by_example = _compare_examples(signatures, examples)
            found["parity"] = _worse(found.get("parity"), by_example)
    except Exception as error:
        found["problems"].append(f"it cannot answer what the Keras model did: {_one_line(error)}")


def _expected_answers(version: str, found: dict[str, Any]) -> dict[str, Any] | None:
    """The answers of the Keras model, from the file that `serving.parity` wrote; None if there is no file."""
    path = os.path.join(version, "assets.extra", "keras_tx_parity.json")
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except Exception as error:
        found["problems"].append(f"it cannot answer what the Keras model did: {_one_line(error)}")
        return None


def _milliseconds(signature: Any, inputs: Mapping[str, Any]) -> float:
    """The median duration of a few calls; the caller has made a warm-up call."""
    taken: list[float] = []
    while len(taken) < TIMED_CALLS and sum(taken) < TIMED_SECONDS:
        start = time.perf_counter()
        signature(**inputs)
        taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)


def _ops_and_version(version: str) -> tuple[set[str], str]:
    """The ops in the graphs of the file, and the version of TensorFlow that wrote it."""
    from tensorflow.core.protobuf import saved_model_pb2  # noqa: PLC0415  # only after Keras is shut out

    saved = saved_model_pb2.SavedModel()
    with open(os.path.join(version, "saved_model.pb"), "rb") as file:
        saved.ParseFromString(file.read())
    graphs = [graph.graph_def for graph in saved.meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for function in graph.library.function for node in function.node_def]
    functions = {function.signature.name for graph in graphs for function in graph.library.function}
    versions = {graph.meta_info_def.tensorflow_version for graph in saved.meta_graphs}
    return {node.op for node in nodes} - functions, ", ".join(sorted(versions))


def _specs(side: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [dtype.name, None if shape is None else [-1 if size is None else size for size in shape]]
        for key, (dtype, shape) in side.items()
    }


def _made_up_input(name: str, dtype: Any, shape: Sequence[int | None] | None) -> np.ndarray:
    """The strings "" and "a b" (as tf.Examples for `inputs`) or ones; an axis of unknown size has 2."""
    sizes = [2] if shape is None else [2 if size is None else size for size in shape]
    texts: list[Any] = [_example(text) if name == "inputs" else text for text in ("", "a b")]
    text = np.array(texts, object)  # in arrays of bytes, NumPy drops zeros at the end
    return np.resize(text if dtype == tf.string else np.array([1], dtype.as_numpy_dtype), sizes)


def _example(text: str) -> bytes:
    value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
    features = {"text": value, "text_pair": value}
    return bytes(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line)
    explanation = integer_products.explained(text)[len(text) :]
    return f"{type(error).__name__}: {text[:500]}{explanation}"


def _compare_classifier(function: Any, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the answers to all texts in one batch, and to each text alone, with those of the Keras model."""
    inputs = {key: expected[key] for key in ("text", "text_pair") if key in expected}
    count, wanted, tolerance = len(expected["text"]), np.array(expected["probabilities"]), expected["tolerance"]
    together = function(**inputs)
    alone = [function(**{key: texts[i : i + 1] for key, texts in inputs.items()}) for i in range(count)]
    got = np.stack([together["probabilities"], np.concatenate([row["probabilities"] for row in alone])])
    if "labels" in expected:
        key, tied = "labels", np.abs(wanted - 0.5) <= 2 * tolerance  # rounding may change whether it is a label
    else:
        best, second = np.sort(wanted)[:, :-3:-1].T
        key, tied = "label", best - second <= 2 * tolerance  # rounding may change the best label
    labels = np.vectorize(bytes.decode, otypes=[object])(together[key])
    empty = function(**{name: [] for name in inputs})["probabilities"]
    return {
        "texts": count,
        "difference": float(np.max(np.abs(got - wanted))),
        "tolerance": tolerance,
        "same_labels": bool(np.all(tied | (labels == np.array(expected[key], object)))),
        "empty_batch": together["probabilities"][:0].shape == empty.shape,
    }


def _compare_examples(signatures: Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    """Compares the answers of every signature with those of the Keras model; strings and integers must be equal.

    An expected string or integer that is None is not compared, since rounding may change it.
    """
    gaps: list[tuple[float, float]] = []
    same, empty, count = True, True, 0
    for name, rows in examples.items():
        for row in rows:
            inputs = {key: _from_json(value) for key, value in row["inputs"].items()}
            answer, count = signatures[name](**inputs), count + bool(row["outputs"])
            for key, wanted in row["outputs"].items():
                got = answer[key]
                if got.dtype.kind in "fc":
                    wanted = np.array(wanted, "float64").reshape(got.shape)  # raises for another shape
                    with np.errstate(invalid="ignore"):  # inf - inf, where both are equal
                        gap = np.abs(np.where(got == wanted, 0, got - wanted)).max(initial=0)
                    gaps.append((float(gap), row["tolerance"]))
                else:
                    words = [
                        x.encode() if isinstance(x, str) else x for x in np.array(_from_json(wanted), object).ravel()
                    ]
                    pairs = zip(words, got.ravel(), strict=False)
                    same = same and len(words) == got.size and all(x is None or x == y for x, y in pairs)
        if rows:
            none = signatures[name](**{key: np.asarray(value)[:0] for key, value in inputs.items()})
            empty = empty and all(value.shape[0] == 0 for value in none.values())
    difference, tolerance = _worst(gaps)
    return {
        "texts": count,
        "difference": difference,
        "tolerance": tolerance,
        "same_labels": same,
        "empty_batch": empty,
    }


def _worst(gaps: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """The difference that is largest relative to its tolerance if one exceeds it, otherwise the largest; None for none.

    NaN counts as infinitely large.
    """

    def order(gap: tuple[float, float]) -> tuple[float, float]:
        difference, tolerance = gap
        if np.isnan(difference):
            return float("inf"), float("inf")
        if difference <= tolerance:
            return 0.0, difference
        return difference / tolerance if tolerance else float("inf"), difference

    return max(gaps, key=order, default=(None, None))


def _worse(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Combines two comparisons: the worse difference, and whether strings and integers are equal in both."""
    if one is None:
        return other
    found = [(each["difference"], each["tolerance"]) for each in (one, other)]
    difference, tolerance = _worst([gap for gap in found if gap[0] is not None])
    both = {key: one[key] and other[key] for key in ("same_labels", "empty_batch")}
    return {**both, "difference": difference, "tolerance": tolerance, "texts": max(one["texts"], other["texts"])}


def _from_json(value: Any) -> Any:
    """Turns what `serving.parity.to_json` wrote into values for `Signature`."""
    if isinstance(value, list):
        return [_from_json(one) for one in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


if __name__ == "__main__":
    main(sys.argv[1:])

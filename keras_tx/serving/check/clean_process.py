"""Loads a version as a stock TensorFlow Serving would, and prints what it finds as one line of JSON.

Run by `audit.check` as a script of its own: without keras_tx, without Keras, XLA off, as TensorFlow Serving's main.cc
leaves it. Usage: python -P clean_process.py VERSION_DIRECTORY
"""

import base64
import ctypes
import glob
import importlib.util
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the process that checks may hold all of its memory
sys.modules["keras"] = None  # type: ignore[assignment]  # a graph that asks for Keras must fail here

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


def main(version):
    core_ops = _become_a_server()
    found: dict[str, Any] = {"signatures": {}, "problems": []}
    try:
        ops = _ops(version)
        found |= {"custom_ops": sorted(ops - core_ops), "ops": sorted(ops)}
        loaded = tf.saved_model.load(version)
    except Exception as error:  # whatever is wrong with the file
        found["problems"].append(f"it does not load: {_one_line(error)}")
    else:
        _answer(version, loaded.signatures, found)
    print(json.dumps(found))


def _become_a_server():
    """XLA off, and the text ops in. Returns the names of TensorFlow's own ops."""
    library = ctypes.CDLL(os.path.join(os.path.dirname(tf.__file__), "libtensorflow_cc.so.2"))
    library._ZN10tensorflow21DisableXlaCompilationEv()
    core_ops = set(dir(tf.raw_ops))
    text = importlib.util.find_spec("tensorflow_text")
    for path in sorted(glob.glob(os.path.join(os.path.dirname(str(text.origin)), "python/ops/*.so"))) if text else []:
        tf.load_op_library(path)  # the package itself imports Keras
    return core_ops


def _answer(version, signatures, found):
    """Adds to `found` what the signatures are, and what goes wrong when they run."""
    for name, signature in signatures.items():
        found["signatures"][name] = {
            "inputs": {k: _spec(v) for k, v in sorted(signature.structured_input_signature[1].items())},
            "outputs": {k: _spec(v) for k, v in sorted(signature.structured_outputs.items())},
        }
        try:
            signature(**{k: _made_up(k, v) for k, v in signature.structured_input_signature[1].items()})
        except Exception as error:  # whatever a kernel raises
            found["problems"].append(f"{name} fails on made-up inputs: {_one_line(error)}")
    parity = os.path.join(version, "assets.extra", "keras_tx_parity.json")
    if os.path.exists(parity):
        try:
            with open(parity, encoding="utf-8") as file:
                expected = json.load(file)
            if "text" in expected or "signatures" not in expected:
                found["parity"] = _compare(signatures["serving_default"], expected)
            elif any(expected["signatures"].values()):
                found["parity"] = _compare_examples(signatures, expected["signatures"])
        except Exception as error:
            found["problems"].append(f"it cannot answer what the live model did: {_one_line(error)}")


def _ops(version):
    from tensorflow.core.protobuf import saved_model_pb2  # noqa: PLC0415  # only after Keras is shut out

    saved = saved_model_pb2.SavedModel()
    with open(os.path.join(version, "saved_model.pb"), "rb") as file:
        saved.ParseFromString(file.read())
    graphs = [graph.graph_def for graph in saved.meta_graphs]
    nodes = [node for graph in graphs for node in graph.node]
    nodes += [node for graph in graphs for function in graph.library.function for node in function.node_def]
    functions = {function.signature.name for graph in graphs for function in graph.library.function}
    return {node.op for node in nodes} - functions


def _spec(spec):
    rank_known = spec.shape.rank is not None
    return [spec.dtype.name, [-1 if size is None else size for size in spec.shape] if rank_known else None]


def _made_up(name, spec):
    """Strings "" and "a b", as tf.Examples for `inputs`, and ones; an open axis has 2."""
    sizes = [2 if size is None else size for size in spec.shape] if spec.shape.rank is not None else [2]
    texts = [_example(text) if name == "inputs" else text for text in ("", "a b")]
    text = np.array(texts, object)  # as bytes, NumPy would drop zeros at the end
    values = text if spec.dtype == tf.string else [1]
    return tf.cast(tf.constant(np.resize(values, sizes)), spec.dtype)


def _example(text):
    value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
    return tf.train.Example(features=tf.train.Features(feature={"text": value})).SerializeToString()


def _one_line(error):
    lines = [line.strip() for line in str(error).splitlines()]
    return f"{type(error).__name__}: {' '.join(line for line in lines if line)[:500]}"


def _compare(function, expected):
    """All texts in one batch, and each alone, against what the live model answered."""
    texts, wanted, tolerance = expected["text"], np.array(expected["probabilities"]), expected["tolerance"]
    together = function(text=tf.constant(texts))
    alone = [function(text=tf.constant([text])) for text in texts]
    got = np.stack([together["probabilities"], np.concatenate([row["probabilities"] for row in alone])])
    best, second = np.sort(wanted)[:, :-3:-1].T
    labels = [label.decode() for label in together["label"].numpy()]
    tied = best - second <= 2 * tolerance  # either label is right
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        function(text=tf.constant(texts[1:2]))
        seconds.append(time.perf_counter() - start)
    return {
        "texts": len(texts),
        "difference": float(np.max(np.abs(got - wanted))),
        "tolerance": tolerance,
        "same_labels": all(tied | np.equal(labels, expected["label"])),
        "empty_batch": together["probabilities"][:0].shape
        == function(text=tf.constant([], tf.string))["probabilities"].shape,
        "milliseconds": 1000 * statistics.median(seconds),
    }


def _compare_examples(signatures, examples):
    """Requests of models that are no classifiers, against what the live model answered: strings are to be equal."""
    gaps, same, empty, seconds = [(0.0, 1e-6)], True, True, []
    for name, rows in examples.items():
        specs = signatures[name].structured_input_signature[1]
        for row in rows:
            inputs = {key: tf.constant(_raw(value), specs[key].dtype) for key, value in row["inputs"].items()}
            start = time.perf_counter()
            answer = signatures[name](**inputs)
            seconds.append(time.perf_counter() - start)
            for key, wanted in row["outputs"].items():
                got = answer[key].numpy()
                if answer[key].dtype == tf.string:
                    words = [x.encode() if isinstance(x, str) else x for x in np.array(_raw(wanted), object).ravel()]
                    same = same and words == list(got.ravel())
                else:
                    wanted = np.array(wanted, "float64").reshape(got.shape)  # or an error: not the same shape
                    gaps.append((float(np.abs(got - wanted).max(initial=0)), row["tolerance"]))
        if rows:
            none = signatures[name](**{key: value[:0] for key, value in inputs.items()})
            empty = empty and all(value.shape[0] == 0 for value in none.values())
    # The one that is furthest out of what is allowed, and NaN before all others, which is out of everything.
    difference, tolerance = max(gaps, key=lambda gap: np.inf if np.isnan(gap[0]) else gap[0] - gap[1])
    return {
        "texts": len(seconds),
        "difference": difference,
        "tolerance": tolerance,
        "same_labels": same,
        "empty_batch": empty,
        "milliseconds": 1000 * statistics.median(seconds),
    }


def _raw(value):
    """What `parity.written` wrote: lists, and bytes that are not UTF-8 as {"b64": ...}."""
    if isinstance(value, list):
        return [_raw(one) for one in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


if __name__ == "__main__":
    main(sys.argv[1])

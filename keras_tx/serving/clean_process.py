"""Loads a version as a stock TensorFlow Serving would, and prints what it finds as one line of JSON.

Run by `audit.check` as a script of its own: without keras_tx, without Keras, XLA off, as TensorFlow Serving's main.cc
leaves it. Usage: python -P clean_process.py VERSION_DIRECTORY
"""

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
sys.modules["keras"] = None  # type: ignore[assignment]  # a graph that asks for Keras must fail here

import tensorflow as tf  # noqa: E402


def main(version):
    library = ctypes.CDLL(os.path.join(os.path.dirname(tf.__file__), "libtensorflow_cc.so.2"))
    library._ZN10tensorflow21DisableXlaCompilationEv()
    core_ops = set(dir(tf.raw_ops))
    text = importlib.util.find_spec("tensorflow_text")
    for path in sorted(glob.glob(os.path.join(os.path.dirname(text.origin), "python/ops/*.so"))) if text else []:
        tf.load_op_library(path)  # the package itself imports Keras
    loaded = tf.saved_model.load(version)
    found = {"signatures": {}, "custom_ops": sorted(_ops(version) - core_ops), "ops": sorted(_ops(version))}
    for name, signature in loaded.signatures.items():
        found["signatures"][name] = {
            "inputs": {k: _spec(v) for k, v in sorted(signature.structured_input_signature[1].items())},
            "outputs": {k: _spec(v) for k, v in sorted(signature.structured_outputs.items())},
        }
    parity = os.path.join(version, "assets.extra", "keras_tx_parity.json")
    if os.path.exists(parity):
        with open(parity, encoding="utf-8") as file:
            found["parity"] = _compare(loaded.signatures["serving_default"], json.load(file))
    print(json.dumps(found))


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
    return [spec.dtype.name, [-1 if size is None else size for size in spec.shape]]


def _compare(function, expected):
    """All texts in one batch, and each alone, against what the live model answered."""
    texts, wanted = expected["text"], tf.constant(expected["probabilities"], tf.float32)
    together = function(text=tf.constant(texts))
    alone = [function(text=tf.constant([text])) for text in texts]
    difference: Any = 0.0
    for got in (together["probabilities"], tf.concat([row["probabilities"] for row in alone], axis=0)):
        difference = max(difference, float(tf.reduce_max(tf.abs(got - wanted))))
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        function(text=tf.constant(texts[1:2]))
        seconds.append(time.perf_counter() - start)
    return {
        "texts": len(texts),
        "difference": difference,
        "same_labels": [label.decode() for label in together["label"].numpy()] == expected["label"],
        "empty_batch": together["probabilities"][:0].shape
        == function(text=tf.constant([], tf.string))["probabilities"].shape,
        "milliseconds": 1000 * statistics.median(seconds),
    }


if __name__ == "__main__":
    main(sys.argv[1])

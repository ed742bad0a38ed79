"""Puts weights into a saved graph, and runs that graph without TensorFlow's Python functions.

Each Python function of TensorFlow would copy the constants in it several times, while it is traced, saved, loaded and
run. So signatures are traced with constants that have a shape and no values; the values go into the file alone, and
TensorFlow's C++ loader, which a server uses, runs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from keras_tx.internals.tensorflow_graphs import constant_number, write_fingerprint
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
saved_model_pb2 = Lazy("tensorflow.core.protobuf.saved_model_pb2")
session = Lazy("keras_tx.serving.check.session")
tensorflow_internals = Lazy("keras_tx.serving.check.tensorflow_internals")

FILE = "saved_model.pb"


def fill_constants(folder: Path, values: Sequence[np.ndarray]) -> None:
    """Gives the constants without values in a saved version their values, which are numbered."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / FILE).read_bytes())
    for graph in (one.graph_def for one in saved.meta_graphs):
        for nodes in (graph.node, *(function.node_def for function in graph.library.function)):
            for node in nodes:
                number = constant_number(node)
                if number is not None:
                    node.attr["value"].tensor.tensor_content = values[number].tobytes()
    (folder / FILE).write_bytes(saved.SerializeToString())
    write_fingerprint(folder)


class LoadedSignature:
    """A signature of a loaded version, called as those that `tf.saved_model.load` returns."""

    def __init__(self, signature: Any):
        self._signature = signature
        specs = [
            {name: tf.TensorSpec(shape, dtype, name) for name, (dtype, shape) in side.items()}
            for side in (signature.inputs, signature.outputs)
        ]
        self.structured_input_signature: tuple[Any, dict[str, Any]] = ((), specs[0])
        self.structured_outputs: dict[str, Any] = specs[1]

    def __call__(self, **inputs: Any) -> dict[str, Tensor]:
        answers = self._signature(**{name: np.asarray(value) for name, value in inputs.items()})
        return {name: tf.constant(value, self.structured_outputs[name].dtype) for name, value in answers.items()}


@contextmanager
def loaded(folder: Path) -> Iterator[Mapping[str, LoadedSignature]]:
    """The signatures of a version, whose memory is free afterwards."""
    made = session.Session(str(folder), tensorflow_internals.library())
    try:
        yield {name: LoadedSignature(signature) for name, signature in made.signatures.items()}
    finally:
        made.close()

"""What is looked at in the graphs of signatures before they are saved: operations, and resources of a tokenizer."""

from keras_tx.keras_internals import is_compiled_by_xla
from keras_tx.optional import Lazy
from keras_tx.serving.check.audit import UNSERVABLE

tf = Lazy("tensorflow")


def check_servable(signatures):
    """Raises where a graph has what a stock server cannot run: there, XLA is off and there is no Python.

    Raises:
        ValueError: there is such an operation, or a function that must be compiled; the message names it.
    """
    for name, function in signatures.items():
        graph = function.get_concrete_function().graph.as_graph_def()
        ops = {node.op for node in graph.node}
        ops |= {node.op for inner in graph.library.function for node in inner.node_def}
        wrong = sorted(op for op in ops if op.startswith(UNSERVABLE))
        if any(map(is_compiled_by_xla, graph.library.function)):
            wrong.append("a function with jit_compile=True")
        if wrong:
            raise ValueError(
                "`model` must have operations that a server runs without XLA and Python; `keras.ops.slice_update` "
                "becomes XlaDynamicUpdateSlice, `keras.ops.scatter_update` does not. Received: "
                f"{', '.join(wrong)} in the signature {name!r}"
            )


def resources_of(tokenizer):
    """The lookup tables and models in the attributes of a tokenizer, which must be saved beside the graph."""
    found, seen, places = [], set(), [tokenizer]
    while places:
        one = places.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, tf.saved_model.experimental.TrackableResource):
            found.append(one)
        elif one is tokenizer or isinstance(one, tf.Module):
            places.extend(getattr(one, "__dict__", {}).values())
        elif isinstance(one, dict):
            places.extend(one.values())
        elif isinstance(one, (list, tuple)):
            places.extend(one)
    return found

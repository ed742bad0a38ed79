"""Checks on the graphs of signatures before they are saved, and the resources that must be saved with them."""

from collections.abc import Iterable, Mapping
from typing import Any

from keras_tx.internals.tensorflow_graphs import is_compiled_by_xla
from keras_tx.optional import Lazy
from keras_tx.serving.check.audit import UNSERVABLE

tf = Lazy("tensorflow")


def check_servable(signatures: Mapping[str, Any]) -> None:
    """Checks that no graph needs XLA or Python: an unmodified server has XLA turned off and runs no Python.

    Raises:
        ValueError: a graph has such an operation, or a function that must be compiled; the message names it.
    """
    for name, function in signatures.items():
        graph = function.get_concrete_function().graph.as_graph_def()
        ops = {node.op for node in graph.node}
        ops |= {node.op for inner in graph.library.function for node in inner.node_def}
        unservable = sorted(op for op in ops if op.startswith(UNSERVABLE))
        if any(map(is_compiled_by_xla, graph.library.function)):
            unservable.append("a function with jit_compile=True")
        if unservable:
            raise ValueError(
                "`model` must have operations that a server runs without XLA and Python; `keras.ops.slice_update` "
                "becomes XlaDynamicUpdateSlice, `keras.ops.scatter_update` does not. Received: "
                f"{', '.join(unservable)} in the signature {name!r}"
            )


def resources_of(owners: Iterable[Any]) -> list[Any]:
    """The lookup tables and models in the attributes of tokenizers and layers, which an export must track to save them.

    Args:
        owners: tokenizers, and all layers of a model, at any depth.
    """
    waiting = list(owners)
    found, seen, are_owners = [], set(), {id(one) for one in waiting}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tf.saved_model.experimental.TrackableResource):
            found.append(value)
        elif id(value) in are_owners or isinstance(value, tf.Module):
            waiting.extend(getattr(value, "__dict__", {}).values())
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return found

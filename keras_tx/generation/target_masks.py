"""Checks the masks of the target, which may hide padding alone: decode steps replace them by masks of their own."""

import numpy as np
from keras import ops

from keras_tx.generation.model_checks import MASKS, is_cross_attention
from keras_tx.generation.model_graph import ModelGraph, needed_nodes
from keras_tx.generation.operations import call, compared_with

_IDS_AT_ONCE = 8192  # a mask may be computed from the vectors of ids, which need memory


def check_masks(graph: ModelGraph, padding_id: int | None, vocabulary_size: int) -> None:
    """Raises for masks of the target that hide other ids than the padding.

    Args:
        graph: of the model.
        padding_id, vocabulary_size: of the embedding of the target.
    """
    hidden: dict[int, set[int]] = {}  # {number of a mask: ids}, since layers share masks
    for node in graph.cached_nodes:
        if is_cross_attention(node, graph.depends_on_target):  # steps compute its `query_mask` as the model does
            continue
        for name in MASKS:
            for mask in node.numbers_of(name, len(node.args)):
                if mask not in hidden:
                    hidden[mask] = _hidden_ids(graph, mask, padding_id, vocabulary_size)
                if hidden[mask]:
                    raise ValueError(
                        f"The `{name}` of layer '{node.operation.name}' must be `ids != padding_id` in a generative "
                        f"model. Received: a mask that hides the id {min(hidden[mask])}, padding_id={padding_id}"
                    )


def _hidden_ids(graph: ModelGraph, mask: int, padding_id: int | None, vocabulary_size: int) -> set[int]:
    """The ids other than the padding that a mask hides, found by computing it for each id as the only token."""
    nodes = needed_nodes(graph.nodes, mask)
    if padding_id is not None and [compared_with(node) for node in nodes] == [padding_id]:
        return set()  # the mask of nearly all models
    inputs = {value for node in nodes for value in node.inputs.values()}
    if inputs.intersection(graph.source_values) or any(node in graph.cached_nodes for node in nodes):
        return set()  # not a function of the id; `check_steps` compares such masks at some tokens
    hidden: set[int] = set()
    for ids in np.array_split(np.arange(vocabulary_size, dtype="int32"), -(-vocabulary_size // _IDS_AT_ONCE)):
        values = {graph.target_value: ops.convert_to_tensor(ids[:, None])}
        for node in nodes:
            node.store(values, call(node.operation, *node.filled(values)))
        is_real = np.broadcast_to(ops.convert_to_numpy(values[mask]).astype(bool).ravel(), ids.shape)
        hidden.update(ids[~is_real].tolist())
    return hidden - {padding_id}

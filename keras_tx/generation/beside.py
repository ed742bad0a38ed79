"""Inputs whose columns belong to those of a source: segment ids, a mask, or ids whose embeddings are added to its own.

B sources, S source tokens.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_tx.generation import operations
from keras_tx.generation.model_graph import ModelGraph
from keras_tx.generation.prompts import padded
from keras_tx.layers import TokenEmbedding


class Beside(NamedTuple):
    """What an input belongs to.

    Attributes:
        source: the name of the input with the ids.
        has_segments: whether its values are segment ids, of which any will do at padding.
    """

    source: str
    has_segments: bool


def inputs_beside(graph: ModelGraph, embeddings: Mapping[str, Any]) -> dict[str, Beside]:
    """{name of an input without ids of its own: `Beside`}, for sources.

    Args:
        graph: of the model.
        embeddings: {name of an input: the layer that embeds its ids, or None}.

    Raises:
        ValueError: an input holds the segments of the target, which new tokens have not, or belongs to one of several
            sources.
    """
    numbers = dict(zip(graph.inputs, graph.input_values, strict=True))
    found = {}
    for name in graph.sources:
        if embeddings[name] is not None:
            continue
        owner = _with_segments(numbers[name], graph)
        if owner == graph.target_value:
            raise ValueError(
                "A generative model must not have an input for the segments of `target`, because new tokens have none. "
                f"Received: the segments '{name}' of '{graph.target}'"
            )
        with_ids = [source for source in graph.sources if embeddings[source] is not None]
        owners = [source for source in with_ids if numbers[source] == owner] or [
            source for source in with_ids if graph.lengths[source] == graph.lengths[name]
        ]
        if len(owners) > 1 and any(operations.padding_id(embeddings[source]) is not None for source in owners):
            raise ValueError(
                "In a model of several sources with padding, each input without an embedding must be the `segment_ids` "
                f"of one source. Received: the input '{name}' beside {owners}"
            )
        if len(owners) == 1:
            found[name] = Beside(owners[0], numbers[owners[0]] == owner)
    return found


def _with_segments(value: int, graph: ModelGraph) -> int | None:
    """The number of the ids whose segments the value has, if it has any."""
    for node in graph.nodes:
        if not isinstance(node.operation, TokenEmbedding):
            continue
        segments, ids = (node.numbers_of(*argument) for argument in (("segment_ids", 1), ("inputs", 0)))
        if value in operations.before_casts(segments, graph.nodes):
            return operations.before_casts(ids, graph.nodes)[0]
    return None


def joined_sources(graph: ModelGraph, embeddings: Mapping[str, Any]) -> list[list[str]]:
    """Groups of sources whose embeddings the model adds, or joins otherwise, token by token.

    Args:
        graph: of the model.
        embeddings: {name of an input: the layer that embeds its ids, or None}.
    """
    numbers = dict(zip(graph.inputs, graph.input_values, strict=True))
    joined = {name: {name} for name in graph.sources if embeddings[name] is not None}
    made_of = {numbers[name]: {name} for name in joined}  # {number of a value: the sources whose columns it has}
    for node in graph.source_nodes:
        joining = operations.joined_values(node)
        found = [made_of[value] for value in joining or node.inputs.values() if value in made_of]
        names = set().union(*found)
        if not found or (not joining and any(one != names for one in found)):  # it attends to another source, or is new
            continue
        group = set().union(*[joined[name] for name in names])
        joined.update(dict.fromkeys(group, group))
        made_of.update(dict.fromkeys(node.outputs, names))
    groups = {id(group): group for group in joined.values() if len(group) > 1}
    return [[name for name in graph.sources if name in group] for group in groups.values()]


def real_tokens(rows: Mapping[str, list[np.ndarray]], padding_ids: Mapping[str, int | None]) -> list[np.ndarray]:
    """For each row, which columns are not padding in all of some sources that are joined, or in the only one.

    Args:
        rows: {name of a source: its rows as the caller gave them, with padding}.
        padding_ids: {name of an input: its padding id, or None}.

    Raises:
        ValueError: rows that belong together have different lengths, or no real tokens.
    """
    found = []
    for together in zip(*rows.values(), strict=True):
        lengths = {name: len(row) for name, row in zip(rows, together, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                "Sources whose embeddings are added must have a row of the same length for each example. Received: "
                f"rows of lengths {lengths}"
            )
        ids = [padding_ids[name] for name in rows]
        is_real = [row != one for row, one in zip(together, ids, strict=True) if one is not None]
        found.append(np.any(is_real, axis=0) if is_real else np.ones(len(together[0]), "bool"))
        if not found[-1].any():
            raise ValueError(
                f"Each row must have a token that is not padding in {list(rows)}. Received: "
                f"{[row.tolist() for row in together]}"
            )
    return found


def array_beside(name: str, rows: list[np.ndarray], beside: Beside, real: list[np.ndarray], width: int) -> np.ndarray:
    """(B, S), in which columns beside padding move to the right, as the padding does.

    Args:
        name: of the input.
        rows: its rows as the caller gave them, with a number for each id or for each real token; or one for all.
        beside: what the input belongs to.
        real: for each row of `beside.source` as the caller gave it, which tokens are no padding.
        width: S.

    Raises:
        ValueError: a row has another length, or lacks the numbers beside padding, which only segments do not need.
    """
    if not beside.has_segments and all(len(row) == 1 for row in rows):
        return np.stack(rows)
    moved = []
    for row, is_real in zip(rows, real, strict=True):
        if len(row) not in (len(is_real), is_real.sum()):
            raise ValueError(
                f"`{name}` must have a number for each token of `{beside.source}`. Received: {len(row)} numbers for "
                f"{len(is_real)} tokens"
            )
        moved.append((row[np.argsort(~is_real, kind="stable")] if len(row) == len(is_real) else row)[:width])
    if not beside.has_segments and any(len(row) < width for row in moved):
        raise ValueError(
            f"`{name}` must have the shape (B, S) of `{beside.source}`, with a number for each padding token, too. "
            f"Received: rows of lengths {[len(row) for row in moved]}"
        )
    return padded(moved, width, 0, left=False)

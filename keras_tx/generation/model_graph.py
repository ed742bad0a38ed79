"""Divides the graph of a generative model: what depends on the target, what needs a cache, and what runs only once.

The target is the input that generation continues; sources are the others. A value is a tensor in a run of the graph,
known by its number in the `FunctionalGraph`.
"""

from collections.abc import Iterable
from typing import Any

from keras_tx.functional_graph import FunctionalGraph, Node
from keras_tx.generation import model_checks
from keras_tx.generation.operations import WITH_CACHE, looks_at_other_tokens, memory_values
from keras_tx.layers import Decoder, DecoderLayer


class ModelGraph:
    """The nodes of a functional model in the order in which they run, by what they depend on.

    Args:
        model: a functional model with one output.
        target: the name of the target; None if the graph shows it.

    Attributes:
        inputs, sources: names, `sources` without the target.
        lengths: {name of an input: its static number of tokens, or None}.
        input_values, source_values, target_value, output_value: numbers of values.
        nodes: all nodes that the output depends on.
        source_nodes: nodes that do not depend on the target, such as an encoder. They run once.
        target_nodes: nodes that depend on the target. They run in the prefill and in every decode step.
        cached_nodes: the target nodes that have a key-value cache, that is, attention.
        last_token_nodes: the target nodes after the last cached one, which are needed for the last token only.
        sliced_values: the inputs of `last_token_nodes`, which are sliced to the last token.
        source_values_in_steps: the values of sources and source nodes that target nodes need.
        shared_values: those of them that are not in the cache alone.

    Raises:
        ValueError: if the target cannot be found, or if the model cannot generate: see `model_checks`.
    """

    def __init__(self, model: Any, target: str | None):
        graph = FunctionalGraph(model)
        if graph.absent:
            raise ValueError(
                "`model` must give all inputs to the models inside it. A checkpoint inside leaves optional ones out: "
                f"use its own `generate`. Received: without {graph.absent}"
            )
        self.inputs: list[str] = [x.name for x in model.inputs]
        self.lengths = {x.name: x.shape[1] if len(x.shape) > 1 else 0 for x in model.inputs}
        self.input_values = graph.inputs
        self.output_value = graph.outputs[0]
        self.nodes = needed_nodes(graph.nodes, self.output_value)
        model_checks.check_no_softmax(self.nodes[-1].operation)
        self.target = self._find_target() if target is None else target
        if self.target not in self.inputs:
            raise ValueError(f"`target` must be one of the inputs {self.inputs}. Received: target={target!r}")
        self.target_value = self.input_values[self.inputs.index(self.target)]
        self.sources = [name for name in self.inputs if name != self.target]
        self.source_values = [value for value in self.input_values if value != self.target_value]
        self._divide_nodes()
        self._find_values()

    def depends_on_target(self, values: Iterable[int]) -> bool:
        return any(value in self._dependent for value in values)

    def _find_target(self) -> str:
        """The input that the queries of the first causal layer come from."""
        sources = {value: {name} for value, name in zip(self.input_values, self.inputs, strict=True)}
        for node in self.nodes:
            found: set[str] = set().union(*[sources[value] for value in node.inputs.values()])
            sources.update({value: found for value in node.outputs})
            if isinstance(node.operation, (Decoder, DecoderLayer)) or node.kwargs.get("use_causal_mask"):
                names: set[str] = set().union(*[sources[value] for value in node.numbers_of("query", 0)])
                if len(names) == 1:
                    return names.pop()
        if len(self.inputs) == 1:
            return self.inputs[0]
        raise ValueError(
            "`target` must be given: no causal layer shows which input is continued. "
            "Received: target=None for a model with "
            f"the inputs {self.inputs}"
        )

    def _divide_nodes(self) -> None:
        self._dependent = {self.target_value}
        self.source_nodes: list[Node] = []
        self.target_nodes: list[Node] = []
        self.cached_nodes: list[Node] = []
        for node in self.nodes:
            if not self.depends_on_target(node.inputs.values()):
                self.source_nodes.append(node)
                continue
            self._dependent.update(node.outputs)
            self.target_nodes.append(node)
            if isinstance(node.operation, WITH_CACHE):
                model_checks.check_causal(node, self.target, self.depends_on_target)
                self.cached_nodes.append(node)
            elif looks_at_other_tokens(node.operation):
                model_checks.refuse_layer(node.operation)
            model_checks.check_bias(node, self.depends_on_target)
        needed = {self.output_value, *[value for node in self.nodes for value in node.inputs.values()]}
        for node in self.cached_nodes:
            model_checks.check_scores(node, needed)
        if not self.cached_nodes:
            raise ValueError("`model` must have a causal layer over the generated ids. Received: a model without one")

    def _find_values(self) -> None:
        end = self.target_nodes.index(self.cached_nodes[-1]) + 1
        self.last_token_nodes = self.target_nodes[end:]
        self.sliced_values = {self.target_value, *[value for node in self.target_nodes[:end] for value in node.outputs]}
        needed = {value for node in self.target_nodes for value in node.inputs.values()} - self._dependent
        in_cache = {value for node in self.cached_nodes for value in memory_values(node)}
        elsewhere = {value for node in self.target_nodes for value in self._values_beside_memory(node)}
        self.source_values_in_steps = sorted(needed)
        self.shared_values = sorted((needed - in_cache) | (needed & elsewhere))

    def _values_beside_memory(self, node: Node) -> list[int]:
        memory = memory_values(node) if node in self.cached_nodes else []
        return [value for value in node.inputs.values() if value not in memory]


def needed_nodes(nodes: list[Node], output: int) -> list[Node]:
    """The nodes that the value `output` depends on."""
    needed, kept = {output}, []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs.values())
            kept.append(node)
    return kept[::-1]

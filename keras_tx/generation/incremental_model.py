"""A functional model, run incrementally: ids (B, T) in slots from `start` on -> logits (B, V) and a key-value cache.

B batch, T tokens of this call (a whole prompt in the prefill, one token in a decode step), S slots of the cache, V
vocabulary. The nodes of the model's graph run one by one, as in Keras. Layers that attend to other tokens get their
part of the cache, layers that need positions get them, and nodes that do not depend on the target run only once.
"""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from keras_tx.functional_graph import Node
from keras_tx.generation import model_checks, operations
from keras_tx.generation.beside import inputs_beside, joined_sources
from keras_tx.generation.model_graph import ModelGraph
from keras_tx.generation.state import without_xla
from keras_tx.generation.step_check import check_steps, padding_changes_nothing
from keras_tx.generation.target_masks import check_masks
from keras_tx.internals.keras_models import get_keras_mask, set_keras_mask
from keras_tx.layers import MultiHeadAttention, TokenEmbedding, exported_weights
from keras_tx.layers import cache as caches
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

_MASK_OF = "mask of "  # before the number of a value, among those that steps need


class IncrementalModel:
    """A functional model that computes the logits of the next token from the last tokens and a cache.

    Args:
        model: functional, from integer ids to logits (B, T, V). Its causal layers are `Decoder`, `DecoderLayer` and
            `MultiHeadAttention(...)(x, x, use_causal_mask=True)`; all others must treat each token separately.
        target: the name of the input that generation continues; None if the graph shows it.

    Attributes:
        model: the functional model itself.
        inputs, sources, target: names of inputs; `sources` are all but the target.
        padding_ids, vocabulary_sizes: {name of an input: the padding id or vocabulary size of its embedding, or None}.
        buckets_sources: whether sources may have more padding than the longest of them needs, which changes no logits.
        beside: {name of a source without ids of its own: the `Beside` that tells which ids it belongs to}.
        joined: {name of a source: the names of all sources whose embeddings are added to its own, itself included}.
        vocabulary_size: V.
        target_vocabulary_size: the number of ids that have both a logit and a row in the embedding of the target.
        max_length, max_source_length: the number of learned positions for the target and for sources; None for no
            limit.

    Raises:
        TypeError: for a model that is not functional.
        ValueError: for a model with several outputs, without causal layers, with other layers that mix tokens, with
            layers that encode positions but have no call argument for them, with an input for the segments of the
            target, or with one that belongs to one of several sources.
    """

    def __init__(self, model: Any, target: str | None = None):
        self.model = model_checks.checked_functional(model)
        model_checks.check_output(model)
        self._graph = graph = ModelGraph(self.model, target)
        self.inputs, self.sources, self.target = graph.inputs, graph.sources, graph.target
        embeddings = {
            name: operations.embedding_of(value, graph.nodes)
            for name, value in zip(graph.inputs, graph.input_values, strict=True)
        }
        self.padding_ids: dict[str, Any] = {name: operations.padding_id(layer) for name, layer in embeddings.items()}
        self.vocabulary_sizes = {name: operations.vocabulary_size(layer) for name, layer in embeddings.items()}
        self.beside = inputs_beside(graph, embeddings)
        self.joined = {name: group for group in joined_sources(graph, embeddings) for name in group}
        self.vocabulary_size: int = model.outputs[0].shape[-1]
        self.target_vocabulary_size = min(
            self.vocabulary_size, self.vocabulary_sizes[self.target] or self.vocabulary_size
        )
        self.max_length = operations.max_positions(graph.target_nodes)
        self.max_source_length = operations.max_positions(graph.source_nodes)
        model_checks.check_places(graph.target_nodes, graph.cached_nodes, graph.depends_on_target)
        check_masks(graph, self.padding_ids[self.target], self.vocabulary_sizes[self.target] or self.vocabulary_size)
        unknown = [x.operation for x in graph.target_nodes if not operations.is_known(x, graph.depends_on_target)]
        if unknown:
            check_steps(self, unknown)
        self._unknown, self._takes_drafts = unknown, False
        self.buckets_sources = self._keeps_padding_out()

    def _keeps_padding_out(self) -> bool:
        """Whether padding of sources changes no logits."""
        if not all(beside.has_segments for beside in self.beside.values()):
            return False  # what a mask should have at more padding is not known
        padding_ids = {self.padding_ids[name] for name in self.sources} - {None}
        if not padding_ids:
            return True
        graph = self._graph
        joined = [
            node
            for node in graph.target_nodes
            if not all(graph.depends_on_target([value]) for value in node.inputs.values())
        ]
        is_known = all(operations.keeps_padding_out(node, padding_ids) for node in graph.source_nodes)
        is_known = is_known and all(isinstance(node.operation, operations.WITH_CACHE) for node in joined)
        return is_known or padding_changes_nothing(self, [node.operation for node in graph.nodes])

    def check_drafts(self) -> None:
        """Raises unless steps of several tokens give the same logits as steps of one, as `Speculative` needs."""
        if self._takes_drafts:
            return
        dynamic = [x.name for x in self.target_operations if operations.depends_on_length(x)]
        if dynamic:
            raise ValueError(
                "`Speculative` needs rotary positions that do not depend on the length of the sequence: with "
                "rope_type='dynamic' draft tokens would change them. Received: rope_type='dynamic' in the layers "
                f"{dynamic}"
            )
        if self._unknown:
            check_steps(self, self._unknown, at_once=True)
        self._takes_drafts = True

    @property
    def target_operations(self) -> list[Any]:
        """The layers and other operations that depend on the target."""
        return [node.operation for node in self._graph.target_nodes]

    def prepare(self, sources: list[Tensor], batch_size: Tensor, num_slots: Tensor) -> tuple[dict[str, Tensor], Any]:
        """Computes everything that does not depend on the target.

        Args:
            sources: tensors in the order of `self.sources`.
            batch_size: B.
            num_slots: S.

        Returns:
            A dict of the values that each step needs, and an empty cache, a tuple.
        """
        values = dict(zip(self._graph.source_values, sources, strict=True))
        for node in self._graph.source_nodes:
            node.store(values, operations.call(node.operation, *node.filled(values)))
        cache = tuple(self._new_cache(node, values, batch_size, num_slots) for node in self._graph.cached_nodes)
        shared = {str(number): values[number] for number in self._graph.shared_values}
        # Keras' masks are attributes of tensors, which compiled functions do not return.
        masks = {number: get_keras_mask(values[number]) for number in self._graph.source_values_in_steps}
        shared |= {f"{_MASK_OF}{number}": mask for number, mask in masks.items() if mask is not None}
        return shared, cache

    def step(
        self,
        ids: Tensor,
        values: Mapping[str, Tensor],
        cache: Any,
        *,
        mask: Tensor,
        real: Tensor,
        positions: Tensor,
        start: Tensor,
        every_token: bool = False,
    ) -> tuple[Tensor, Any]:
        """Runs the model on the next ids: a prefill or a decode step.

        Args:
            ids: (B, T) integers.
            values, cache: what `prepare` returned; after the first step, the cache that the step before returned.
            mask: (B, S), True at slots that hold real tokens once they are filled.
            real: (B, T), True at real tokens.
            positions: (B, T), the number of real tokens before each.
            start: the slot of the first id.
            every_token: whether to return the logits at all ids (B, T, V).

        Returns:
            The logits (B, V) at the last id, float32, and the cache.
        """
        graph, new_cache = self._graph, list(cache)
        if self.target_vocabulary_size < self.vocabulary_size:  # a stop token need not have a row in the embedding
            ids = ops.minimum(ids, self.target_vocabulary_size - 1)
        last_token_nodes = [] if every_token else graph.last_token_nodes
        numbered = {int(name): value for name, value in values.items() if not name.startswith(_MASK_OF)}
        numbered[graph.target_value] = ids
        masks = {int(name.removeprefix(_MASK_OF)): x for name, x in values.items() if name.startswith(_MASK_OF)}
        for number in masks.keys() & numbered.keys():
            set_keras_mask(numbered[number], masks[number])
        last: dict[int, Tensor] = {}  # only the values at the last token
        for node in graph.target_nodes:
            if node in last_token_nodes:
                positions, real = positions[:, -1:], real[:, -1:]
                for number in graph.sliced_values.intersection(node.inputs.values()):
                    last[number] = numbered[number][:, -1][:, None]  # of one token, also for TensorFlow's static shapes
            args, kwargs = node.filled({**numbered, **last} if node in last_token_nodes else numbered)
            if node in graph.cached_nodes:
                index = graph.cached_nodes.index(node)
                kwargs = {**_masks_of_memory(node, masks), **{k: v for k, v in kwargs.items() if v is not None}}
                outputs, new_cache[index] = self._attend(node, args, kwargs, new_cache[index], mask, positions, start)
            else:
                args, kwargs = self._with_places(node, args, kwargs, real, positions, start, ops.shape(mask)[1])
                outputs = _tied_logits(node.operation, args, kwargs)
                outputs = operations.call(node.operation, args, kwargs) if outputs is None else outputs
            node.store(numbered, outputs)
        logits = numbered[graph.output_value]
        return ops.cast(logits if every_token else logits[:, -1], "float32"), tuple(new_cache)

    def full_logits(self, rows: list[Tensor]) -> Tensor:
        """The logits (B, T, V) of the full model; `rows` are the ids of `sources`, in their order, and of `target`."""
        by_name = dict(zip([*self.sources, self.target], rows, strict=True))
        inputs = [by_name[name] for name in self.inputs]
        return self.model(keras.tree.pack_sequence_as(self.model.input, inputs), training=False)

    def _with_places(
        self, node: Node, args: Any, kwargs: Any, real: Tensor, positions: Tensor, start: Tensor, num_slots: Tensor
    ) -> tuple[Any, Any]:
        """The arguments of a node without a cache, with positions if it has call arguments for them."""
        names = operations.call_arguments(node.operation)
        if "num_keys" in names:  # a position bias
            return args[:1], {**kwargs, "key": None, "start": start, "num_keys": num_slots}
        if "positions" in names and not kwargs.get("reverse"):
            # `real` is not the mask that an embedding computes: a generated padding id counts as a real token.
            kwargs = {**kwargs, "mask": real} if "mask" in names else kwargs
            kwargs = {**kwargs, "positions": positions} if operations.adds_positions(node.operation) else kwargs
        return args, kwargs

    def _attend(
        self, node: Node, args: Any, kwargs: Any, cache: Any, mask: Tensor, positions: Tensor, start: Tensor
    ) -> tuple[Tensor, Any]:
        """The output of a node with a cache, and the new cache."""
        kwargs = {**kwargs, "cache": cache, "return_attention_scores": False, "training": False}
        places = {"positions": positions, "start": start}
        if isinstance(cache, (caches.Memory, caches.SharedMemory)):
            outputs = node.operation(args[0], None, **{k: v for k, v in kwargs.items() if k not in ("value", "key")})
        elif isinstance(cache, caches.KeyValue):
            kwargs = {k: v for k, v in kwargs.items() if k not in ("query_mask", "key_mask")}
            if node.operation.rotary is None:
                del places["positions"]
            outputs = node.operation(*args[:3], **{**kwargs, "value_mask": mask, **places})
        else:
            outputs = node.operation(args[0], **{**kwargs, "memory": None, "mask": mask, **places})
        return outputs[0], outputs[-1]

    def _new_cache(self, node: Node, values: dict[int, Tensor], batch_size: Tensor, num_slots: Tensor) -> Any:
        args, kwargs = node.filled(values)
        if not isinstance(node.operation, MultiHeadAttention):
            memory = kwargs.get("memory", args[1] if len(args) > 1 else None)
            return node.operation.new_cache(batch_size, num_slots, memory)
        if self._graph.depends_on_target(node.numbers_of("value", 1)):
            return node.operation.new_cache(batch_size, num_slots)
        key = kwargs.get("key", args[2] if len(args) > 2 else None)
        return node.operation.new_memory(kwargs.get("value", args[1] if len(args) > 1 else None), key)


def _masks_of_memory(node: Node, masks: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The masks that Keras would give to a node for the arguments that the cache stands for, by their names."""
    if isinstance(node.operation, MultiHeadAttention):
        numbers = {"value_mask": node.numbers_of("value", 1), "key_mask": node.numbers_of("key", 2)}
    else:
        numbers = {"memory_mask": node.numbers_of("memory", 1)}
    return {name: masks[number] for name, found in numbers.items() for number in found if number in masks}


def _tied_logits(operation: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The logits of a `TokenEmbedding` called with `reverse=True`, on TensorFlow without XLA or export; else None.

    TensorFlow would transpose the table in every step; this transposes the logits instead, which are smaller.
    """
    is_ours = isinstance(operation, TokenEmbedding) and type(operation).call is TokenEmbedding.call
    is_tied = is_ours and kwargs.get("reverse")
    if not is_tied or operation.tokens.quantization_mode or not without_xla():
        return None
    if exported_weights.current([operation.tokens]) is not None:
        return None
    table = ops.cast(operation.tokens.embeddings, operation.compute_dtype)  # (V, D)
    rows = ops.reshape(ops.cast(args[0], table.dtype), (-1, table.shape[1]))
    logits = tf.transpose(tf.matmul(table, rows, transpose_b=True))
    logits = ops.reshape(logits, (-1, ops.shape(args[0])[1], table.shape[0]))
    return operation.without_padding(logits, axis=-1)

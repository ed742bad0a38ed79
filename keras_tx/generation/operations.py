"""Classifies the operations of a functional model for generation: which mix tokens, which embed ids."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import keras

from keras_tx.functional_graph import Node
from keras_tx.internals import keras_models
from keras_tx.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RotaryEmbedding,
    TokenEmbedding,
)

WITH_CACHE = (MultiHeadAttention, DecoderLayer, Decoder)
LOOKING_AT_OTHER_TOKENS = (
    *WITH_CACHE,
    Encoder,
    EncoderLayer,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.RNN,
    keras.layers.Bidirectional,
    keras.layers.Conv1D,
    keras.layers.SeparableConv1D,
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.AveragePooling1D,
    keras.layers.MaxPooling1D,
    keras.layers.Flatten,
    keras.layers.Permute,
    keras.layers.Reshape,
)
_JOINING_COLUMNS = (
    *(keras.layers.Add, keras.layers.Average, keras.layers.Concatenate, keras.layers.Maximum, keras.layers.Minimum),
    *(keras.layers.Multiply, keras.layers.Subtract, *keras_models.ELEMENTWISE),
)
_NORMALIZING = (keras.layers.LayerNormalization, keras.layers.RMSNormalization)
_TREATING_EACH_TOKEN_SEPARATELY = (
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.Dense,
    keras.layers.Dropout,
    keras.layers.Embedding,
    *_NORMALIZING,
)


def is_known(node: Node, depends_on_target: Callable[[Iterable[int]], bool]) -> bool:
    """Whether it is known which tokens a node mixes. A model with unknown operations is tested numerically."""
    operation = node.operation
    if not all(_is_elementwise(getattr(layer, "activation", None)) for layer in layers_within(operation)):
        return False
    if type(operation) in _NORMALIZING:
        return _normalizes_last_axis(node)
    if type(operation) is keras.layers.Add:  # tokens of a source would be added to those of another length
        return all(depends_on_target([value]) for value in node.inputs.values())
    if type(operation).__module__.startswith("keras_tx."):
        return all(map(_is_known_within, layers_within(operation)))
    return type(operation) in (*_TREATING_EACH_TOKEN_SEPARATELY, keras_models.NOT_EQUAL, keras_models.CAST)


def keeps_padding_out(node: Node, padding_ids: Collection[int | None]) -> bool:
    """Whether it is known that padding of sources changes no outputs of a node at real tokens.

    A model with other operations is tested numerically.

    Args:
        node: takes values that depend on sources.
        padding_ids: of the sources.
    """
    operation = node.operation
    if isinstance(operation, (TokenEmbedding, keras.layers.Embedding)) and padding_id(operation) is None:
        return False  # there is no mask for the layers that follow
    if type(operation) is keras_models.NOT_EQUAL:
        return compared_with(node) in padding_ids
    if type(operation) is keras_models.CAST:
        return False  # the mask that Keras keeps with a tensor is lost
    return getattr(operation, "supports_masking", True) and is_known(node, lambda values: True)


def _is_elementwise(activation: Any) -> bool:
    """Whether an activation is a function of Keras or of this package, or None; others could mix tokens."""
    if isinstance(activation, keras.layers.Layer):  # such as `keras.layers.Softmax(axis=1)`
        return False
    module = str(getattr(activation, "__module__", None))
    return activation is None or module.startswith("keras_tx.") or keras_models.is_of_keras(activation)


def _is_known_within(layer: keras.layers.Layer) -> bool:
    """Whether a layer inside one of keras_tx, such as a norm that a user gave, treats each token separately."""
    if type(layer) in _NORMALIZING:
        return layer.axis in (-1, [-1])
    return type(layer).__module__.startswith("keras_tx.") or type(layer) in _TREATING_EACH_TOKEN_SEPARATELY


def _normalizes_last_axis(node: Node) -> bool:
    axis = node.operation.axis
    first = next(x for x in keras.tree.flatten((node.args, node.kwargs)) if isinstance(x, keras.KerasTensor))
    rank = len(first.shape)
    return {one % rank for one in (axis if isinstance(axis, (list, tuple)) else [axis])} == {rank - 1}


def call_arguments(operation: Any) -> Mapping[str, Any]:
    """The call arguments of a layer by name; none for another operation."""
    return inspect.signature(operation.call).parameters if isinstance(operation, keras.layers.Layer) else {}


def call(operation: Any, args: Any, kwargs: Any) -> Any:
    """Calls an operation in inference mode."""
    if "training" in call_arguments(operation):
        kwargs = {**kwargs, "training": False}
    return operation(*args, **kwargs)


def depends_on_length(operation: Any) -> bool:
    """Whether a layer has rotary positions that depend on the largest position of a call."""
    rotaries = [layer for layer in layers_within(operation) if isinstance(layer, RotaryEmbedding)]
    return any(rotary.scaling is not None and rotary.scaling["rope_type"] == "dynamic" for rotary in rotaries)


def looks_at_other_tokens(operation: Any) -> bool:
    return any(isinstance(layer, LOOKING_AT_OTHER_TOKENS) for layer in layers_within(operation))


def layers_within(operation: Any) -> list[Any]:
    """A layer and the layers within it; none for another operation."""
    return keras_models.layers_within(operation) if isinstance(operation, keras.layers.Layer) else []


def joined_values(node: Node) -> list[int]:
    """The numbers of the values that a node adds, or joins otherwise, token by token; none if it does not.

    A value that is not of as many tokens as the others, such as their mean, is left out.
    """
    if type(node.operation) not in _JOINING_COLUMNS or getattr(node.operation, "axis", -1) in (1, -2):
        return []
    tensors = [x for x in keras.tree.flatten((node.args, node.kwargs)) if isinstance(x, keras.KerasTensor)]
    lengths = {node.inputs[id(x)]: x.shape[1] or math.inf for x in tensors if len(x.shape) > 2}
    return [number for number, length in lengths.items() if length == max(lengths.values())]


def memory_values(node: Node) -> list[int]:
    """The numbers of the values that a node with a cache attends to, other than its own input."""
    if isinstance(node.operation, MultiHeadAttention):
        return [*node.numbers_of("value", 1), *node.numbers_of("key", 2)]
    return node.numbers_of("memory", 1)


def compared_with(node: Node) -> int | float | None:
    """The number that a node `x != number` compares with; None for any other node."""
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, (int, float))]
    return numbers[0] if type(node.operation) is keras_models.NOT_EQUAL and numbers else None


def embedding_of(value: int, nodes: Collection[Node]) -> Any | None:
    """The layer that embeds the ids with this number, if there is one; it may embed segment ids as well."""
    embedding = [x for x in nodes if isinstance(x.operation, (TokenEmbedding, keras.layers.Embedding))]
    return next((x.operation for x in embedding if value in before_casts(x.numbers_of("inputs", 0), nodes)), None)


def before_casts(values: Iterable[int], nodes: Iterable[Node]) -> list[int]:
    """The numbers of the values from which these were cast, as the ids of a float `keras.Input` are; else their own."""
    casts = [node for node in nodes if keras_models.is_cast_of_numbers(node.operation)]
    sources = {output: value for node in casts for output in node.outputs for value in node.inputs.values()}
    values = list(values)
    while any(value in sources for value in values):
        values = [sources.get(value, value) for value in values]
    return values


def padding_id(embedding: Any | None) -> int | None:
    if isinstance(embedding, keras.layers.Embedding):
        return 0 if embedding.mask_zero else None
    return None if embedding is None else embedding.padding_id


def vocabulary_size(embedding: Any | None) -> int | None:
    if isinstance(embedding, keras.layers.Embedding):
        return int(embedding.input_dim)
    return None if embedding is None else int(embedding.vocabulary_size)


def adds_positions(operation: Any) -> bool:
    return not isinstance(operation, TokenEmbedding) or operation.positions is not None


def max_positions(nodes: Iterable[Node]) -> int | None:
    """The smallest number of learned positions of any layer; None if there are no learned positions."""
    layers = [layer for node in nodes for layer in layers_within(node.operation)]
    return min((x.max_length for x in layers if isinstance(x, LearnedPositionalEncoding)), default=None)

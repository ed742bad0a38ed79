"""The graph of a functional model -> its nodes in the order in which they run, and what they are.

The nodes of nested models stand in their place. A value has a symbol, an integer, for which a run of the nodes finds a
tensor.
"""

import keras
from keras.src.models import Functional  # public only as what `keras.Model(inputs, outputs)` returns

from keras_tx.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    TokenEmbedding,
)

ATTENTION = (MultiHeadAttention, DecoderLayer, Decoder)
MIXING = (
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
# Of all other operations nobody knows: models that have some are tried out.
_BY_ITSELF = (
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.Dense,
    keras.layers.Dropout,
    keras.layers.Embedding,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
)


class Node:
    """One call of an operation: which values go in, which come out."""

    def __init__(self, node, symbols, fresh):
        self.operation = node.operation
        self.arguments = node.arguments
        self.inputs = {id(x): symbols[id(x)] for x in node.input_tensors}
        self.outputs = [fresh() for _ in node.outputs]

    def filled(self, values):
        """The arguments of the call; None for a memory that is in the cache."""
        return self.arguments.fill_in({key: values.get(symbol) for key, symbol in self.inputs.items()})

    def symbols_of(self, name, index):
        """The values that go into the call argument of this name or place."""
        args, kwargs = self.arguments.args, self.arguments.kwargs
        given = args[index] if index < len(args) else kwargs.get(name)
        return [self.inputs[id(x)] for x in keras.tree.flatten(given) if isinstance(x, keras.KerasTensor)]


def inlined(function, inputs, fresh):
    """The nodes of `function` (a functional model), whose inputs have the symbols `inputs`, and its output symbols.

    Args:
        fresh: makes a symbol.
    """
    nodes, symbols = [], dict(zip((id(x) for x in function.inputs), inputs, strict=True))
    for depth in sorted(function._nodes_by_depth, reverse=True):
        for node in function._nodes_by_depth[depth]:
            if node.is_input or any(id(x) not in symbols for x in node.input_tensors):
                continue
            if isinstance(node.operation, (keras.Sequential, Functional)):
                given = [symbols[id(x)] for x in keras.tree.flatten(node.arguments.args[0])]
                found, outputs = inlined(functional(node.operation), given, fresh)
                nodes += found
            else:
                nodes.append(Node(node, symbols, fresh))
                outputs = nodes[-1].outputs
            symbols.update(zip((id(x) for x in node.outputs), outputs, strict=True))
    return nodes, [symbols[id(x)] for x in function.outputs]


def is_known(operation):
    of_this_package = type(operation).__module__.startswith("keras_tx.")
    if isinstance(operation, keras.layers.Activation):
        return getattr(operation.activation, "__module__", "").startswith("keras.")
    return of_this_package or type(operation) in _BY_ITSELF or type(operation).__name__ == "NotEqual"


def compared_with(node):
    """The number that a node `x != number` compares with; None of any other node."""
    numbers = [x for x in (*node.arguments.args, *node.arguments.kwargs.values()) if isinstance(x, (int, float))]
    return numbers[0] if type(node.operation).__name__ == "NotEqual" and numbers else None


def check_no_softmax(operation):
    """Strategies would take probabilities for logits, and flatten them."""
    activation = getattr(operation, "activation", None)
    if isinstance(operation, keras.layers.Softmax) or activation is keras.activations.softmax:
        raise ValueError(
            "The output of `model` must be logits, not probabilities. Received: a softmax in the last layer, "
            f"'{operation.name}'"
        )


def functional(model):
    function = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    if not isinstance(function, Functional):
        raise TypeError(f"`model` must be a functional keras.Model, built. Received: model={model!r}")
    return function


def shortest_table(nodes):
    """The length of the shortest table of learned positions; None if there is none."""
    layers = [layer for node in nodes for layer in layers_of(node.operation)]
    return min((x.max_length for x in layers if isinstance(x, LearnedPositionalEncoding)), default=None)


def layers_of(operation):
    return operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []


def padding_id(embedding):
    if isinstance(embedding, keras.layers.Embedding):
        return 0 if embedding.mask_zero else None
    return None if embedding is None else embedding.padding_id


def vocabulary_size(embedding):
    if isinstance(embedding, keras.layers.Embedding):
        return embedding.input_dim
    return None if embedding is None else embedding.vocabulary_size


def adds_positions(operation):
    return not isinstance(operation, TokenEmbedding) or operation.positions is not None


def parameters_of(operation):
    return operation._call_signature.parameters if isinstance(operation, keras.layers.Layer) else ()


def call(operation, args, kwargs):
    if "training" in parameters_of(operation):
        kwargs = {**kwargs, "training": False}
    return operation(*args, **kwargs)


def store(values, node, outputs):
    values.update(zip(node.outputs, keras.tree.flatten(outputs), strict=False))

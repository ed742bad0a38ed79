"""What generation asks of the operations of a functional model: which look at other tokens, and what it refuses."""

import keras

from keras_tx import keras_internals
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


def is_known(operation):
    of_this_package = type(operation).__module__.startswith("keras_tx.")
    if isinstance(operation, keras.layers.Activation):
        return keras_internals.is_of_keras(operation.activation)
    return of_this_package or type(operation) in (*_BY_ITSELF, keras_internals.NOT_EQUAL)


def compared_with(node):
    """The number that a node `x != number` compares with; None of any other node."""
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, (int, float))]
    return numbers[0] if type(node.operation) is keras_internals.NOT_EQUAL and numbers else None


def check_no_softmax(operation):
    """Strategies would take probabilities for logits, and flatten them."""
    activation = getattr(operation, "activation", None)
    if isinstance(operation, keras.layers.Softmax) or activation is keras.activations.softmax:
        raise ValueError(
            "The output of `model` must be logits, not probabilities. Received: a softmax in the last layer, "
            f"'{operation.name}'"
        )


def functional(model):
    function = keras_internals.functional_model(model)
    if function is None:
        raise TypeError(f"`model` must be a functional keras.Model, built. Received: model={model!r}")
    return function


def shortest_table(nodes):
    """The length of the shortest table of learned positions; None if there is none."""
    layers = [layer for node in nodes for layer in layers_of(node.operation)]
    return min((x.max_length for x in layers if isinstance(x, LearnedPositionalEncoding)), default=None)


def layers_of(operation):
    return keras_internals.layers_within(operation) if isinstance(operation, keras.layers.Layer) else []


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

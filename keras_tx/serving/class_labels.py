"""Labels and probabilities for the head of an encoder model: which output it is, and whether it returns logits.

B batch, T tokens, C classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

from keras_tx.functional_graph import source_of
from keras_tx.internals.keras_models import SIGMOID, SOFTMAX
from keras_tx.optional import Lazy
from keras_tx.serving.text_encoder import TextEncoder
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# A function of ids, segment ids and the padding id, as `TextEncoder.__call__`, that returns tensors by name.
Outputs: TypeAlias = Callable[..., dict[str, Tensor]]


def check_labels(encoder: TextEncoder, labels: Sequence[str] | None) -> list[str]:
    """Returns the labels as a list, one for each class of the model; "0", "1", ... if `labels` is None.

    Raises:
        ValueError: the labels do not match the model's output, or the output is not a distribution over classes.
    """
    name, output = head_of(encoder)
    activation = _activation(output)
    count = output.shape[-1]
    taken = sorted({"label", "probabilities"} & (set(encoder.outputs) - {name}))
    if taken:
        raise ValueError(f"`model` must not have outputs named as what `labels` add. Received: outputs {taken}")
    if count == 1 and activation in (keras.activations.linear, keras.activations.sigmoid):
        count = 2  # no or yes
    elif count == 1 and activation is None:
        raise ValueError(
            "`model` must end in a layer that tells whether its single number is a logit or a probability, such as "
            f"`keras.layers.Activation('sigmoid')`. Received: output '{name}'"
        )
    elif activation not in (None, keras.activations.linear, keras.activations.softmax):
        raise ValueError(
            "`model` must return logits or probabilities: its `activation` must be None or 'softmax'. Received: "
            f"activation={getattr(activation, '__name__', activation)} of output '{name}'"
        )
    if labels is None:
        return [str(index) for index in range(count)]
    is_list = isinstance(labels, Sequence) and not isinstance(labels, str)
    strings = is_list and all(isinstance(label, str) for label in labels)
    if not strings or len(set(labels)) != count or len(labels) != count:
        raise ValueError(
            f"`labels` must be a list of {count} different strings, one for each class of the model. "
            f"Received: labels={labels!r}"
        )
    return list(labels)


def classifier_outputs(encoder: TextEncoder, labels: list[str]) -> Outputs:
    """A function that returns `label` and `probabilities` for the head's output, and all other outputs by name."""
    name, output = head_of(encoder)
    names, activation, is_single = tf.constant(labels), _activation(output), output.shape[-1] == 1
    are_logits = activation is keras.activations.linear
    if activation is None:
        are_logits = not _are_probabilities(encoder, name)

    def run(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> dict[str, Tensor]:
        outputs = encoder(ids, segments, padding_id)
        scores = tf.cast(outputs.pop(name), "float32")
        if is_single:
            scores = tf.sigmoid(scores) if are_logits else scores
            scores = tf.concat([1 - scores, scores], axis=-1)
        probabilities = tf.nn.softmax(scores) if are_logits and not is_single else scores
        return {**outputs, "label": tf.gather(names, tf.argmax(scores, axis=-1)), "probabilities": probabilities}

    return run


def head_of(encoder: TextEncoder) -> tuple[str, Tensor]:
    """Returns the name of the output over the classes, and its symbolic tensor.

    Raises:
        ValueError: the model has several outputs and none of them is named "logits", or it has no axis of classes.
    """
    names = list(encoder.outputs)
    name = names[0] if len(names) == 1 else "logits"
    if name not in names or len(encoder.outputs[name].shape) < 2:
        raise ValueError(
            "`labels` are for a model with one output (B, ..., C), or one that is named 'logits'. Received: outputs "
            f"{ {key: x.shape for key, x in encoder.outputs.items()} }"
        )
    return name, encoder.outputs[name]


def _activation(tensor: Tensor) -> Any:
    """The activation function that made a tensor; None for an operation without one."""
    call = source_of(tensor, inside_models=True)
    if call is None:
        return None
    operation = call.operation
    activation = getattr(operation, "activation", None)
    changes_nothing = isinstance(operation, keras.layers.Activation) and activation is keras.activations.linear
    if changes_nothing or isinstance(operation, keras.layers.Dropout):
        return _activation(call.inputs[0])
    if isinstance(operation, (keras.layers.Softmax, SOFTMAX)):
        return keras.activations.softmax
    return keras.activations.sigmoid if isinstance(operation, SIGMOID) else activation


def _are_probabilities(encoder: TextEncoder, name: str) -> bool:
    """Whether an output is probabilities, judged by its values for a few rows of ids."""
    size, width = min(encoder.vocabulary_size or 2, 11), encoder.fixed_length or min(5, encoder.max_length or 5)
    ids = tf.constant([[(row + 3 * column) % size for column in range(width)] for row in range(7)], "int32")
    numbers = tf.cast(encoder(ids, padding_id=-1)[name], "float64").numpy()
    return bool(((numbers >= 0) & (numbers <= 1)).all() and (abs(numbers.sum(-1) - 1) < 0.02).all())

"""Labels and probabilities for the head of an encoder model: which output it is, and whether it returns logits.

B batch, T tokens, C classes. Of most heads exactly one class is right, and the probabilities of the classes sum to 1. A
multi-label head answers yes or no for each class, so that a text may have several labels, or none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras

from keras_tx.functional_graph import source_of
from keras_tx.internals.keras_models import SIGMOID, SOFTMAX
from keras_tx.optional import Lazy
from keras_tx.pretrained import PretrainedModel
from keras_tx.serving.text_encoder import TextEncoder
from keras_tx.text.python_inputs import is_encodable
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

# A function of ids, segment ids and the padding id, as `TextEncoder.__call__`, that returns tensors by name.
Outputs: TypeAlias = Callable[..., dict[str, Tensor]]

THRESHOLD = 0.5  # of a multi-label head: the least probability of a class whose label is returned
BINARY_LOSSES = (keras.losses.BinaryCrossentropy, keras.losses.BinaryFocalCrossentropy)
# The functions of these losses, and names in `compile`. All of them take probabilities.
BINARY_LOSS_FUNCTIONS = (
    *(keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy),
    *("binary_crossentropy", "bce", "BCE", "BinaryCrossentropy"),
    *("binary_focal_crossentropy", "BinaryFocalCrossentropy"),
)


def multi_label_kind(encoder: TextEncoder, model: keras.Model) -> str | None:
    """Returns what a multi-label head returns for each class, "logits" or "probabilities"; None for other heads.

    A head of several classes is multi-label if its activation is sigmoid, if the config of a checkpoint says so, or if
    it returns logits and the model was compiled with a binary cross-entropy.

    Args:
        encoder: the inputs and outputs of `model`.
        model: the model, which knows its loss.

    Raises:
        ValueError: the head returns logits, and the loss takes probabilities.
    """
    name, output = head_of(encoder)
    activation = _activation(output)
    if output.shape[-1] == 1 or activation not in (None, keras.activations.linear, keras.activations.sigmoid):
        return None
    if activation is keras.activations.sigmoid:
        return "probabilities"
    if isinstance(model, PretrainedModel) and model.config.get("problem_type") == "multi_label_classification":
        return "logits"
    loss = _loss_of(model, encoder, name)
    if isinstance(loss, BINARY_LOSSES):
        from_logits = loss.from_logits
    elif any(loss is one or (isinstance(loss, str) and loss == one) for one in BINARY_LOSS_FUNCTIONS):
        from_logits = False
    else:
        return None
    if activation is keras.activations.linear and not from_logits:
        raise ValueError(
            "`model` returns logits, so its loss must take logits: compile it with "
            f"`keras.losses.BinaryCrossentropy(from_logits=True)`. Received: loss={_name_of(loss)} with "
            f"from_logits=False, output '{name}' without an activation"
        )
    return "logits" if from_logits else "probabilities"


def check_labels(encoder: TextEncoder, labels: Sequence[str] | None, multi_label: str | None = None) -> list[str]:
    """Returns the labels as a list, one for each class of the model; "0", "1", ... if `labels` is None.

    Args:
        encoder: the model.
        labels: those that the user gave, or None.
        multi_label: what `multi_label_kind` returned.

    Raises:
        ValueError: the labels do not match the model's output, or the output is not a distribution over classes.
    """
    name, output = head_of(encoder)
    activation = _activation(output)
    count = output.shape[-1]
    added = {"labels" if multi_label else "label", "probabilities"}
    taken = sorted(added & (set(encoder.outputs) - {name}))
    if taken:
        raise ValueError(
            f"The outputs of `model` must not have the names {sorted(added)}, which `labels` adds. "
            f"Received: outputs {taken}"
        )
    if count is None:
        raise ValueError(
            "`labels` need an output whose last axis, that of the classes, has a known size. Received: output "
            f"'{name}' of shape {output.shape}"
        )
    if count == 1 and activation in (keras.activations.linear, keras.activations.sigmoid):
        count = 2  # no or yes
    elif count == 1 and activation is None:
        raise ValueError(
            "`model` must end in a layer that tells whether its single number is a logit or a probability, such as "
            f"`keras.layers.Activation('sigmoid')`. Received: output '{name}'"
        )
    elif not multi_label and activation not in (None, keras.activations.linear, keras.activations.softmax):
        raise ValueError(
            "`model` must return logits or probabilities: its `activation` must be None, 'softmax' or, where a text "
            f"may have several labels, 'sigmoid'. Received: activation={_name_of(activation)} of output '{name}'"
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
    if not all(is_encodable(label) for label in labels):
        raise ValueError(
            "`labels` must be strings that can be encoded as UTF-8, which has no lone surrogates. Received: "
            f"labels={labels!r}"
        )
    if multi_label and "" in labels:
        raise ValueError(
            "`labels` must not have '' for a model whose texts may have several labels: it stands for classes that a "
            f"text does not have. Received: labels={labels!r}"
        )
    return list(labels)


def classifier_outputs(encoder: TextEncoder, labels: list[str], multi_label: str | None = None) -> Outputs:
    """A function that returns `label` and `probabilities` for the head's output, and all other outputs by name.

    Of a multi-label head it returns `labels` instead of `label`, with an axis of classes as `probabilities` have it.
    """
    if multi_label:
        return _multi_label_outputs(encoder, labels, multi_label)
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


def _multi_label_outputs(encoder: TextEncoder, labels: list[str], kind: str) -> Outputs:
    name, _ = head_of(encoder)
    names = tf.constant(labels)

    def run(ids: Tensor, segments: Tensor = None, padding_id: int = 0) -> dict[str, Tensor]:
        outputs = encoder(ids, segments, padding_id)
        probabilities = tf.cast(outputs.pop(name), "float32")
        if kind == "logits":
            probabilities = tf.sigmoid(probabilities)
        found = tf.where(probabilities >= THRESHOLD, names, "")
        return {**outputs, "labels": found, "probabilities": probabilities}

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
    return keras.activations.sigmoid if isinstance(operation, SIGMOID) else _as_of_keras(activation)


def _as_of_keras(activation: Any) -> Any:
    """Softmax and sigmoid of `keras.ops` and TensorFlow as those of `keras.activations`; others as they are."""
    softmax, sigmoid = [keras.ops.softmax], [keras.ops.sigmoid]
    if keras.backend.backend() == "tensorflow":
        softmax, sigmoid = [*softmax, tf.nn.softmax], [*sigmoid, tf.nn.sigmoid]
    if any(activation is one for one in softmax):
        return keras.activations.softmax
    return keras.activations.sigmoid if any(activation is one for one in sigmoid) else activation


def _loss_of(model: keras.Model, encoder: TextEncoder, name: str) -> Any:
    """The loss that `model` was compiled with for the output `name`; None for a model that was not compiled."""
    loss = getattr(model, "loss", None)
    place = list(encoder.outputs).index(name)
    if isinstance(loss, Mapping):
        by_layer = dict(zip(encoder.outputs, encoder.model.output_names, strict=True))
        return loss.get(name, loss.get(by_layer[name]))
    if isinstance(loss, Sequence) and not isinstance(loss, str):
        return loss[place] if place < len(loss) else None
    return loss


def _name_of(function: Any) -> str:
    """The name of an activation or a loss for an error message."""
    return str(getattr(function, "__name__", None) or getattr(function, "name", function))


def _are_probabilities(encoder: TextEncoder, name: str) -> bool:
    """Whether an output is probabilities, judged by its values for a few rows of ids.

    Raises:
        ValueError: the values may be logits, or the probabilities of a multi-label head.
    """
    size, width = min(encoder.vocabulary_size or 2, 11), encoder.fixed_length or min(5, encoder.max_length or 5)
    ids = tf.constant([[(row + 3 * column) % size for column in range(width)] for row in range(7)], "int32")
    numbers = tf.cast(encoder(ids, padding_id=-1)[name], "float64").numpy()
    within = bool(((numbers >= 0) & (numbers <= 1)).all())
    distributed = bool((abs(numbers.sum(-1) - 1) < 0.02).all())
    if within and not distributed:
        raise ValueError(
            "`model` must end in a layer that tells whether its numbers are logits or probabilities, such as "
            "`keras.layers.Activation('softmax')`, or be compiled with a binary cross-entropy if a text may have "
            f"several labels. Received: output '{name}', all of whose numbers are between 0 and 1"
        )
    return within and distributed

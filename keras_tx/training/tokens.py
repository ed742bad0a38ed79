"""Functions for losses and metrics: which tokens count, and -log p of each label: (B, T), (B, T, V) -> (B, T).

B batch, T tokens, V vocabulary. Everything is computed in float32. Label smoothing: Szegedy et al. 2015,
arXiv:1512.00567.
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import keras
from keras import ops

from keras_tx.layers.ids import values_of
from keras_tx.optional import Lazy
from keras_tx.training.replicas import is_padding_row
from keras_tx.types import Shape, Tensor

tf = Lazy("tensorflow")


def checked_padding_id(value: Any) -> int:
    """Returns `value` as an integer; it may be negative."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"The argument `padding_id` must be an integer. Received: padding_id={value!r}")
    return int(value)


def checked_inputs(
    labels: Tensor, outputs: Tensor, padding_id: int, sample_weight: Tensor = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checks the arguments of a loss or metric.

    Labels equal to `padding_id` are padding, and so are those of rows that fill a batch up. The Keras mask of `outputs`
    is not used: it is the mask of the model's input, whose padding may differ from that of the labels.

    Returns:
        `labels` (B, T), int32, 0 at padding; `outputs` (B, T, V), float32; `real` (B, T), float32, 1 at real tokens and
        0 at padding; `weights` (B, T), float32, `sample_weight` at real tokens and 0 at padding.

    Raises:
        ValueError: for labels that are not integers, shapes that do not match, labels outside [0, V) and, without a
            strategy, predictions of fewer than three axes. Values can be checked only in eager calls. In a graph
            TensorFlow raises its own error for such a label; where no error can be raised (XLA, JAX, a GPU), its loss
            is NaN.
    """
    outputs = ops.convert_to_tensor(outputs)
    if len(outputs.shape) < 3 and not _has_strategy():
        raise ValueError(
            "The predictions must be (B, T, V), for labels (B, T). For one label in each row use "
            "`keras.losses.SparseCategoricalCrossentropy` and Keras' metrics, which have no padding; if you flattened "
            f"the tokens, restore their batch axis. Received: predictions.shape={tuple(outputs.shape)}"
        )
    labels, real, weights = checked_labels(labels, outputs.shape[:-1], outputs.shape[-1], padding_id, sample_weight)
    return labels, ops.cast(outputs, "float32"), real, weights


def checked_labels(
    labels: Tensor, expected: Shape, size: int, padding_id: int, sample_weight: Tensor = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`labels`, `real` and `weights` of `checked_inputs`, for predictions of the shape (*expected, size)."""
    labels = ops.convert_to_tensor(labels)
    dtype, shape = keras.backend.standardize_dtype(labels.dtype), tuple(labels.shape)
    if "int" not in dtype and not _has_strategy():
        raise ValueError(f"`y_true` must be integers. Received: y_true of dtype {dtype}")
    if not _is_prefix(shape, expected) or len(shape) != len(expected):
        raise ValueError(
            "`y_true` must have the shape of `y_pred` without the last axis. Received: y_true.shape="
            f"{shape}, y_pred.shape={(*expected, size)}"
        )
    values = values_of(labels)
    if values is not None:
        wrong = values[((values < 0) | (values >= size)) & (values != padding_id)]
        if wrong.size:
            raise ValueError(
                f"The labels must be in [0, {size}) or the `padding_id`. Received: label {wrong[0]}, "
                f"padding_id={padding_id}"
            )
    # A plain cast takes int64 modulo 2**32, and so might make a label outside [0, V) one within.
    labels = ops.saturate_cast(labels, "int32") if dtype == "int64" else ops.cast(labels, "int32")
    is_real = ops.not_equal(labels, padding_id)
    real = weights = ops.cast(is_real, "float32")
    if sample_weight is not None:
        given = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
        if not _is_prefix(given.shape, shape):
            raise ValueError(
                f"`sample_weight` must have the shape {shape} of the labels or of their first axes. Received: "
                f"sample_weight.shape={tuple(given.shape)}"
            )
        given = ops.reshape(given, (*ops.shape(given), *[1] * (len(shape) - len(given.shape))))
        is_real = ops.logical_and(is_real, ops.logical_not(is_padding_row(given)))
        real = ops.cast(is_real, "float32")
        weights = ops.where(is_real, given, 0.0)
    return ops.where(is_real, labels, 0), real, weights


def token_losses(
    labels: Tensor, outputs: Tensor, weights: Tensor, *, from_logits: bool, label_smoothing: float = 0.0
) -> Tensor:
    """-log p of every label, (B, T). Where the weight is 0, loss and gradient are 0, whatever `outputs` is.

    With smoothing e the target probability of the label is 1 - e + e/V and that of every other token e/V, as in
    `keras.losses.CategoricalCrossentropy`: (1 - e) * -log p[label] + e * mean over V of -log p.
    """
    is_counted = weights != 0
    if from_logits and keras.backend.backend() == "tensorflow":
        flat = _losses_from_logits(
            ops.reshape(labels, (-1,)), ops.reshape(outputs, (-1, outputs.shape[-1])), label_smoothing
        )
        losses = ops.reshape(flat, ops.shape(labels))
    else:
        outputs = ops.where(is_counted[..., None], outputs, 1.0)  # a NaN times 0 would be NaN
        if not from_logits:
            epsilon = keras.config.epsilon()
            outputs = ops.log(ops.clip(outputs / ops.sum(outputs, axis=-1, keepdims=True), epsilon, 1 - epsilon))
        losses = -(1 - label_smoothing) * _pick(labels, outputs)
        if from_logits:
            losses = losses + ops.logsumexp(outputs, axis=-1)
        if label_smoothing:
            losses = losses - label_smoothing * ops.mean(outputs, axis=-1)
    return ops.where(is_counted, losses, 0.0)


def _pick(labels: Tensor, outputs: Tensor) -> Tensor:
    """outputs[..., label]; NaN for a label outside [0, V), which backends would clip or count from the end."""
    size = outputs.shape[-1]
    taken = ops.take_along_axis(outputs, ops.clip(labels, 0, size - 1)[..., None], axis=-1)[..., 0]
    return ops.where((labels >= 0) & (labels < size), taken, float("nan"))


def _losses_from_logits(labels: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """The losses (N,) of labels (N,) and logits (N, V), on TensorFlow, with a gradient defined here.

    It reads and writes (N, V) half as often as automatic differentiation, and is faster than TensorFlow's own kernel. A
    row whose loss is not used has the gradient 0, even if it contains NaN. A label outside [0, V) is an error.
    """
    size = logits.shape[-1]

    def loss_of(logits: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        p = tf.nn.softmax(logits)
        # The largest p is 1 / sum(exp(x - max x)): this gives the log-sum-exp without another sum over the vocabulary.
        log_sum = tf.reduce_max(logits, axis=-1) - tf.math.log(tf.reduce_max(p, axis=-1))
        places = tf.stack([tf.range(tf.shape(labels)[0]), labels], axis=-1)
        # XLA would clip labels outside [0, V).
        own = tf.where((labels >= 0) & (labels < size), tf.gather_nd(logits, places), float("nan"))
        loss = log_sum - (1 - smoothing) * own
        if smoothing:
            loss -= smoothing * tf.reduce_mean(logits, axis=-1)

        def gradient(upstream: Tensor) -> Tensor:
            rows = tf.math.multiply_no_nan(p - smoothing / size if smoothing else p, upstream[:, None])
            return tf.tensor_scatter_nd_sub(rows, places, (1 - smoothing) * upstream)

        return loss, gradient

    return tf.custom_gradient(loss_of)(logits)


def _has_strategy() -> bool:
    """Whether a `tf.distribute` strategy is active: Keras then builds the loss with the mean of all labels, a float."""
    return keras.backend.backend() == "tensorflow" and bool(tf.distribute.has_strategy())


def _is_prefix(shape: Shape, whole: Shape) -> bool:
    """Whether `shape` is the shape of the first axes of `whole`, as far as both are known."""
    pairs = list(zip(shape, whole, strict=False))
    return len(pairs) == len(shape) and all(None in pair or pair[0] == pair[1] for pair in pairs)

"""What losses and metrics share: which tokens count, and -log p of each: (B, T), (B, T, V) -> (B, T).

B batch, T tokens, V vocabulary. Everything is float32. Label smoothing: Szegedy et al. 2015, arXiv:1512.00567.
"""

import keras
from keras import ops

from keras_tx.layers.ids import values_of
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def padding(value):
    """Returns `value` if it can be a `padding_id`: any integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"The argument `padding_id` must be an integer. Received: padding_id={value!r}")
    return value


def read(labels, outputs, padding_id, sample_weight=None):
    """Checks and returns (labels, outputs, real, weights): int32, then float32; labels, real and weights (B, T).

    `real` is 1 at tokens that are no padding, `weights` is `sample_weight` there, and both, as the label, are 0 at
    padding. Only the labels say what is padding, never the Keras mask of `outputs`: that one is the mask of the model's
    input, which need not have the padding of the labels.

    Raises:
        ValueError: for labels that are not integers, shapes that do not fit, and labels outside [0, V). Values can be
            read only in eager calls; in a graph such a label is TensorFlow's to refuse, and where nothing can raise
            (XLA, JAX, a GPU) its loss is NaN.
    """
    outputs = ops.convert_to_tensor(outputs)
    labels, real, weights = read_labels(labels, outputs.shape[:-1], outputs.shape[-1], padding_id, sample_weight)
    return labels, ops.cast(outputs, "float32"), real, weights


def read_labels(labels, expected, size, padding_id, sample_weight=None):
    """`read` of the labels alone, for predictions of the shape (*expected, size)."""
    labels = ops.convert_to_tensor(labels)
    dtype, shape = keras.backend.standardize_dtype(labels.dtype), tuple(labels.shape)
    if "int" not in dtype and not _replicated():
        raise ValueError(f"The labels must be integers. Received: labels of dtype {dtype}")
    if not _fits(shape, expected) or len(shape) != len(expected):
        raise ValueError(
            "The labels must have the shape of the predictions without the last axis. Received: labels.shape="
            f"{shape}, predictions.shape={(*expected, size)}"
        )
    values = values_of(labels)
    if values is not None:
        wrong = values[((values < 0) | (values >= size)) & (values != padding_id)]
        if wrong.size:
            raise ValueError(
                f"The labels must be in [0, {size}) or the `padding_id`. Received: label {wrong[0]}, "
                f"padding_id={padding_id}"
            )
    labels = ops.cast(labels, "int32")
    is_real = ops.not_equal(labels, padding_id)
    real = weights = ops.cast(is_real, "float32")
    if sample_weight is not None:
        given = ops.cast(ops.convert_to_tensor(sample_weight), "float32")
        if not _fits(given.shape, shape):
            raise ValueError(
                f"`sample_weight` must have the shape {shape} of the labels or of their first axes. Received: "
                f"sample_weight.shape={tuple(given.shape)}"
            )
        given = ops.reshape(given, (*ops.shape(given), *[1] * (len(shape) - len(given.shape))))
        weights = ops.where(is_real, given, 0.0)
    return ops.where(is_real, labels, 0), real, weights


def losses(labels, outputs, weights, *, from_logits, label_smoothing=0.0):
    """-log p of every label, 0 where the weight is 0: there nothing in `outputs` reaches the loss or its gradient.

    With smoothing e the label's own probability becomes 1 - e + e/V and that of every other token e/V, which is
    keras.losses.CategoricalCrossentropy's convention: (1 - e) * -log p[label] + e * mean over V of -log p.
    """
    counted = weights != 0
    if from_logits and keras.backend.backend() == "tensorflow":
        flat = _fused(ops.reshape(labels, (-1,)), ops.reshape(outputs, (-1, outputs.shape[-1])), label_smoothing)
        every = ops.reshape(flat, ops.shape(labels))
    else:
        outputs = ops.where(counted[..., None], outputs, 1.0)  # a NaN times 0 would be NaN
        if not from_logits:
            epsilon = keras.config.epsilon()
            outputs = ops.log(ops.clip(outputs / ops.sum(outputs, axis=-1, keepdims=True), epsilon, 1 - epsilon))
        every = -(1 - label_smoothing) * _at(labels, outputs)
        if from_logits:
            every = every + ops.logsumexp(outputs, axis=-1)
        if label_smoothing:
            every = every - label_smoothing * ops.mean(outputs, axis=-1)
    return ops.where(counted, every, 0.0)


def _at(labels, outputs):
    """outputs[..., label], NaN for a label outside: a backend would clip it or count it from the end."""
    size = outputs.shape[-1]
    taken = ops.take_along_axis(outputs, ops.clip(labels, 0, size - 1)[..., None], axis=-1)[..., 0]
    return ops.where((labels >= 0) & (labels < size), taken, float("nan"))


def _fused(labels, logits, smoothing):
    """(N,), (N, V) -> (N,) with a gradient of its own: half the passes over N x V, and TensorFlow's kernel is slow.

    A row whose loss is not used gets the gradient 0, whatever stands in it. A label outside [0, V) is an error.
    """
    size = logits.shape[-1]

    @tf.custom_gradient
    def loss_of(logits):
        p = tf.nn.softmax(logits)
        # The largest p is 1 / sum(exp(x - max x)): that spares the sum, and no small p is ever a logarithm's argument.
        log_sum = tf.reduce_max(logits, axis=-1) - tf.math.log(tf.reduce_max(p, axis=-1))
        places = tf.stack([tf.range(tf.shape(labels)[0]), labels], axis=-1)
        own = tf.where((labels >= 0) & (labels < size), tf.gather_nd(logits, places), float("nan"))  # XLA clips places
        loss = log_sum - (1 - smoothing) * own
        if smoothing:
            loss -= smoothing * tf.reduce_mean(logits, axis=-1)

        def gradient(upstream):
            rows = tf.math.multiply_no_nan(p - smoothing / size if smoothing else p, upstream[:, None])
            return tf.tensor_scatter_nd_sub(rows, places, (1 - smoothing) * upstream)

        return loss, gradient

    return loss_of(logits)


def _replicated():
    """Whether a `tf.distribute` strategy is at work: Keras then builds from the mean of all labels, a float."""
    return keras.backend.backend() == "tensorflow" and tf.distribute.has_strategy()


def _fits(shape, whole):
    """Whether `shape` is that of the first axes of `whole`, as far as both are known."""
    pairs = list(zip(shape, whole, strict=False))
    return len(pairs) == len(shape) and all(None in pair or pair[0] == pair[1] for pair in pairs)

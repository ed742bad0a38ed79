"""Cross-entropy computed from hidden states, a chunk of tokens at a time: (N, D), (V, D), (N,) -> scalar.

N tokens, D hidden, V vocabulary, C tokens of a chunk. Neither the full logits (N, V) nor their gradient are ever in
memory, and tokens without a label cost nothing. The gradients are computed in the same pass as the loss, because the
upstream gradient of a sum over tokens is a single factor. Wijmans et al. 2024, arXiv:2411.09009.
"""

from typing import Any

import keras
from keras import ops

from keras_tx.layers.gradients import twice_differentiable
from keras_tx.layers.loops import product, put, repeat
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def chunked_loss(
    hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, *, chunk_size: int, label_smoothing: float = 0.0
) -> Tensor:
    """The weighted sum of -log p of each label, differentiable with respect to `hidden` and `table`.

    Args:
        hidden: (N, D), the hidden states.
        table: (V, D), the kernel of the output layer: the logits are `hidden` times `table`, transposed, in the dtype
            of `hidden`.
        labels: (N,) integers in [0, V).
        weights: (N,) float32; tokens of weight 0 are ignored, even if `hidden` is NaN there.
        chunk_size: C.
        label_smoothing: e: the target probability is 1 - e + e/V for the label and e/V for every other token.

    Returns:
        A float32 scalar. NaN for a label outside [0, V).
    """

    def with_gradients(constants: tuple[Tensor, Tensor], hidden: Tensor, table: Tensor) -> Any:
        labels, weights = constants
        count, (vocabulary_size, hidden_dim) = ops.shape(hidden)[0], table.shape
        order = ops.argsort(ops.cast(ops.equal(weights, 0), "int32"))  # tokens that count come first
        num_chunks = -(-count // chunk_size)
        padded_count = num_chunks * chunk_size
        places = ops.concatenate([order, ops.zeros((padded_count - count,), dtype=order.dtype)])
        num_counted = ops.cast(ops.sum(ops.cast(ops.not_equal(weights, 0), "int32")), "int32")
        num_needed = (num_counted + chunk_size - 1) // chunk_size

        def add_chunk(index: Tensor, state: Any) -> Any:
            total, hidden_gradient, table_gradient = state
            start = index * chunk_size
            rows = ops.slice(places, (start,), (chunk_size,))
            is_counted = start + ops.arange(chunk_size, dtype="int32") < num_counted
            x = ops.where(is_counted[:, None], ops.take(hidden, rows, axis=0), 0)
            y, w = ops.take(labels, rows, axis=0), ops.where(is_counted, ops.take(weights, rows, axis=0), 0.0)
            logits = ops.cast(product(x, table, transpose_b=True), "float32")
            losses, gradients = _losses_and_gradients(logits, y, 1 - label_smoothing)
            if label_smoothing:
                losses = losses - label_smoothing * ops.matmul(ops.cast(x, "float32"), mean_row)
            gradients = ops.cast(gradients, x.dtype)
            x_gradient = (ops.cast(product(gradients, table), "float32") - label_smoothing * mean_row) * w[:, None]
            chunk_table_gradient = product(gradients, x * ops.cast(w, x.dtype)[:, None], transpose_a=True)
            total = total + ops.sum(ops.where(w != 0, losses * w, 0.0))
            table_gradient = table_gradient + ops.cast(chunk_table_gradient, "float32")
            return total, put(hidden_gradient, index, x_gradient), table_gradient

        mean_row = ops.mean(ops.cast(table, "float32"), axis=0)  # the gradient of the smoothing term, for all tokens
        zeros = [ops.zeros(shape, dtype="float32") for shape in ((num_chunks, chunk_size, hidden_dim), table.shape)]
        total, hidden_gradient, table_gradient = repeat(
            0, num_needed, add_chunk, (ops.zeros((), dtype="float32"), *zeros)
        )
        if label_smoothing:
            weighted = ops.where(weights[:, None] != 0, ops.cast(hidden, "float32") * weights[:, None], 0.0)
            table_gradient = table_gradient - (label_smoothing / vocabulary_size) * ops.sum(weighted, axis=0)
        hidden_gradient = ops.reshape(hidden_gradient, (padded_count, hidden_dim))
        hidden_gradient = ops.take(hidden_gradient, ops.argsort(order), axis=0)
        dtypes = [keras.backend.standardize_dtype(x.dtype) for x in (hidden, table)]

        def gradient(upstream: Tensor) -> Any:
            both = zip((hidden_gradient, table_gradient), dtypes, strict=True)
            return tuple(ops.cast(x * upstream, dtype) for x, dtype in both)

        return total, gradient

    made: Tensor = twice_differentiable(with_gradients, (labels, weights))(hidden, table)
    return made


def _losses_and_gradients(logits: Tensor, labels: Tensor, label_probability: float) -> tuple[Tensor, Tensor]:
    """log sum exp - label_probability * logit of the label, (C,), and its gradient for the logits, (C, V)."""
    probabilities = ops.softmax(logits, axis=-1)  # one pass on CPUs; exponentials, sums and quotients would be five
    log_sums = ops.max(logits, axis=-1) - ops.log(ops.max(probabilities, axis=-1))
    size = logits.shape[-1]
    own = ops.take_along_axis(logits, ops.clip(labels, 0, size - 1)[:, None], axis=-1)[:, 0]
    inside = ops.logical_and(labels >= 0, labels < size)
    losses = log_sums - label_probability * ops.where(inside, own, float("nan"))
    return losses, _subtract_at(probabilities, labels, ops.full_like(own, label_probability))


def _subtract_at(rows: Tensor, places: Tensor, amounts: Tensor) -> Tensor:
    """Returns `rows` with `amounts[i]` subtracted from `rows[i, places[i]]`."""
    if keras.backend.backend() == "tensorflow":
        indices = tf.stack([tf.range(tf.shape(places)[0]), tf.clip_by_value(places, 0, rows.shape[1] - 1)], axis=-1)
        return tf.tensor_scatter_nd_sub(rows, indices, amounts)
    here = ops.equal(ops.arange(rows.shape[1], dtype="int32")[None], places[:, None])
    return rows - ops.where(here, amounts[:, None], 0.0)

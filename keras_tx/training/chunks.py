"""The loss of a vocabulary from hidden vectors, some tokens at a time: (N, D), (V, D), (N,) -> a number.

N tokens, D hidden, V vocabulary, C tokens of a chunk. Neither the logits (N, V) nor their gradient are ever whole in
memory, and tokens without a label cost nothing. The gradients are computed beside the loss, in the same pass: of a sum
over tokens they are known up to one factor. Wijmans et al. 2024, arXiv:2411.09009.
"""

import keras
from keras import ops

from keras_tx.layers.loops import product, put, repeat
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def chunked_loss(hidden, table, labels, weights, *, chunk_size, label_smoothing=0.0):
    """The sum of -log p of each label, weighted; with its gradients for `hidden` and `table`.

    Args:
        hidden: (N, D); the logits are its products with the rows of `table`, in its dtype.
        table: (V, D).
        labels: (N,) integers in [0, V).
        weights: (N,) float32; tokens of weight 0 are left out, whatever stands there.
        chunk_size: C.
        label_smoothing: e: the target is 1 - e + e/V for the label and e/V for every other token.

    Returns:
        A float32 scalar. NaN for a label outside [0, V).
    """

    def with_gradients(hidden, table):
        count, (size, size_of_x) = ops.shape(hidden)[0], table.shape
        order = ops.argsort(ops.cast(ops.equal(weights, 0), "int32"))  # those that count come first
        num_chunks = -(-count // chunk_size)
        filled = num_chunks * chunk_size
        places = ops.concatenate([order, ops.zeros((filled - count,), dtype=order.dtype)])
        some = ops.cast(ops.sum(ops.cast(ops.not_equal(weights, 0), "int32")), "int32")
        needed = (some + chunk_size - 1) // chunk_size

        def chunk(index, state):
            total, of_hidden, of_table = state
            start = index * chunk_size
            rows = ops.slice(places, (start,), (chunk_size,))
            is_there = start + ops.arange(chunk_size, dtype="int32") < some
            x = ops.where(is_there[:, None], ops.take(hidden, rows, axis=0), 0)
            y, w = ops.take(labels, rows, axis=0), ops.where(is_there, ops.take(weights, rows, axis=0), 0.0)
            logits = ops.cast(product(x, table, transpose_b=True), "float32")
            losses, slopes = _losses_and_slopes(logits, y, 1 - label_smoothing)
            if label_smoothing:
                losses = losses - label_smoothing * ops.matmul(ops.cast(x, "float32"), mean_row)
            slopes = ops.cast(slopes, x.dtype)
            of_x = (ops.cast(product(slopes, table), "float32") - label_smoothing * mean_row) * w[:, None]
            of_chunk = product(slopes, x * ops.cast(w, x.dtype)[:, None], transpose_a=True)
            total = total + ops.sum(ops.where(w != 0, losses * w, 0.0))
            return total, put(of_hidden, index, of_x), of_table + ops.cast(of_chunk, "float32")

        mean_row = ops.mean(ops.cast(table, "float32"), axis=0)  # smoothing has one gradient for all tokens
        zeros = [ops.zeros(shape, dtype="float32") for shape in ((num_chunks, chunk_size, size_of_x), table.shape)]
        total, of_hidden, of_table = repeat(0, needed, chunk, (ops.zeros((), dtype="float32"), *zeros))
        if label_smoothing:
            weighted = ops.where(weights[:, None] != 0, ops.cast(hidden, "float32") * weights[:, None], 0.0)
            of_table = of_table - (label_smoothing / size) * ops.sum(weighted, axis=0)
        of_hidden = ops.take(ops.reshape(of_hidden, (filled, size_of_x)), ops.argsort(order), axis=0)
        dtypes = [keras.backend.standardize_dtype(x.dtype) for x in (hidden, table)]

        def gradient(*args, upstream=None):  # PyTorch names the upstream, behind what it was called with
            upstream = args[0] if upstream is None else upstream
            both = zip((of_hidden, of_table), dtypes, strict=True)
            return tuple(ops.cast(x * upstream, dtype) for x, dtype in both)

        return total, gradient

    return ops.custom_gradient(with_gradients)(hidden, table)


def _losses_and_slopes(logits, labels, share):
    """log sum exp - share * logit of the label, (C,), and the gradient of that for the logits (C, V)."""
    slopes = ops.softmax(logits, axis=-1)  # one pass on CPUs; exponentials, sums and quotients would be five
    normalizers = ops.max(logits, axis=-1) - ops.log(ops.max(slopes, axis=-1))
    size = logits.shape[-1]
    own = ops.take_along_axis(logits, ops.clip(labels, 0, size - 1)[:, None], axis=-1)[:, 0]
    inside = ops.logical_and(labels >= 0, labels < size)
    losses = normalizers - share * ops.where(inside, own, float("nan"))
    return losses, _subtract_at(slopes, labels, ops.full_like(own, share))


def _subtract_at(rows, places, amounts):
    """rows[i, places[i]] -= amounts[i]."""
    if keras.backend.backend() == "tensorflow":
        indices = tf.stack([tf.range(tf.shape(places)[0]), tf.clip_by_value(places, 0, rows.shape[1] - 1)], axis=-1)
        return tf.tensor_scatter_nd_sub(rows, indices, amounts)
    here = ops.equal(ops.arange(rows.shape[1], dtype="int32")[None], places[:, None])
    return rows - ops.where(here, amounts[:, None], 0.0)

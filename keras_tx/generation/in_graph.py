"""Generation in a TensorFlow graph, for any batch and any length: ragged rows of ids -> the rows of ids that follow.

B prompts, P tokens of the longest, n results of each, M new tokens. What `generate` does, without XLA, Python and
NumPy, so that a server can run it.
"""

from keras_tx.layers import xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def write(search, prompts, sources, limit, noise=None):
    """What `search` writes behind the prompts.

    Args:
        search: a `DecodeLoop`.
        prompts: ragged int32 (B, None), with a token in every row.
        sources: int32 tensors (B, S), padded on the right, in the order of `search.steps.sources`.
        limit: the number of new tokens, at most M, as the strategy takes it.
        noise: (M, B) for `Sample` and `PerRowStrategy`.

    Returns:
        The new tokens (B, n, M) and the scores (B, n), as `Strategy.result` has them.

    Raises:
        InvalidArgumentError: when the graph runs, where logits are NaN or no token is allowed.
    """
    ids, real = left_padded(prompts, search.padding_id)
    with xla.tracing(False):
        state, tokens, fixed = search.begin(ids, real, sources, limit, noise)
        state, _, _ = search.go_on(state, tokens, fixed, search.num_new)
    rule = "The logits must not be NaN, and some token must be allowed. Received: no token to choose at the new token"
    check = tf.debugging.Assert(tf.logical_not(state["broken"]), [rule, state["step"]])
    with tf.control_dependencies([check]):
        ids, scores = (tf.identity(x) for x in search.strategy.result(state))
    ids.set_shape([None, None, search.num_new])
    return ids, scores


def rows_of(ids, padding_id):
    """Ids, ragged or (B, T) with padding anywhere -> ragged (B, None) without it; None: nothing is padding."""
    rows = ids if isinstance(ids, tf.RaggedTensor) else tf.RaggedTensor.from_tensor(ids)
    return rows if padding_id is None else tf.ragged.boolean_mask(rows, rows != padding_id)


def right_padded(rows, padding_id):
    """Ragged (B, None) -> (B, P), P at least 1."""
    ids = rows.to_tensor(padding_id)
    return tf.pad(ids, [[0, 0], [0, tf.maximum(1 - tf.shape(ids)[1], 0)]], constant_values=padding_id)


def left_padded(rows, padding_id):
    """Ragged (B, None) -> ids (B, P) that all end in the same place, and True at those that are real; P at least 1."""
    ids = right_padded(rows, padding_id)
    width = tf.shape(ids)[1]
    places = tf.range(width)[None] - (width - tf.cast(rows.row_lengths(), "int32"))[:, None]  # (B, P)
    return tf.gather(ids, places % width, batch_dims=1), places >= 0


def lengths(ids, stop_tokens, limit):
    """The number of ids (B, n, M) up to the first stop token, which is counted, or up to `limit` (B, 1) or ()."""
    stops = tf.zeros_like(ids, tf.bool)
    for stop in stop_tokens:
        stops |= tf.equal(ids, stop)
    first = tf.argmax(tf.cast(stops, "int32"), axis=-1, output_type="int32")
    return tf.where(tf.reduce_any(stops, axis=-1), tf.minimum(first + 1, limit), limit)

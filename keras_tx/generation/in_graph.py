"""Generation in a TensorFlow graph, for any batch size and any length: ragged prompts -> their continuations.

B prompts, P tokens of the longest prompt, S source tokens, n results for each prompt, M new tokens. It does the same as
`generate`, without XLA, Python and NumPy, so that a server can run it.
"""

from typing import Any

from keras_tx.generation.decode_loop import DecodeLoop
from keras_tx.layers import exported_weights, xla
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")


def generate(
    loop: DecodeLoop, prompts: Tensor, sources: list[Tensor], limit: Tensor, noise: Tensor = None
) -> tuple[Tensor, Tensor]:
    """Generates the continuations of prompts.

    Args:
        loop: a `DecodeLoop`.
        prompts: ragged int32 (B, None), with at least one token in every row.
        sources: int32 tensors (B, S), padded on the right, in the order of `loop.model.sources`.
        limit: the number of new tokens, at most M, a scalar or (B,): see `Strategy.initial_state`.
        noise: (M, B) for `Sample` and `PerRowStrategy`.

    Returns:
        The new tokens (B, n, M) and the scores (B, n), as `Strategy.result` returns them.

    Raises:
        InvalidArgumentError: when the graph runs, if logits are NaN, no token is allowed, or a strategy chooses an id
            outside of the vocabulary.
    """
    ids, real = left_padded(prompts, loop.padding_id, least_columns(prompts.nrows()))
    least = least_source_columns(prompts.nrows(), loop.model)
    padding_ids = [loop.model.padding_ids[name] for name in loop.model.sources]
    sources = [
        at_least_columns(source, padding_id, least) for source, padding_id in zip(sources, padding_ids, strict=True)
    ]
    with xla.tracing(False):
        state, tokens, context = loop.prefill(ids, real, sources, limit, noise)
        state, _, _ = loop.decode(state, tokens, context, loop.num_new)
    rule = "The logits of `model` must not be NaN, the constraints must allow some token, and `choose` must return ids "
    rule += "of the vocabulary. Received: no valid token at the new token"
    check = tf.debugging.Assert(tf.logical_not(state["broken"]), [rule, state["step"]])
    with tf.control_dependencies([check]):
        ids, scores = (tf.identity(x) for x in loop.strategy.result(state))
    ids.set_shape([None, None, loop.num_new])
    return ids, scores


def ragged_rows(ids: Tensor, padding_id: int | None) -> Tensor:
    """Ids, ragged or (B, T) with padding anywhere -> ragged (B, None) without padding. `padding_id` may be None."""
    rows = ids if isinstance(ids, tf.RaggedTensor) else tf.RaggedTensor.from_tensor(ids)
    return rows if padding_id is None else tf.ragged.boolean_mask(rows, rows != padding_id)


def ragged_tokens(rows: Any) -> Tensor:
    """What `tokenize` of any tokenizer returns -> ragged (B, None), int32. Outside of a graph it may be B lists."""
    if not isinstance(rows, tf.RaggedTensor):
        rows = tf.ragged.constant(rows, "int32", ragged_rank=1)
    return rows.with_row_splits_dtype("int64")


def right_padded(rows: Tensor, padding_id: int, least: Tensor = 1) -> Tensor:
    """Ragged (B, None) -> (B, P), P at least `least`."""
    return at_least_columns(rows.to_tensor(padding_id), padding_id, least)


def at_least_columns(ids: Tensor, padding_id: int, least: Tensor = 1) -> Tensor:
    """Ids (B, P) padded on the right to `least` columns; at least 1: models may use the first token of each row."""
    return tf.pad(ids, [[0, 0], [0, tf.maximum(least - tf.shape(ids)[1], 0)]], constant_values=padding_id)


def least_columns(num_rows: Tensor, limit: int | None = None) -> Tensor:
    """How many columns rows of ids must have, so that the products of an export get enough rows; at most `limit`."""
    if exported_weights.current() is None:
        return 1
    least = -(-exported_weights.FEW_ROWS // tf.maximum(tf.cast(num_rows, "int32"), 1))
    return least if limit is None else tf.minimum(least, limit)


def least_source_columns(num_rows: Tensor, model: Any) -> Tensor:
    """As `least_columns`, for sources of an `IncrementalModel`: 1 if more padding would change its logits."""
    return least_columns(num_rows, model.max_source_length) if model.buckets_sources else 1


def left_padded(rows: Tensor, padding_id: int, least: Tensor = 1) -> tuple[Tensor, Tensor]:
    """Ragged (B, None) -> ids (B, P) that all end in the last slot, and True at real tokens (B, P); P: see above."""
    ids = right_padded(rows, padding_id, least)
    length = tf.shape(ids)[1]
    places = tf.range(length)[None] - (length - tf.cast(rows.row_lengths(), "int32"))[:, None]  # (B, P)
    return tf.gather(ids, places % length, batch_dims=1), places >= 0


def lengths(ids: Tensor, stop_tokens: tuple[int, ...], limit: Tensor) -> Tensor:
    """The number of ids (B, n, M) up to and with the first stop token, at most `limit`, (B, 1) or ()."""
    stops = tf.zeros_like(ids, tf.bool)
    for stop in stop_tokens:
        stops |= tf.equal(ids, stop)
    first = tf.argmax(tf.cast(stops, "int32"), axis=-1, output_type="int32")
    return tf.where(tf.reduce_any(stops, axis=-1), tf.minimum(first + 1, limit), limit)

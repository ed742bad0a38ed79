"""Checks what clients send, in the graph: ids (B, T) with lengths (B,), or tf.Examples (B,).

B batch, T tokens. The first axis of every input is the batch, so that a server can batch requests. Clients send lengths
instead of a padding mask, because a server pads short rows with the first value of the tensor, which for a mask is 1.
An invalid request fails, together with the other requests of the same batch; the message names the input.
"""

from collections.abc import Callable
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

FEATURE, PAIR_FEATURE = "text", "text_pair"  # inputs, and features of a tf.Example


def graph_function(*specs: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that makes a function a `tf.function` with this input signature."""
    return lambda function: tf.function(function, input_signature=list(specs), autograph=False)


def text_spec(name: str = "text") -> Any:
    """Strings (B,)."""
    return tf.TensorSpec([None], tf.string, name)


def id_specs(name: str = "token_ids", lengths_name: str = "lengths") -> list[Any]:
    """Ids (B, T) and lengths (B,)."""
    return [tf.TensorSpec([None, None], tf.int32, name), tf.TensorSpec([None], tf.int32, lengths_name)]


def checked_ids(
    token_ids: Tensor,
    lengths: Tensor,
    vocabulary_size: int | None,
    padding_id: int,
    max_length: int | None = None,
    *,
    name: str = "token_ids",
    lengths_name: str = "lengths",
) -> Tensor:
    """Returns the ids with padding after their lengths, whatever values a client or a server put there.

    An id outside the vocabulary never reaches the model, even on a server that strips assertions from its graphs.

    Args:
        token_ids: int32 (B, T).
        lengths: int32 (B,), the number of real tokens, which are on the left.
        vocabulary_size: V. None: unknown, so that only negative ids raise an error.
        padding_id: the id that replaces the ids after the lengths.
        max_length: the number of positions of the model; None if there is no limit.
        name, lengths_name: names of the two inputs, for the messages.

    Returns:
        int32 (B, T), ids in [0, V).

    Raises:
        InvalidArgumentError: when the graph runs, for ids outside [0, V), lengths outside [0, T] or over `max_length`,
            or another number of lengths than rows; the message names the input.
    """
    rows, width = tf.unstack(tf.shape(token_ids))
    largest = (vocabulary_size or token_ids.dtype.max) - 1
    ids_rule = f"{name} must be in [0, {vocabulary_size})" if vocabulary_size else f"{name} must not be negative"
    same_number = tf.equal(tf.shape(lengths)[0], rows)
    checks = [
        tf.debugging.Assert(same_number, [f"{lengths_name} must be one for each row of {name}. Received:", lengths]),
        _assert_none(token_ids, (token_ids < 0) | (token_ids > largest), ids_rule),
        _assert_none(
            lengths, (lengths < 0) | (lengths > width), f"{lengths_name} must be between 0 and the width of {name}"
        ),
    ]
    if max_length is not None:
        rule = f"{lengths_name} must be at most {max_length}, the positions of the model"
        checks.append(_assert_none(lengths, lengths > max_length, rule))
    with tf.control_dependencies(checks):
        token_ids = tf.clip_by_value(token_ids, 0, largest)
        return tf.where(tf.sequence_mask(lengths, width), token_ids, padding_id)


def _assert_none(values: Tensor, is_wrong: Tensor, rule: str) -> Any:
    """An assertion whose message has the first wrong values."""
    return tf.debugging.Assert(~tf.reduce_any(is_wrong), [f"{rule}. Received:", tf.boolean_mask(values, is_wrong)])


def checked_segments(segment_ids: Tensor, token_ids: Tensor, lengths: Tensor, num_segments: int | None) -> Tensor:
    """Returns the segment ids with 0 after the lengths, whatever values a client or a server put there.

    Args:
        segment_ids: int32 (B, T).
        token_ids: int32 (B, T), those of the same request.
        lengths: int32 (B,), the number of real tokens.
        num_segments: the number of segments that the model knows; None if unknown.

    Raises:
        InvalidArgumentError: when the graph runs, for another shape than that of the ids, or for segment ids outside
            [0, `num_segments`).
    """
    shape, largest = tf.shape(token_ids), (num_segments or segment_ids.dtype.max) - 1
    rule = f"segment_ids must be in [0, {num_segments})" if num_segments else "segment_ids must not be negative"
    same_shape = tf.reduce_all(tf.equal(tf.shape(segment_ids), shape))
    checks = [
        tf.debugging.Assert(
            same_shape, ["segment_ids must have the shape of token_ids. Received:", tf.shape(segment_ids), shape]
        ),
        _assert_none(segment_ids, (segment_ids < 0) | (segment_ids > largest), rule),
    ]
    with tf.control_dependencies(checks):
        segment_ids = tf.clip_by_value(segment_ids, 0, largest)
        return tf.where(tf.sequence_mask(lengths, shape[1]), segment_ids, 0)


def checked_pairs(text: Tensor, text_pair: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both inputs of a model of pairs of texts, strings (B,).

    Raises:
        InvalidArgumentError: when the graph runs, for another number of second texts than of first ones.
    """
    sizes = [tf.size(text), tf.size(text_pair)]
    rule = f"{PAIR_FEATURE} must be one for each {FEATURE}. Received:"
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(*sizes), [rule, *sizes])]):
        return tf.identity(text), tf.identity(text_pair)


def texts_of_examples(examples: Tensor, text_pairs: bool = False) -> list[Tensor]:
    """Serialized tf.Examples (B,) -> the strings (B,) of their feature "text", and of "text_pair" for pairs of texts.

    Raises:
        InvalidArgumentError: when the graph runs, for bytes that are no tf.Example, or an example without exactly one
            string in each of these features.
    """
    names = (FEATURE, PAIR_FEATURE) if text_pairs else (FEATURE,)
    found = tf.io.parse_example(examples, {name: tf.io.FixedLenFeature([], tf.string) for name in names})
    return [found[name] for name in names]

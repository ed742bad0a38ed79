"""What clients send -> ids of a model, checked in the graph: ids (B, T) with lengths (B,), or tf.Examples (B,).

B batch, T tokens. Every input has the batch as its first axis, so that a server may put requests together. No padding
mask comes from outside: a server fills short rows up with the first value of the tensor, for a mask that is 1. What is
refused ends the request, and those that the server put into one batch with it, with a message that names the input.
"""

from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

FEATURE = "text"  # of a tf.Example


def text_spec(name="text"):
    """Strings (B,)."""
    return tf.TensorSpec([None], tf.string, name)


def id_specs(name="token_ids", lengths_name="lengths"):
    """Ids (B, T) and lengths (B,)."""
    return [tf.TensorSpec([None, None], tf.int32, name), tf.TensorSpec([None], tf.int32, lengths_name)]


def ids_in(
    token_ids,
    lengths,
    vocabulary_size,
    padding_id,
    max_length=None,
    *,
    name="token_ids",
    lengths_name="lengths",
):
    """Ids with padding behind their lengths; whatever a client or a server put there is gone.

    An id outside the vocabulary never gets further, also where a server strips assertions from its graphs.

    Args:
        token_ids: int32 (B, T).
        lengths: int32 (B,), the number of real tokens, which stand on the left.
        vocabulary_size: V; None if it isn't known, then only negative ids are refused.
        padding_id: what is written behind the lengths.
        max_length: the positions of the model; None if they have no end.
        name, lengths_name: of the two inputs, for the messages.

    Returns:
        int32 (B, T), ids in [0, V).

    Raises:
        InvalidArgumentError: when the graph runs, for ids outside [0, V), lengths outside [0, T] or over `max_length`,
            or another number of lengths than rows; the message names the input.
    """
    rows, width = tf.unstack(tf.shape(token_ids))
    largest = (vocabulary_size or token_ids.dtype.max) - 1
    ids_rule = f"{name} must be in [0, {vocabulary_size})" if vocabulary_size else f"{name} must not be negative"
    one_each = tf.equal(tf.shape(lengths)[0], rows)
    checks = [
        tf.debugging.Assert(one_each, [f"{lengths_name} must be one for each row of {name}. Received:", lengths]),
        _none_of(token_ids, (token_ids < 0) | (token_ids > largest), ids_rule),
        _none_of(
            lengths, (lengths < 0) | (lengths > width), f"{lengths_name} must be between 0 and the width of {name}"
        ),
    ]
    if max_length is not None:
        rule = f"{lengths_name} must be at most {max_length}, the positions of the model"
        checks.append(_none_of(lengths, lengths > max_length, rule))
    with tf.control_dependencies(checks):
        token_ids = tf.clip_by_value(token_ids, 0, largest)
        return tf.where(tf.sequence_mask(lengths, width), token_ids, padding_id)


def _none_of(values, wrong, rule):
    """An assertion that shows the first values that are wrong."""
    return tf.debugging.Assert(~tf.reduce_any(wrong), [f"{rule}. Received:", tf.boolean_mask(values, wrong)])


def examples_in(serialized):
    """Serialized tf.Examples (B,) -> the strings (B,) of their feature "text".

    Raises:
        InvalidArgumentError: when the graph runs, for bytes that are no tf.Example, or one without a single "text".
    """
    return tf.io.parse_example(serialized, {FEATURE: tf.io.FixedLenFeature([], tf.string)})[FEATURE]

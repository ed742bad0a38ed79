"""The state of generation, a dict of tensors that strategies update, and operations that strategies share.

B prompts, W rows for each prompt (beams, or 1), R = B * W with the rows of a prompt side by side, P prompt slots, M new
slots, L = P + M, V vocabulary. No shape changes from step to step, so that a compiled loop can carry the state:

    ids (R, L) int32      prompts, all ending in the same slot, then the new tokens; `padding` in empty slots
    real (R, L) bool      True at tokens: of the prompt, and generated while the prompt was not done
    done (B,) bool        True for finished prompts, whose rows no longer change
    broken () bool        True once a row that was not done had no allowed token
    step () int32         the number of tokens generated so far
    slot () int32         the slot of the next token: P + step
    limit () int32        the number of tokens to generate, at most M; (B,) if each prompt has its own
    padding () int32      the padding id

Strategies add entries of their own. A token is stored by comparing slot numbers, because a slice that starts at a
tensor gives wrong results inside an XLA loop, and TensorFlow Serving lacks the operation behind `ops.slice_update`.
"""

from typing import TypeAlias

import keras
from keras import ops

from keras_tx.layers import xla
from keras_tx.layers.cache import repeat_rows
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

State: TypeAlias = dict[str, Tensor]

_PART = 128  # the scores of a part of a row in which `best_tokens` searches


def initial_state(
    ids: Tensor, real: Tensor, *, rows_per_prompt: int, num_new: int, limit: Tensor, padding_id: Tensor
) -> State:
    """The state before the first new token.

    Args:
        ids: (B, P) prompts, padded on the left.
        real: (B, P), True where `ids` holds a token of the prompt.
        rows_per_prompt: W.
        num_new: M, a Python integer.
        limit: an integer or a tensor () or (B,).
        padding_id: an integer or a scalar tensor.
    """
    real = ops.cast(real, "bool")
    done = ops.zeros_like(real[:, 0])
    ids, real = repeat_rows(as_int32(ids), rows_per_prompt), repeat_rows(real, rows_per_prompt)
    empty = fill(as_int32(padding_id), ids, num_new)
    return {
        "ids": ops.concatenate([ids, empty], axis=1),
        "real": ops.concatenate([real, ops.zeros_like(empty, dtype="bool")], axis=1),
        "done": done,
        "broken": ops.zeros((), dtype="bool"),
        "step": as_int32(0),
        "slot": as_int32(ops.shape(ids)[1]),
        "limit": as_int32(limit),
        "padding": as_int32(padding_id),
    }


def append_tokens(state: State, ids: Tensor, tokens: Tensor, running: Tensor) -> State:
    """The entries of the next state that are the same for every strategy: `ids`, `real`, `step` and `slot`.

    Args:
        state: the state before the step.
        ids: (R, L), the ids that each row continues.
        tokens: (R,), the next tokens.
        running: (R,), True for rows of prompts that were not done. Only these change.
    """
    here = ops.logical_and(ops.arange(ops.shape(ids)[1], dtype="int32") == state["slot"], running[:, None])
    return {
        "ids": ops.where(here, tokens[:, None], ids),
        "real": ops.logical_or(state["real"], here),
        "step": state["step"] + 1,
        "slot": state["slot"] + 1,
    }


def as_int32(value: Tensor) -> Tensor:
    """An integer, a NumPy array or a tensor -> an int32 tensor."""
    return ops.cast(ops.convert_to_tensor(value), "int32")


def fill(value: Tensor, rows: Tensor, count: int) -> Tensor:
    """A scalar tensor, repeated to (R, count), where R is the length of `rows`."""
    return ops.broadcast_to(value, (ops.shape(rows)[0], count))


def is_one_of(tokens: Tensor, stop_tokens: tuple[int, ...]) -> Tensor:
    """True where `tokens`, of any shape, are among the Python integers `stop_tokens`."""
    found = ops.zeros_like(tokens, dtype="bool")
    for stop in stop_tokens:
        found = ops.logical_or(found, ops.equal(tokens, stop))
    return found


def without_xla() -> bool:
    """Whether TensorFlow runs every operation separately, so that fewer operations are faster."""
    return keras.backend.backend() == "tensorflow" and not xla.is_traced()


def pick(x: Tensor, indices: Tensor) -> Tensor:
    """x (R, N), indices (R,) -> (R,): one entry of each row."""
    if without_xla():
        return tf.gather(x, indices, batch_dims=1)  # one operation, where Keras has thirty
    return ops.take_along_axis(x, indices[:, None], axis=1)[:, 0]


def argmax(scores: Tensor) -> Tensor:
    """The index of the largest score of each row (R, V), the first of equal ones: (R,)."""
    if without_xla():
        return tf.argmax(scores, axis=-1, output_type="int32")  # Keras treats negative zeros first
    return ops.argmax(scores, axis=-1)


def best_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row (R, V) and the tokens that have them, as `ops.top_k` returns both.

    On CPUs, TensorFlow and XLA find a maximum several times as fast as the `count` largest of many scores. So the row
    is cut into parts, and only the `count` parts with the largest maxima are searched. No other part has a score that
    is needed, since each of these has one that is larger, or is equal and comes first. Of equal scores the first ones
    are taken, as by `ops.top_k`. With fewer scores than 16 for each one that is searched, XLA gains nothing by it.
    """
    size = scores.shape[-1]
    if keras.backend.backend() != "tensorflow" or size < 16 * count * _PART:
        found: tuple[Tensor, Tensor] = ops.top_k(scores, count)
        return found
    if size % _PART:
        scores = tf.pad(scores, [[0, 0], [0, -size % _PART]], constant_values=-float("inf"))
    parts = tf.reshape(scores, (-1, -(-size // _PART), _PART))
    best = tf.sort(tf.math.top_k(tf.reduce_max(parts, axis=-1), count)[1])  # in the order of the row
    scores, places = tf.math.top_k(tf.reshape(tf.gather(parts, best, batch_dims=1), (-1, count * _PART)), count)
    places = tf.gather(best, places // _PART, batch_dims=1) * _PART + places % _PART
    return scores, places

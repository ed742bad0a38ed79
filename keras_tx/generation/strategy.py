"""What strategies share: prompts -> a state of rows, and one row a prompt by default: logits (R, V) -> tokens (R,).

B prompts, W rows for each (beams, or 1), R = B * W with the rows of a prompt side by side, P prompt slots, M new slots,
L = P + M, V vocabulary. A state is a dict of tensors whose shapes never change, so that a compiled loop can carry it:

    ids (R, L) int32      prompts, all ending in the same slot, then the new tokens; `padding` where there are none
    real (R, L) bool      True at tokens: of the prompt, and generated while the prompt was not done
    done (B,) bool        True for finished prompts, whose rows no longer change
    broken () bool        True once a row that was not done had no token to choose
    step () int32         the number of tokens generated so far
    slot () int32         where the next token goes: P + step
    limit () int32        the number of tokens to generate, at most M; (B,) where each prompt has its own
    padding () int32      the padding id

Strategies add what they need. One slot is written by comparing indices: a slice with a tensor for its start is silently
wrong inside an XLA loop, and `ops.slice_update` becomes an operation that TensorFlow Serving does not have.
"""

import keras
from keras import ops

from keras_tx.layers import xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")


def begin(ids, real, *, width, num_new, limit, padding_id):
    """The state before the first new token.

    Args:
        ids: (B, P) prompts, padded on the left.
        real: (B, P), True where `ids` holds a token of the prompt.
        width: W.
        num_new: M, a Python integer.
        limit, padding_id: integers or tensors; a limit may be (B,).
    """
    real = ops.cast(real, "bool")
    done = ops.zeros_like(real[:, 0])
    ids, real = ops.repeat(integer(ids), width, axis=0), ops.repeat(real, width, axis=0)
    unused = fill(integer(padding_id), ids, num_new)
    return {
        "ids": ops.concatenate([ids, unused], axis=1),
        "real": ops.concatenate([real, ops.zeros_like(unused, dtype="bool")], axis=1),
        "done": done,
        "broken": ops.zeros((), dtype="bool"),
        "step": integer(0),
        "slot": integer(ops.shape(ids)[1]),
        "limit": integer(limit),
        "padding": integer(padding_id),
    }


def integer(value):
    """`value`, an integer, a NumPy array or a tensor, as an int32 tensor."""
    return ops.cast(ops.convert_to_tensor(value), "int32")


def fill(value, rows, count):
    """(R, count) times `value`, a scalar tensor, where R is the length of `rows`."""
    return ops.broadcast_to(value, (ops.shape(rows)[0], count))


def write(state, ids, tokens, live):
    """The entries of the next state that every strategy writes alike.

    Args:
        state: the state before.
        ids: (R, L), the ids that each row continues from.
        tokens: (R,), the next tokens.
        live: (R,), True for rows of prompts that were not done. Only these change.
    """
    here = ops.logical_and(ops.arange(ops.shape(ids)[1], dtype="int32") == state["slot"], live[:, None])
    return {
        "ids": ops.where(here, tokens[:, None], ids),
        "real": ops.logical_or(state["real"], here),
        "step": state["step"] + 1,
        "slot": state["slot"] + 1,
    }


def is_one_of(tokens, stop_tokens):
    """True where `tokens`, of any shape, are among the Python integers `stop_tokens`."""
    found = ops.zeros_like(tokens, dtype="bool")
    for stop in stop_tokens:
        found = ops.logical_or(found, ops.equal(tokens, stop))
    return found


def without_xla():
    """Whether TensorFlow runs every operation by itself, so that few and plain ones are fast."""
    return keras.backend.backend() == "tensorflow" and not xla.is_traced()


def pick(x, indices):
    """x (R, N), indices (R,) -> (R,): one entry of each row."""
    if without_xla():
        return tf.gather(x, indices, batch_dims=1)  # one operation, where Keras has thirty
    return ops.take_along_axis(x, indices[:, None], axis=1)[:, 0]


def likeliest(scores):
    """The largest of each row (R, V), the first of equals: (R,)."""
    if without_xla():
        return tf.argmax(scores, axis=-1, output_type="int32")  # Keras first looks for zeros with a minus sign
    return ops.argmax(scores, axis=-1)


class Strategy:
    """How the next token is chosen: the contract, and all of it but `choose` for one row a prompt.

    Strategies are immutable, and equal ones are equal keys: a compiled loop is kept for each. Nothing here looks at a
    value in Python, so all of it runs eagerly and compiled, on every backend.
    """

    @property
    def width(self):
        """W, the rows of each prompt."""
        return 1

    def noise(self, batch, num_new):
        """What `begin` takes as `noise`: (M, B), or None where nothing is drawn."""
        return None

    def begin(self, ids, real, num_new, limit, vocabulary_size, padding_id=0, noise=None):
        """The state before the first new token.

        Args:
            ids: (B, P) integers, prompts padded on the left.
            real: (B, P), True where `ids` holds a token of the prompt.
            num_new: M, the number of new slots, a Python integer.
            limit: the number of tokens to generate, at most M, an integer or a tensor; one for each prompt, (B,), is
                only for strategies without beams.
            vocabulary_size: V.
            padding_id: what slots without a token hold.
            noise: of `self.noise(B, M)`.
        """
        state = begin(ids, real, width=1, num_new=num_new, limit=limit, padding_id=padding_id)
        state["log_probs"] = fill(ops.zeros(()), ids, num_new)
        return state

    def choose(self, scores, state):
        """The next token of each row, (R,), by `scores` (R, V): logits after the constraints."""
        raise NotImplementedError(f"{type(self).__name__} must define `choose`.")

    def advance(self, logits, state, constraints, stop_tokens):
        """One token on.

        Args:
            logits: (R, V), any float dtype.
            state: of `begin` or `advance`.
            constraints: a function of scores (R, V), state and stop tokens, as `processors.Constraints` is.
            stop_tokens: a tuple of Python integers; a prompt is done with the first of them.

        Returns:
            The next state; the tokens chosen (R,), the padding id in rows that were done; and None, or where rows
            change places the old row (R,) that each new one continues.
        """
        logits = ops.cast(logits, "float32")
        log_sum = ops.logsumexp(logits, axis=-1)
        scores = constraints(logits, state, stop_tokens)
        tokens = integer(self.choose(scores, state))
        # One NaN, an infinity or nothing but minus infinity leave no finite sum.
        lost = ops.logical_not(ops.logical_and(ops.isfinite(log_sum), pick(scores, tokens) > -float("inf")))
        live = ops.logical_not(state["done"])
        gained = ops.where(live, pick(logits, tokens) - log_sum, 0.0)
        tokens = ops.where(live, tokens, state["padding"])
        now = ops.arange(state["log_probs"].shape[1], dtype="int32") == state["step"]
        done = ops.logical_or(is_one_of(tokens, stop_tokens), state["step"] + 1 >= state["limit"])
        state = {
            **state,
            **write(state, state["ids"], tokens, live),
            "log_probs": ops.where(now, gained[:, None], state["log_probs"]),
            "broken": ops.logical_or(state["broken"], ops.any(ops.logical_and(live, lost))),
            "done": ops.logical_or(state["done"], done),
        }
        return state, tokens, None

    def going(self, state):
        """Whether there is more to generate, a boolean scalar."""
        return ops.logical_and(ops.any(ops.logical_not(state["done"])), ops.logical_not(state["broken"]))

    def result(self, state):
        """The generated tokens (B, 1, M), the padding id behind the stop token, and their scores (B, 1).

        A score is the sum of the log-probabilities that the model gave to the tokens chosen, whatever constraints,
        temperature and filters made of them.
        """
        num_new = state["log_probs"].shape[1]
        return state["ids"][:, None, -num_new:], ops.sum(state["log_probs"], axis=1, keepdims=True)

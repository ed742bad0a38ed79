"""The base class of strategies: logits (R, V) -> the next tokens (R,), and the state of the generation.

B prompts, W rows for each prompt (beams, or 1), R = B * W, P prompt slots, M new slots, V vocabulary. See `state` for
the entries of a state.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.generation.state import State, append_tokens, as_int32, fill, initial_state, is_one_of, pick
from keras_tx.types import Tensor


class Strategy:
    """Base class of decoding strategies, which choose the next token. Subclass it for a strategy of your own.

    A subclass defines `choose`, from scores to tokens. All other methods have defaults that keep one row for each
    prompt, as in `Greedy` and `Sample`; `Beam` keeps several rows and also overrides `advance` and `result`.

    `choose` is traced into a compiled loop, so it must use `keras.ops` and must not depend on values in Python. Equal
    strategies share a compiled loop, so strategies must be immutable and hashable, and equal ones must do the same; a
    frozen dataclass fulfils all this. `generate` and `stream` accept any strategy; `keras_tx.serving.export` accepts,
    for a model on TensorFlow, any strategy without `noise`.

    Raises:
        NotImplementedError: by `choose`, if the subclass does not define it.
        ValueError: by `advance`, if `choose` does not return integers of the shape (R,).

    Examples:
        Take the second most likely token, but only if it is nearly as likely as the first:

        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class SecondBest(keras_tx.generation.Strategy):
        ...     margin: float = 1.0
        ...
        ...     def choose(self, scores, state):
        ...         top_scores, top_tokens = keras.ops.top_k(scores, 2)
        ...         is_close = top_scores[:, 0] - top_scores[:, 1] < self.margin
        ...         return keras.ops.where(is_close, top_tokens[:, 1], top_tokens[:, 0])
        >>> logits = np.array([[0.0, 2.0, 1.5], [0.0, 9.0, 1.5]], "float32")
        >>> SecondBest().choose(logits, state={}).numpy().tolist()
        [2, 1]
        >>> model = keras_tx.models.CausalLM(11, num_layers=1, hidden_dim=8, num_heads=2, intermediate_dim=8)
        >>> model.generate(np.array([[5, 7, 9]]), SecondBest(), max_new_tokens=4, jit_compile=False).shape
        (1, 7)
    """

    @property
    def rows_per_prompt(self) -> int:
        """W, the number of rows (beams) for each prompt."""
        return 1

    def noise(self, batch_size: int, num_new: int) -> np.ndarray | None:
        """Random numbers for `initial_state`, (M, B); None if the strategy draws nothing."""
        return None

    def initial_state(
        self,
        ids: Tensor,
        real: Tensor,
        num_new: int,
        limit: Tensor,
        vocabulary_size: int,
        padding_id: Tensor = 0,
        noise: Tensor = None,
    ) -> State:
        """The state before the first new token.

        Args:
            ids: (B, P) integers, prompts padded on the left.
            real: (B, P), True where `ids` holds a token of the prompt.
            num_new: M, the number of new slots, a Python integer.
            limit: the number of tokens to generate, at most M, an integer or a tensor. A limit for each prompt, (B,),
                works only with one row for each prompt.
            vocabulary_size: V.
            padding_id: the id in slots without a token.
            noise: what `self.noise(B, M)` returns.
        """
        state = initial_state(ids, real, rows_per_prompt=1, num_new=num_new, limit=limit, padding_id=padding_id)
        state["log_probs"] = fill(ops.zeros((), dtype="float32"), ids, num_new)
        return state

    def choose(self, scores: Tensor, state: State) -> Tensor:
        """Chooses the next token of each row.

        Args:
            scores: (R, V), float32: the logits, as the constraints of `generate` (penalties, forbidden and forced
                tokens) changed them. Forbidden tokens have minus infinity.
            state: `state["ids"]` (R, P + M) has a slot for each token of the prompt, which is padded on the left, and
                for each new one; `state["real"]` (R, P + M) is True at the tokens so far, and `state["step"]` is the
                number of new ones.

        Returns:
            The tokens, (R,) integers in [0, V).

        Raises:
            ValueError: by `generate`, if they are not integers, not of shape (R,), or not in [0, V).
        """
        raise NotImplementedError(f"{type(self).__name__} must define `choose`.")

    def _checked(self, tokens: Any, scores: Tensor) -> Tensor:
        """What `choose` returned for `scores` (R, V), as int32 (R,)."""
        received, rows = "None", scores.shape[0]
        if tokens is not None:
            tokens = ops.convert_to_tensor(tokens)
            if getattr(tokens.shape, "rank", 1) is None:  # a graph of TensorFlow need not know it
                tokens = ops.reshape(tokens, (-1,))
            dtype, shape = keras.backend.standardize_dtype(tokens.dtype), tuple(tokens.shape)
            if "int" in dtype and len(shape) == 1 and (None in (shape[0], rows) or shape[0] == rows):
                return as_int32(tokens)
            received = f"dtype {dtype}, shape {shape}"
        raise ValueError(
            f"`choose` of {type(self).__name__} must return integers of the shape ({rows},). Received: {received}"
        )

    def advance(
        self,
        logits: Tensor,
        state: State,
        constraints: Callable[[Tensor, State, tuple[int, ...]], Tensor],
        stop_tokens: tuple[int, ...],
    ) -> tuple[State, Tensor, Tensor]:
        """Generates one token for each row.

        Args:
            logits: (R, V), any float dtype.
            state: what `initial_state` or `advance` returned.
            constraints: a function from scores (R, V), a state and stop tokens to scores, such as
                `constraints.Constraints`.
            stop_tokens: a tuple of Python integers; a row is done after the first of them.

        Returns:
            The next state; the chosen tokens (R,), the padding id in rows that were done; and None, or, if rows are
            reordered, the index (R,) of the old row that each new row continues.
        """
        logits = ops.cast(logits, "float32")
        log_sum = ops.logsumexp(logits, axis=-1)
        scores = constraints(logits, state, stop_tokens)
        tokens = self._checked(self.choose(scores, state), scores)
        known = ops.clip(tokens, 0, scores.shape[-1] - 1)
        # A NaN, a positive infinity or only minus infinities leave no finite sum.
        allowed = ops.logical_and(pick(scores, known) > -float("inf"), tokens == known)
        broken = ops.logical_not(ops.logical_and(ops.isfinite(log_sum), allowed))
        running = ops.logical_not(state["done"])
        log_probs = ops.where(running, pick(logits, known) - log_sum, 0.0)
        tokens, known = (ops.where(running, x, state["padding"]) for x in (tokens, known))
        here = ops.arange(state["log_probs"].shape[1], dtype="int32") == state["step"]
        done = ops.logical_or(is_one_of(tokens, stop_tokens), state["step"] + 1 >= state["limit"])
        state = {
            **state,
            **append_tokens(state, state["ids"], tokens, running),
            "log_probs": ops.where(here, log_probs[:, None], state["log_probs"]),
            "broken": ops.logical_or(state["broken"], ops.any(ops.logical_and(running, broken))),
            "done": ops.logical_or(state["done"], done),
        }
        return state, known, None  # clipped, because the next step, or a draft model, embeds it

    def is_running(self, state: State) -> Tensor:
        """Whether a prompt is not done yet, a boolean scalar; False once the state is broken."""
        return ops.logical_and(ops.any(ops.logical_not(state["done"])), ops.logical_not(state["broken"]))

    def result(self, state: State) -> tuple[Tensor, Tensor]:
        """The generated tokens (B, 1, M), with the padding id after the stop token, and their scores (B, 1).

        A score is the sum of the log-probabilities that the model gave to the chosen tokens, before constraints,
        temperature and filters.
        """
        num_new = state["log_probs"].shape[1]
        return state["ids"][:, None, -num_new:], ops.sum(state["log_probs"], axis=1, keepdims=True)

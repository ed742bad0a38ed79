"""The decoding loop: prompts (B, P) -> the state of a strategy after up to M new tokens.

It has two parts, the prefill and a loop of decode steps, and owns the key-value cache. The loop can stop after any
number of steps and be called again, so that `stream` runs the same program as `generate`.
"""

from typing import Any, TypeAlias

import keras
from keras import ops

from keras_tx.generation.constraints import Constraints
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.generation.state import State, as_int32
from keras_tx.generation.strategy import Strategy
from keras_tx.layers import cache as caches
from keras_tx.layers.cache import repeat_rows
from keras_tx.types import Tensor

Context: TypeAlias = dict[str, Any]  # what decode steps need beside state and tokens: see `DecodeLoop.prefill`


class DecodeLoop:
    """The two functions that `CompiledDecodeLoop` compiles, for an `IncrementalModel`, a strategy and constraints.

    They can also be traced into a TensorFlow graph, without XLA, for any number of prompts and any length: see
    `in_graph`.

    Args:
        model: `IncrementalModel` of a model.
        strategy: `Greedy`, `Sample`, `Beam` or another `Strategy`.
        constraints: `Constraints`.
        stop_tokens: tuple of ids that end a row.
        padding_id: the id that fills the slots after a stop token.
        num_new: M, the slots for new tokens.
        num_extra: further slots of the cache, after those.
    """

    def __init__(
        self,
        model: IncrementalModel,
        strategy: Strategy,
        constraints: Constraints,
        stop_tokens: tuple[int, ...],
        padding_id: int,
        num_new: int,
        num_extra: int = 0,
    ):
        self.model, self.strategy, self.constraints = model, strategy, constraints
        self.stop_tokens, self.padding_id, self.num_new, self.num_extra = stop_tokens, padding_id, num_new, num_extra

    def prefill(
        self, ids: Tensor, real: Tensor, sources: list[Tensor], limit: Tensor, noise: Tensor
    ) -> tuple[State, Tensor, Context]:
        """Runs the model on the prompts, and chooses the first new token of each.

        Args:
            ids: (B, P), padded on the left.
            real: (B, P), True at real tokens.
            sources: tensors in the order of `model.sources`.
            limit: the number of tokens to generate, at most M.
            noise: (M, B), what the strategy's `noise` returns.

        Returns:
            The arguments of `decode`: the state, the new tokens (R,), and a context of `values` (what
            `IncrementalModel.prepare` computed), the key-value `cache`, `mask` (R, S), the slots of the cache that hold
            real tokens once they are filled, and `counts` (R, 1), the real tokens of each prompt.
        """
        logits, context = self.read_prompts(ids, real, sources)
        state = self.strategy.initial_state(
            ids,
            real,
            self.num_new,
            limit,
            vocabulary_size=self.model.vocabulary_size,
            padding_id=self.padding_id,
            noise=noise,
        )
        rows = self.strategy.rows_per_prompt
        if rows > 1:
            logits = repeat_rows(logits, rows)
            cache = caches.repeated(context.pop("cache"), rows)
            context = {**keras.tree.map_structure(lambda x: repeat_rows(x, rows), context), "cache": cache}
        # The rows of a prompt are still equal, so it does not matter which ones the strategy continues.
        state, tokens, _ = self.strategy.advance(logits, state, self.constraints, self.stop_tokens)
        return state, tokens, context

    def read_prompts(self, ids: Tensor, real: Tensor, sources: list[Tensor]) -> tuple[Tensor, Context]:
        """The logits (B, V) after the prompts, and the context. See `prefill`."""
        batch_size, prompt_length = ops.shape(ids)
        num_later = self.num_new + self.num_extra
        mask = ops.concatenate([real, ops.ones((batch_size, num_later), dtype="bool")], axis=1)
        counts = ops.cumsum(ops.cast(real, "int32"), axis=1)
        values, cache = self.model.prepare(sources, batch_size, prompt_length + num_later)
        positions = as_int32(ops.maximum(counts - 1, 0))  # which Keras makes float32 on JAX if floatx is bfloat16
        logits, cache = self.model.step(ids, values, cache, mask=mask, real=real, positions=positions, start=0)
        return logits, {"values": values, "cache": cache, "mask": mask, "counts": counts[:, -1][:, None]}

    def decode(self, state: State, tokens: Tensor, context: Context, until: Tensor) -> tuple[State, Tensor, Context]:
        """Runs decode steps until all prompts are done, or `until` tokens are generated.

        Takes and returns what `prefill` returns.
        """

        def is_running(state: State, tokens: Tensor, buffers: list[Tensor]) -> Tensor:
            return ops.logical_and(self.strategy.is_running(state), state["step"] < until)

        def decode_step(state: State, tokens: Tensor, buffers: list[Tensor]) -> Any:
            before = state, tokens, buffers
            cache = caches.with_growing(context["cache"], buffers)
            logits, cache = self.step(tokens[:, None], state, context, cache)
            state, tokens, origin = self.strategy.advance(logits, state, self.constraints, self.stop_tokens)
            buffers = caches.growing(cache)
            if origin is not None:
                buffers = [ops.take(x, origin, axis=0) for x in buffers]
            return with_shapes_of(before, (state, tokens, caches.merged(buffers)))

        buffers = caches.merged(caches.growing(context["cache"]))
        state, tokens, buffers = ops.while_loop(is_running, decode_step, (state, tokens, buffers))
        return state, tokens, {**context, "cache": caches.with_growing(context["cache"], buffers)}

    def step(
        self,
        ids: Tensor,
        state: State,
        context: Context,
        cache: Any,
        *,
        num_before: int = 0,
        every_token: bool = False,
    ) -> tuple[Tensor, Any]:
        """Runs the model on the last token of each row, and on further ids beside it.

        Args:
            ids: (R, T).
            state, context: as `prefill` returns them.
            cache: the key-value cache.
            num_before: how many of `ids` come before the last token; the others come after it.
            every_token: see `IncrementalModel.step`, also for the results.
        """
        first = state["step"] - 1 - num_before
        positions, count = context["counts"] + first, ids.shape[1]
        if self.num_extra or len(state["limit"].shape):
            # Positions of drafts that could not become tokens, and those after the limit of a row that waits for longer
            # ones, may be outside of a table.
            last = ops.reshape(state["limit"], (-1, 1)) - 2
            positions = ops.minimum(positions + ops.arange(count, dtype="int32"), context["counts"] + last)
        return self.model.step(
            ids,
            context["values"],
            cache,
            mask=context["mask"],
            real=ops.ones_like(ids, dtype="bool"),
            positions=positions,
            start=ops.shape(context["mask"])[1] - self.num_extra - self.num_new + first,
            every_token=every_token,
        )


def with_shapes_of(before: Any, after: Any) -> Any:
    """`after`, with the static shapes of `before`: a TensorFlow loop must not lose static dimensions."""
    if keras.backend.backend() == "tensorflow":
        for old, new in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=True):
            new.set_shape(old.shape)
    return after

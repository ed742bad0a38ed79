"""The decoding loop: prompts (B, P) -> the state of a strategy, step by step. One compiled prefill, one compiled loop.

The loop owns the cache. On TensorFlow both parts are `tf.function`s, by XLA if asked; on JAX they are jitted; on
PyTorch they run eagerly. A loop can stop after any number of steps and be called again: a stream is the same program.
"""

import keras
import numpy as np
from keras import ops

from keras_tx.layers import cache as caches
from keras_tx.layers import xla
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")


class DecodeLoop:
    """An `IncrementalModel`, a strategy and constraints: two functions, which `CompiledDecodeLoop` compiles.

    They can also be traced into a TensorFlow graph for any number of prompts and any length, without XLA: see
    `generation.in_graph`.

    Args:
        steps: `IncrementalModel` of a model.
        strategy: `Greedy`, `Sample` or `Beam`.
        constraints: `Constraints`.
        stop_tokens: tuple of ids that end a row.
        padding_id: what is written behind them.
        num_new: M, the slots for new tokens.
    """

    def __init__(self, steps, strategy, constraints, stop_tokens, padding_id, num_new):
        self.steps, self.strategy, self.constraints = steps, strategy, constraints
        self.stop_tokens, self.padding_id, self.num_new = stop_tokens, padding_id, num_new

    def begin(self, ids, real, sources, limit, noise):
        """The prompts through the model, and the first new token of each.

        Args:
            ids: (B, P), padded on the left.
            real: (B, P), True at ids that are not padding.
            sources: tensors in the order of `steps.sources`.
            limit: how many new tokens there may be, at most M.
            noise: (M, B) uniform numbers for `Sample`, or None.

        Returns:
            What `go_on` takes.
        """
        batch_size, prompt = ops.shape(ids)
        strategy, num_slots = self.strategy, prompt + self.num_new
        mask = ops.concatenate([real, ops.ones((batch_size, self.num_new), dtype="bool")], axis=1)
        counts = ops.cumsum(ops.cast(real, "int32"), axis=1)
        values, cache = self.steps.prepare(sources, batch_size, num_slots)
        logits, cache = self.steps.step(
            ids, values, cache, mask=mask, real=real, positions=ops.maximum(counts - 1, 0), start=0
        )
        state = strategy.begin(
            ids,
            real,
            self.num_new,
            limit,
            vocabulary_size=self.steps.vocabulary_size,
            padding_id=self.padding_id,
            noise=noise,
        )
        fixed = {"values": values, "cache": cache, "mask": mask, "counts": counts[:, -1][:, None]}
        if strategy.width > 1:
            logits = ops.repeat(logits, strategy.width, axis=0)
            fixed = keras.tree.map_structure(lambda x: ops.repeat(x, strategy.width, axis=0), fixed)
        # The beams of a prompt are still alike.
        state, tokens, _ = strategy.advance(logits, state, self.constraints, self.stop_tokens)
        return state, tokens, fixed

    def go_on(self, state, tokens, fixed, until):
        """Takes steps until the strategy ends or `until` tokens are written; takes and returns what `begin` returns."""
        first = ops.shape(fixed["mask"])[1] - self.num_new  # the slot of the first new token

        def going(state, tokens, growing):
            return ops.logical_and(self.strategy.going(state), state["step"] < until)

        def body(state, tokens, growing):
            before = state, tokens, growing
            logits, cache = self.steps.step(
                tokens[:, None],
                fixed["values"],
                caches.with_growing(fixed["cache"], growing),
                mask=fixed["mask"],
                real=ops.ones_like(tokens[:, None], dtype="bool"),
                positions=fixed["counts"] + state["step"] - 1,
                start=first + state["step"] - 1,
            )
            state, tokens, origin = self.strategy.advance(logits, state, self.constraints, self.stop_tokens)
            growing = caches.growing(cache)
            if origin is not None:
                growing = [ops.take(x, origin, axis=0) for x in growing]
            return _shaped_as(before, (state, tokens, caches.merged(growing)))

        growing = caches.merged(caches.growing(fixed["cache"]))
        state, tokens, growing = ops.while_loop(going, body, (state, tokens, growing))
        return state, tokens, {**fixed, "cache": caches.with_growing(fixed["cache"], growing)}


class CompiledDecodeLoop:
    """A `DecodeLoop`, compiled for the shapes of each call and called often.

    Args:
        search: the `DecodeLoop`.
        model: the model that it runs, for its variables.
        jit_compile: whether TensorFlow compiles by XLA.
    """

    def __init__(self, search, model, jit_compile):
        self.strategy, self.num_new = search.strategy, search.num_new
        self.begin = _compiled(search.begin, model, jit_compile)
        self.go_on = _compiled(search.go_on, model, jit_compile)


def _shaped_as(before, after):
    """`after`, of whose shapes TensorFlow knows as much as of those `before`: what a loop carries must not forget."""
    if keras.backend.backend() == "tensorflow":
        for old, new in zip(keras.tree.flatten(before), keras.tree.flatten(after), strict=True):
            new.set_shape(old.shape)
    return after


def _compiled(function, model, jit_compile):
    """`function`, compiled as the backend compiles; the weights of `model` are arguments, not constants."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _by_shapes(tf.function(function, jit_compile=jit_compile, autograph=False), jit_compile)
    if backend == "torch":

        def without_gradients(*args):
            with torch.no_grad():
                return function(*args)

        return without_gradients
    variables = list(model.variables)

    def stateless(weights, *args):
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return function(*args)

    jitted = jax.jit(stateless)
    return lambda *args: jitted([variable.value for variable in variables], *args)


def _by_shapes(function, jit_compile):
    """A `tf.function`, traced once for each set of shapes: they are few, so TensorFlow need not warn of many traces."""
    traced = {}

    def call(*args):
        shapes = tuple(tuple(x.shape) if hasattr(x, "shape") else x for x in keras.tree.flatten(args))
        if shapes not in traced:
            with xla.tracing(jit_compile):
                traced[shapes] = function.get_concrete_function(*args)
        return traced[shapes](*args)

    return call


def bucket(size, smallest=16):
    """The power of two that holds `size`: programs are compiled for a few lengths, not for each."""
    return max(smallest, 1 << int(np.ceil(np.log2(max(size, 1)))))

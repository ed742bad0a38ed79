"""Compiles a decoding loop: `tf.function` with or without XLA, or `jax.jit`; on PyTorch it runs eagerly."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_tx.generation.decode_loop import DecodeLoop
from keras_tx.graph_internals import shared_shapes
from keras_tx.layers import xla
from keras_tx.locks import all_locked
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")


class CompiledDecodeLoop:
    """A `DecodeLoop` whose `prefill` and `decode` are compiled once for each set of argument shapes.

    Several threads may call them at once. The first call with a set of shapes then traces and compiles, and those of
    other threads wait for it.

    Args:
        loop: the `DecodeLoop`.
        models: the Keras models that the loop runs; their variables are passed to the program.
        jit_compile: whether TensorFlow compiles with XLA.
    """

    def __init__(self, loop: DecodeLoop, models: Sequence[keras.Model], jit_compile: bool):
        self.strategy, self.num_new = loop.strategy, loop.num_new
        self.prefill = _compiled(loop.prefill, models, jit_compile)
        self.decode = _compiled(loop.decode, models, jit_compile)


def _compiled(function: Callable[..., Any], models: Sequence[keras.Model], jit_compile: bool) -> Callable[..., Any]:
    """`function`, compiled; the weights of `models` are arguments of the program, not constants in it."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        traced = tf.function(function, jit_compile=jit_compile, autograph=False)

        def program(*args: Any) -> Any:  # a single function for all shapes would warn about too many traces
            with xla.tracing(jit_compile), shared_shapes():
                return traced.get_concrete_function(*args)

        return _once_per_shape(models, program)
    if backend == "torch":

        def without_gradients(*args: Any) -> Any:
            with torch.no_grad():
                return function(*args)

        return without_gradients
    variables = list({id(one): one for model in models for one in model.variables}.values())  # some may be shared

    def stateless(weights: list[Any], *args: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, weights, strict=True))):
            return function(*args)

    jitted = jax.jit(stateless)
    return _once_per_shape(models, lambda *_: lambda *args: jitted([variable.value for variable in variables], *args))


def _once_per_shape(models: Sequence[keras.Model], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `compiled(*args)`, a program, of which there is one for each set of shapes.

    The first call with a set of shapes holds the locks of `models`.
    """
    programs: dict[Any, Any] = {}

    def call(*args: Any) -> Any:
        shapes = tuple(tuple(x.shape) if hasattr(x, "shape") else x for x in keras.tree.flatten(args))
        if shapes in programs:
            return programs[shapes](*args)
        with all_locked(models):
            program = programs.get(shapes) or compiled(*args)
            results = program(*args)  # which compiles it
            programs[shapes] = program
        return results

    return call

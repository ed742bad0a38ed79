"""Compiles a decoding loop: `tf.function` with or without XLA, or `jax.jit`; on PyTorch it runs eagerly."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras

from keras_tx.generation.decode_loop import DecodeLoop
from keras_tx.internals.tensorflow_graphs import shared_shapes
from keras_tx.layers import xla
from keras_tx.locks import all_locked
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")

# To compile the decode steps beside the prefill, they are called with zeros, if these take at most so many bytes.
MOST_ZEROS = 2**28


class CompiledDecodeLoop:
    """A `DecodeLoop` whose `prefill` and `decode` are compiled once for each set of argument shapes.

    Several threads may call them at once. The first call with a set of shapes then traces and compiles, and those of
    other threads wait for it. On TensorFlow with only CPUs, `decode` is compiled while the first `prefill` is, unless
    TensorFlow keeps the programs in a folder.

    Args:
        loop: the `DecodeLoop`.
        models: the Keras models that the loop runs; their variables are passed to the program.
        jit_compile: whether TensorFlow compiles with XLA.
    """

    def __init__(self, loop: DecodeLoop, models: Sequence[keras.Model], jit_compile: bool):
        self.strategy, self.num_new = loop.strategy, loop.num_new
        self.prefill = _compiled(loop.prefill, models, jit_compile)
        self.decode = _compiled(loop.decode, models, jit_compile)
        if isinstance(self.prefill, _Programs):
            self.prefill.following = self.decode


def _compiled(function: Callable[..., Any], models: Sequence[keras.Model], jit_compile: bool) -> Callable[..., Any]:
    """`function`, compiled; the weights of `models` are arguments of the program, not constants in it."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        traced = tf.function(function, jit_compile=jit_compile, autograph=False)

        def program(*args: Any) -> Any:  # a single function for all shapes would warn about too many traces
            with xla.tracing(jit_compile), shared_shapes():
                return traced.get_concrete_function(*args)

        return _Programs(models, program)
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
    return _Programs(models, lambda *_: lambda *args: jitted([variable.value for variable in variables], *args))


class _Programs:
    """Calls a program for the shapes of its arguments, of which there is one for each set of shapes.

    The first call with a set of shapes holds the locks of the models.

    Args:
        models: the Keras models that the programs run.
        compiled: a function of the arguments that returns the program for them.

    Attributes:
        following: the function of the results of this one and of the number of tokens to stop at, which is compiled
            while the first call runs here. None for no other.
    """

    def __init__(self, models: Sequence[keras.Model], compiled: Callable[..., Any]):
        self._models, self._compiled = models, compiled
        self._programs: dict[Any, Any] = {}
        self.following: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        shapes = tuple(tuple(x.shape) if hasattr(x, "shape") else x for x in keras.tree.flatten(args))
        if shapes in self._programs:
            return self._programs[shapes](*args)
        with all_locked(self._models):
            program = self._programs.get(shapes) or self._compiled(*args)
            results = self._first_results(program, args)  # which compiles it
            self._programs[shapes] = program
        return results

    def _first_results(self, program: Any, args: Sequence[Any]) -> Any:
        """What the program returns, compiled now by another thread. Meanwhile this one compiles what follows."""
        # In a folder TensorFlow finds programs by names, which would depend on which of two threads comes first.
        can_overlap = xla.has_only_cpus() and not xla.keeps_programs()
        if self.following is None or not can_overlap or not _are_small(program.structured_outputs):
            return program(*args)

        def run() -> Any:
            with tf.device(args[0].device):  # that of the caller's scope, which another thread does not have
                return program(*args)

        def zeros(x: Any) -> Tensor | None:
            return None if x is None else tf.zeros(x.shape, x.dtype)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(run)
            # With zeros the loop ends before its first step; what is compiled does not depend on values.
            self.following(*keras.tree.map_structure(zeros, program.structured_outputs), tf.zeros((), "int32"))
            return running.result()


def _are_small(outputs: Any) -> bool:
    """Whether tensors have known shapes and `MOST_ZEROS` bytes at most."""
    tensors = [x for x in keras.tree.flatten(outputs) if x is not None]
    is_known = all(x.shape.is_fully_defined() for x in tensors)
    return is_known and sum(x.shape.num_elements() * x.dtype.size for x in tensors) <= MOST_ZEROS

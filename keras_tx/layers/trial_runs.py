"""Runs an operation of a functional model on small random arrays, without a trace: no update, no loss, no warning."""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx.internals.keras_models import Call, get_keras_mask, layers_within, set_keras_mask
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
jax = Lazy("jax")
torch = Lazy("torch")

_COUNT = 10007  # of random numbers that are repeated to fill a tensor; a prime, so that no two rows are the same
_MANY_STEPS = 64  # of a recurrent layer; TensorFlow takes long for each step, and less for a graph of all of them
_LARGE = 2**26  # from this number of weights on, a layer runs with the weights that it has

Sizes = tuple[int, ...]
Arrays = dict[int, Any]  # NumPy arrays by the id of a symbolic tensor


class Runner:
    """Runs the operation of a call with arrays in place of its symbolic tensors.

    Args:
        call: the call.
        place: the index of the output in question.
        masks_for: {id of an input that is a mask: id of the input that it is for}.
        random: the generator of the weights.
    """

    def __init__(self, call: Call, place: int, masks_for: dict[int, int], random: Any) -> None:
        self.call, self.place, self.masks_for = call, place, masks_for
        self.weights = _other_weights(call.operation, random)

    def run(self, values: Arrays, masks: Arrays) -> tuple[Any, Any]:
        """The output for these values, and the mask that Keras attaches to it, or None.

        Args:
            values: of all inputs.
            masks: of those inputs that have masks; none for values that stand for masks themselves.
        """

        def tensor_of(x: Any) -> Any:
            if not isinstance(x, keras.KerasTensor):
                return x
            value, mask = values[id(x)], masks.get(id(x))
            if masks and id(x) in self.masks_for:
                value = masks[self.masks_for[id(x)]]
            tensor = ops.cast(ops.convert_to_tensor(value), x.dtype)
            if mask is not None and get_keras_mask(x) is not None:
                set_keras_mask(tensor, ops.convert_to_tensor(mask))
            return tensor

        def call() -> tuple[Any, Any]:
            kwargs = dict(self.call.kwargs)
            if "training" in kwargs:
                kwargs["training"] = False  # with dropout each run would differ
            args, kwargs = keras.tree.map_structure(tensor_of, (self.call.args, kwargs))
            output = keras.tree.flatten(self.call.operation(*args, **kwargs))[self.place]
            return output, get_keras_mask(output)

        many = any(value.shape[1:2] >= (_MANY_STEPS,) for value in values.values())
        with quietly(), _eagerly(), keras.StatelessScope(self.weights, initialize_variables=False):
            in_graph = many and keras.backend.backend() == "tensorflow" and _is_recurrent(self.call.operation)
            output, mask = tf.function(call, autograph=False)() if in_graph else call()
            return _to_numpy(output), None if mask is None else _to_numpy(mask).astype("bool")


def kind_of(x: Any) -> str:
    """The kind of the values of a symbolic tensor: "bool", "int" or "float"."""
    dtype = keras.backend.standardize_dtype(x.dtype)
    return "bool" if dtype == "bool" else "int" if "int" in dtype else "float"


def draw(kind: str, sizes: Sizes, random: Any) -> Any:
    """Random values: most functions are defined for some of these floats, most look-ups for the integers 0 and 1."""
    if kind == "float":
        return np.resize(np.roll(_floats(), random.integers(_COUNT)), sizes)
    return random.integers(0, 2, sizes).astype("bool" if kind == "bool" else "int32")


def redraw(kind: str, values: Any, random: Any) -> Any:
    """Values that all differ from `values`."""
    if kind == "float":
        return 3 * draw(kind, values.shape, random) + 1
    return ~values if kind == "bool" else 1 - values


@functools.cache
def _floats() -> Any:
    """Numbers around zero, between 0 and 1, and above 1, in random order."""
    random = np.random.default_rng(0)
    parts = [random.normal(size=_COUNT), *random.uniform([[0.1], [1.1]], [[0.9], [3.0]], (2, _COUNT))]
    return np.choose(random.integers(0, 3, _COUNT), parts).astype("float32")


def _is_recurrent(operation: Any) -> bool:
    """Whether this is a recurrent layer, or has one inside."""
    is_layer = isinstance(operation, keras.layers.Layer)
    return is_layer and any(isinstance(one, keras.layers.RNN) for one in layers_within(operation))


def _other_weights(operation: Any, random: Any) -> list[tuple[Any, Any]]:
    """(variable, random value) for a layer: the initial values may be zeros, which would hide what it does."""
    if not isinstance(operation, keras.layers.Layer):
        return []
    variables = [one for one in operation.variables if "float" in one.dtype and "float8" not in one.dtype]
    if sum(math.prod(one.shape) for one in variables) > _LARGE:
        return []
    pairs = []
    for one in variables:
        is_matrix = len(one.shape) > 1
        few = random.normal(size=_COUNT) / math.sqrt(one.shape[-2]) if is_matrix else random.uniform(0.5, 1.5, _COUNT)
        pairs.append((one, np.resize(few, one.shape)))
    return pairs


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A context without warnings."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _eagerly() -> Any:
    """A context in which operations compute values, also while a graph is being traced."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return tf.init_scope()
    return jax.ensure_compile_time_eval() if backend == "jax" else torch.no_grad()


def _to_numpy(x: Tensor) -> Any:
    dtype = keras.backend.standardize_dtype(x.dtype)
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32") if dtype in ("float16", "bfloat16") else x))

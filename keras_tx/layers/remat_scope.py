"""Layers that compute the same in a `keras.RematScope`, Keras' gradient checkpointing, as outside."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops


class Rematerializable(keras.layers.Layer):
    """A layer of which Keras' gradient checkpointing wraps a function of vectors alone, given by position.

    TensorFlow's fails for None, loses the gradients of arguments given by name, and in graphs takes none by name; that
    of JAX makes a tensor of `training`.
    """

    def rematerialized_call(self, layer_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """What Keras calls in place of `call` in a `keras.RematScope`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}  # by place or by name
            vectors = {name: x for name, x in given.items() if _is_vector(x)}

            def call_with(*tensors: Any) -> Any:
                every = {**given, **dict(zip(vectors, tensors, strict=True))}
                return layer_call(*[every.pop(place) for place in range(len(args))], **every)

            return super(Rematerializable, self).rematerialized_call(call_with, *args, **kwargs)(*vectors.values())

        return call


def _is_vector(x: Any) -> bool:
    return bool(ops.is_tensor(x)) and bool(keras.backend.is_float_dtype(x.dtype))

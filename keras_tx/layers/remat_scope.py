"""Layers that compute the same in a `keras.RematScope`, Keras' gradient checkpointing, as outside."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_tx.layers.seeds import RepeatedSeeds


class Rematerializable(keras.layers.Layer):
    """A layer that gives Keras' gradient checkpointing only tensors of floats, by position.

    On TensorFlow, checkpointing fails for arguments that are None, loses the gradients of arguments passed by name, and
    takes none by name in graphs. On JAX it turns `training` into a tensor. Dropout would draw other seeds in the second
    computation, so they are drawn here, before the first.
    """

    def rematerialized_call(self, layer_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """What Keras calls in place of `call` in a `keras.RematScope`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}  # by place or by name
            floats = {name: x for name, x in given.items() if _is_float_tensor(x)}
            # A layer without the argument may have layers within that train; from others Keras keeps back None.
            trains = given.get("training", "training" not in inspect.signature(self.call).parameters)
            seeds = RepeatedSeeds(self) if trains else None

            def call_with(*tensors: Any) -> Any:
                every = {**given, **dict(zip(floats, tensors, strict=True))}
                with contextlib.nullcontext() if seeds is None else seeds.run():
                    return layer_call(*[every.pop(place) for place in range(len(args))], **every)

            made = super(Rematerializable, self).rematerialized_call(call_with, *args, **kwargs)(*floats.values())
            if seeds is not None:
                seeds.finish()
            return made

        return call


def _is_float_tensor(x: Any) -> bool:
    return bool(ops.is_tensor(x)) and bool(keras.backend.is_float_dtype(x.dtype))

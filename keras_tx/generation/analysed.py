"""What generation derives from a Keras model once, and keeps with it: its `IncrementalModel` and its compiled loops."""

from typing import Any, TypeAlias

import keras

from keras_tx.generation.compiled_loop import CompiledDecodeLoop
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.locks import lock_of

Cached: TypeAlias = tuple[IncrementalModel, dict[Any, CompiledDecodeLoop]]


def analysed(model: keras.Model, target: str | None) -> Cached:
    """The `IncrementalModel` of a model and its compiled loops, cached until the model has other variables.

    Args:
        model: a functional model, or one with a method that returns it.
        target: the name of the input that generation continues; None if the graph shows it.
    """
    cached = _current_cache(model)
    if target not in cached:
        with lock_of(model):
            cached = _current_cache(model)
            if not cached:
                # Keras must not track it as a part of the model.
                object.__setattr__(model, "_keras_tx_loops", (model.variables, cached))
            if target not in cached:
                cached[target] = (IncrementalModel(model, target), {})
    return cached[target]


def _current_cache(model: keras.Model) -> dict[str | None, Cached]:
    """What is cached on a model by targets; nothing if the model has other variables now."""
    cached: dict[str | None, Cached]
    variables, cached = vars(model).get("_keras_tx_loops", ((), {}))
    return cached if list(map(id, variables)) == list(map(id, model.variables)) else {}

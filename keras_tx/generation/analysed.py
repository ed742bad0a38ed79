"""What generation derives from a Keras model once, and keeps with it: its `IncrementalModel` and its compiled loops."""

from typing import Any, TypeAlias

import keras

from keras_tx.generation.compiled_loop import CompiledDecodeLoop
from keras_tx.generation.incremental_model import IncrementalModel
from keras_tx.internals.keras_models import functional_model, layers_within
from keras_tx.locks import lock_of

Cached: TypeAlias = tuple[IncrementalModel, dict[Any, CompiledDecodeLoop]]


def analysed(model: keras.Model, target: str | None) -> Cached:
    """The `IncrementalModel` of a model and its compiled loops, cached until the model has other variables or layers.

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
                object.__setattr__(model, "_keras_tx_loops", (_parts(model), cached))
            if target not in cached:
                cached[target] = (IncrementalModel(model, target), {})
    return cached[target]


def _current_cache(model: keras.Model) -> dict[str | None, Cached]:
    """What is cached on a model by targets; nothing if the model has other parts now."""
    cached: dict[str | None, Cached]
    parts, cached = vars(model).get("_keras_tx_loops", ((), {}))
    return cached if list(map(id, parts)) == list(map(id, _parts(model))) else {}


def _parts(model: keras.Model) -> list[Any]:
    """The variables of a model, and the graph of each `keras.Sequential`, which `add` and `pop` replace."""
    sequential = [layer for layer in layers_within(model) if isinstance(layer, keras.Sequential)]
    return [*model.variables, *map(functional_model, sequential)]

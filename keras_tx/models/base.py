"""What all models of the package share: clones of the same class, and quantization without needless warnings."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from keras_tx.internals import keras_jax_steps, keras_models
from keras_tx.layers import trainable
from keras_tx.layers.splitting import whole_model_first

_WITH_KERNELS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)

Constructor = TypeVar("Constructor", bound=Callable[..., None])
Twins = dict[int, Any]  # {id of an operation or symbolic tensor of a model: its counterpart in the clone}


def clonable(constructor: Constructor) -> Constructor:
    """Decorates `__init__` of a `BaseModel`, so that `keras.models.clone_model` makes a model of the same class."""

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        source = _cloned(args)
        if source is None:
            within = kwargs.pop(trainable.KEY, {})  # from a config
            with whole_model_first():
                constructor(self, *args, **kwargs)
            trainable.restore(self, within)
        else:
            self._become_clone(source, *args, **kwargs)

    return construct  # type: ignore[return-value]


class BaseModel(keras_jax_steps.JaxSteps):
    """A functional model. A subclass decorates its constructor with `clonable`, and defines `_take_over`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        source = _cloned(args)
        if source is not None and not _are_twins(source, keras.Model(*args, **kwargs)):
            # `clone_function` or `call_function` has changed the graph, so that it is none of this class.
            return keras.Model(*args, **kwargs)
        return super().__new__(cls, *args, **kwargs)

    def _become_clone(self, source: Any, inputs: Any, outputs: Any, name: str | None = None) -> None:
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        twins: Twins = {}
        for theirs, ours in zip(_calls(source), _calls(self), strict=True):
            twins[id(theirs.operation)] = ours.operation
            twins.update(zip(map(id, theirs.outputs), ours.outputs, strict=True))
            if isinstance(ours.operation, keras.layers.InputLayer):
                ours.operation.optional = theirs.operation.optional  # which `clone_model` loses
        self._take_over(source, twins)
        if not source.trainable:
            self.trainable = False

    def _take_over(self, source: Any, twins: Twins) -> None:
        """Sets the attributes of a clone of `source`."""
        raise NotImplementedError

    def quantize(self, mode: str | None = None, config: Any = None, filters: Any = None, **kwargs: Any) -> None:
        """Makes kernels and token embeddings integers, as `keras.Model.quantize` does.

        Args:
            mode: "int8", or "int4" for kernels of 4 bits.
            config: `keras.quantizers.Int8QuantizationConfig` or `Int4QuantizationConfig`, with the default quantizers.
            filters: a regular expression, a list of them, or a function of a layer: the layers to quantize, by their
                names. None: all.
            kwargs: see `keras.Model.quantize`.

        Raises:
            ValueError: another mode, custom quantizers, filters that match no layer, or a layer that is quantized
                already.
        """
        if filters is not None and not isinstance(filters, (str, list, tuple)) and not callable(filters):
            raise ValueError(
                "`filters` must be a regular expression, a list of them, or a function of a layer. Received: "
                f"filters={filters!r}"
            )
        chosen = [x for x in keras_models.layers_within(self) if isinstance(x, _WITH_KERNELS) and _fits(x, filters)]
        if not chosen:
            raise ValueError(f"`filters` must match the name of a layer with a kernel. Received: filters={filters!r}")
        # Keras would warn of each of the other layers.
        super().quantize(mode, config=config, filters=lambda layer: any(layer is one for one in chosen), **kwargs)


def with_twins(value: Any, twins: Twins) -> Any:
    """`value`, or a copy of it in which layers are replaced by those of the clone.

    It may be an operation, a tensor, a dict, list or tuple of such values, or a `HasLayers`.
    """
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, dict):
        return {key: with_twins(one, twins) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_twins(one, twins) for one in value)
    if not isinstance(value, HasLayers):
        return value
    copied = copy.copy(value)
    vars(copied).update({name: with_twins(one, twins) for name, one in vars(value).items()})
    return copied


class HasLayers:
    """The base class of objects that are no layers, but have layers as attributes."""


def _cloned(args: tuple[Any, ...]) -> Any | None:
    """The model that `keras.models.clone_model` clones, if it calls the constructor with these arguments."""
    return keras_models.model_that_made(args[1]) if len(args) == 2 else None


def _calls(model: Any) -> list[keras_models.Call]:
    return keras_models.calls_in_order(model)


def _are_twins(source: Any, clone: Any) -> bool:
    """Whether two models consist of the same calls of operations with the same types and names."""

    def parts(model: Any) -> list[Any]:
        return [(type(call.operation), call.operation.name, len(call.outputs)) for call in _calls(model)]

    return parts(source) == parts(clone)


def _fits(layer: Any, filters: Any) -> bool:
    if filters is None or callable(filters):
        return filters is None or bool(filters(layer))
    return any(re.search(one, layer.name) for one in ([filters] if isinstance(filters, str) else filters))

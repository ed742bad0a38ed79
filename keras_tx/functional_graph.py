"""The graph of a functional model: which call produced a tensor, which calls consume it, and all calls in order.

A tensor here is a symbolic `keras.KerasTensor`. `FunctionalGraph` replaces nested models by their calls. A nested model
that is called twice computes two values for one tensor, so the graph numbers the values.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_tx.internals import keras_models
from keras_tx.internals.keras_models import Call, functional_model
from keras_tx.types import Tensor


def source_of(tensor: Any, inside_models: bool = False) -> Call | None:
    """The call that produced a tensor; None if no operation did.

    Args:
        tensor: symbolic.
        inside_models: for a tensor that a nested model returned, whether to return the call inside that model.
    """
    made = keras_models.call_that_made(tensor)
    if made is None:
        return None
    call, place = made
    model = functional_model(call.operation) if inside_models else None
    return call if model is None else source_of(model.outputs[place], inside_models)


def consumers_of(tensor: Any, model: Any) -> Iterator[Call]:
    """The calls of a functional `model` that consume a tensor; nested models are replaced by the calls inside them."""
    for call in keras_models.calls_with(tensor):
        if call.operation not in model.operations:  # several models may share an input
            continue
        nested = functional_model(call.operation)
        if nested is None:
            yield call
        else:
            for place, given in enumerate(keras_models.inputs_of_nested(nested, call)):
                if given is tensor:
                    yield from consumers_of(nested.inputs[place], nested)


def is_optional_input(tensor: Any) -> bool:
    """Whether a tensor is a `keras.Input(..., optional=True)`."""
    call = source_of(tensor)
    return call is not None and bool(getattr(call.operation, "optional", False))


class Node:
    """A call of an operation in a `FunctionalGraph`.

    Attributes:
        operation, args, kwargs: see `Call`.
        inputs: {id of a symbolic tensor among the arguments: the number of its value}.
        outputs: the numbers of the values that the call returns.
    """

    def __init__(self, call: Call, inputs: dict[int, int], outputs: list[int]):
        self.operation, self.args, self.kwargs = call.operation, call.args, call.kwargs
        self.inputs, self.outputs = inputs, outputs

    def filled(self, values: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, with symbolic tensors replaced by {number: value}, or by None if missing."""

        def value_of(x: Any) -> Any:
            return values.get(self.inputs[id(x)]) if isinstance(x, keras.KerasTensor) else x

        return tuple(keras.tree.map_structure(value_of, self.args)), keras.tree.map_structure(value_of, self.kwargs)

    def store(self, values: dict[int, Tensor], outputs: Any) -> None:
        """Stores the results of the call in {number: value}."""
        values.update(zip(self.outputs, keras.tree.flatten(outputs), strict=False))

    def numbers_of(self, name: str, index: int) -> list[int]:
        """The numbers of the values in the call argument with this name or position."""
        given = self.args[index] if index < len(self.args) else self.kwargs.get(name)
        return [self.inputs[id(x)] for x in keras.tree.flatten(given) if isinstance(x, keras.KerasTensor)]


class FunctionalGraph:
    """The calls of a functional model in the order in which they run, with nested models replaced by their calls.

    Attributes:
        nodes: `Node`s.
        inputs, outputs: the numbers of the values that are the model's inputs and outputs.
        absent: the names of optional inputs that nested models are not given; they have no values.
    """

    def __init__(self, model: Any):
        self._count = 0
        self.absent: list[str] = []
        self.nodes: list[Node] = []
        self.inputs = self._numbers(model.inputs)
        self.outputs = self._inline(model, self.inputs)

    def _numbers(self, tensors: list[Any]) -> list[int]:
        self._count += len(tensors)
        return list(range(self._count - len(tensors), self._count))

    def _inline(self, model: Any, inputs: Iterable[int]) -> list[int]:
        """Adds the nodes of `model`, whose inputs are the values of these numbers; returns those of its outputs."""
        numbers = dict(zip((id(x) for x in model.inputs), inputs, strict=True))
        for call in keras_models.calls_in_order(model):
            if not call.inputs or any(id(x) not in numbers for x in call.inputs):
                continue
            nested = functional_model(call.operation)
            if nested is not None:
                given = keras_models.inputs_of_nested(nested, call)
                self.absent += [x.name for x, one in zip(nested.inputs, given, strict=True) if one is None]
                outputs = self._inline(
                    nested, [numbers[id(x)] if x is not None else self._numbers([x])[0] for x in given]
                )
            else:
                outputs = self._numbers(call.outputs)
                self.nodes.append(Node(call, {id(x): numbers[id(x)] for x in call.inputs}, outputs))
            numbers.update(zip((id(x) for x in call.outputs), outputs, strict=True))
        return [numbers[id(x)] for x in model.outputs]

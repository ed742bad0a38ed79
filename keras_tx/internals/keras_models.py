"""The private parts of Keras for functional models, layers, variables and masks."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras

from keras_tx.types import DType, Tensor

try:
    from keras.src import backend as _backend
    from keras.src import ops as _operations
    from keras.src.backend.common import global_state as _global_state
    from keras.src.backend.common.name_scope import current_path as _current_path
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope as _in_symbolic_scope
    from keras.src.backend.common.variables import AutocastScope as _AutocastScope
    from keras.src.backend.common.variables import initialize_all_variables as _initialize_all_variables
    from keras.src.models import Functional as _Functional
    from keras.src.saving import serialization_lib as _serialization

    # The classes of operations, because `keras.ops` exports only the functions. To call these and look at the type of
    # the operation would use up the names ("add", "softmax") that Keras gives to the operations of a user's model.
    ELEMENTWISE: tuple[type, ...] = (_operations.Add, _operations.Subtract, _operations.Multiply)
    NOT_EQUAL: type = _operations.NotEqual
    CAST: type[Any] = _operations.Cast
    SIGMOID: type = _operations.Sigmoid
    SOFTMAX: type = _operations.Softmax
except (ImportError, AttributeError) as _error:
    raise ImportError(
        f"Keras {keras.__version__} no longer has a private part that keras_tx needs ({_error}): install a version "
        "of Keras that keras_tx supports, or update keras_tx/internals/keras_models.py"
    ) from _error


# The graph of a functional model.


class Call(NamedTuple):
    """One call of an operation with symbolic tensors, as Keras records it.

    Attributes:
        operation: the layer, the nested model or the operation of `keras.ops` that was called.
        inputs: the `keras.KerasTensor`s among its arguments, in the order of the arguments; none for an input.
        outputs: the `keras.KerasTensor`s that it returned, flattened.
        args, kwargs: the arguments of the call.
    """

    operation: Any
    inputs: list[Any]
    outputs: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _call(node: Any) -> Call:
    return Call(node.operation, node.input_tensors, node.outputs, node.arguments.args, node.arguments.kwargs)


def call_that_made(tensor: Any) -> tuple[Call, int] | None:
    """The call that returned a symbolic `tensor`, and the index of `tensor` among its outputs.

    None for a `keras.KerasTensor` that no operation produced, and for a tensor that is not symbolic.
    """
    operation, index, place = getattr(tensor, "_keras_history", (None, 0, 0))
    return None if operation is None else (_call(operation._inbound_nodes[index]), place)


def calls_with(tensor: Any) -> list[Call]:
    """The calls with a symbolic `tensor` among their arguments, in the order in which they were made, in any model."""
    operation = tensor._keras_history.operation
    calls = [] if operation is None else [_call(node) for node in operation._outbound_nodes]
    return [call for call in calls if any(x is tensor for x in call.inputs)]


def calls_in_order(model: Any) -> list[Call]:
    """The calls of a functional `model`, its inputs among them, in the order in which Keras runs them."""
    by_depth = model._nodes_by_depth
    return [_call(node) for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def functional_model(model: Any, own_call: bool = False) -> Any:
    """`model` if it is functional, the functional model inside a built `keras.Sequential`, or None.

    Unless `own_call` is True, it is None also for a class of a user's own with another `call`, which runs in place of
    the graph.
    """
    function = model._functional if isinstance(model, keras.Sequential) else model
    if not isinstance(function, _Functional):
        return None
    call = type(model).call
    return function if own_call or is_of_keras(call) or call.__module__.startswith("keras_tx.") else None


def inputs_of_nested(model: Any, call: Call) -> list[Any]:
    """What a call of a nested functional model gives to each of `model.inputs`.

    As in Keras, those of a dict are found by name if the model was not made with a dict, else in the order of the keys.
    """
    given, names = call.args[0] if call.args else call.kwargs["inputs"], [x.name for x in model.inputs]
    if isinstance(given, dict) and not isinstance(model.input, dict) and set(names) <= set(given):
        given = [given[name] for name in names]
    return list(keras.tree.flatten(given))[: len(names)]


class Cloned(keras.Model):
    """A functional model that its class finds when `keras.models.clone_model` makes another model of the class.

    Keras runs the graph of the model with new layers. If the constructor takes `*args` and `**kwargs`, Keras then calls
    the class with the new inputs, the new outputs and the name.

    Attributes:
        ids_of_given_variables: the ids of the variables that layers had when a `clone_function` returned them in the
            latest clone, such as those of the model's own layers. The clone must leave their values as they are.
    """

    def _run_through_graph(self, inputs: Any, operation_fn: Any = lambda operation: operation, **kwargs: Any) -> Any:
        if not any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(inputs)):
            return super()._run_through_graph(inputs, operation_fn, **kwargs)
        given: set[int] = set()
        seen: set[int] = set()  # operations; one that the graph calls twice is built at the second call

        def noting(operation: Any) -> Any:
            made = operation_fn(operation)
            if id(made) not in seen:
                seen.add(id(made))
                given.update(map(id, getattr(made, "variables", ())))
            return made

        outputs = super()._run_through_graph(inputs, noting, **kwargs)
        for x in keras.tree.flatten(outputs):
            if isinstance(x, keras.KerasTensor):
                x._keras_tx_made_by = weakref.ref(self)
        object.__setattr__(self, "ids_of_given_variables", given)
        return outputs


def model_that_made(outputs: Any) -> Any | None:
    """The `Cloned` model whose graph was run to make symbolic `outputs`; None for anything else."""
    tensors = [x for x in keras.tree.flatten(outputs) if isinstance(x, keras.KerasTensor)]
    made_by = getattr(tensors[0], "_keras_tx_made_by", None) if tensors else None
    return made_by and made_by()


def is_unsafe_deserialization_enabled() -> bool:
    """Whether `keras.config.enable_unsafe_deserialization` was called, so that code in files may be run."""
    return _serialization.in_safe_mode() is False


def is_cast_of_numbers(operation: Any) -> bool:
    """Whether an operation is `keras.ops.cast` to a dtype of numbers; booleans would not keep the values."""
    return type(operation) is CAST and str(operation.dtype) != "bool"


def is_of_keras(thing: Any) -> bool:
    """Whether a class or function is defined by Keras itself."""
    return (getattr(thing, "__module__", None) or "").startswith("keras.")


# Layers.


def values_are_made_up() -> bool:
    """Whether Keras runs a function only for the shapes of its outputs: PyTorch's tensors are then full of ones."""
    return bool(_in_symbolic_scope())


def get_keras_mask(tensor: Tensor) -> Tensor | None:
    """The mask that Keras attached to a tensor, symbolic or not; None where there is none."""
    return _backend.get_keras_mask(tensor)


def set_keras_mask(tensor: Tensor, mask: Tensor | None) -> None:
    """Attaches a mask to a tensor, symbolic or not; None removes it."""
    _backend.set_keras_mask(tensor, mask)


def layers_within(layer: Any, include_self: bool = True) -> list[Any]:
    """`layer` and all layers inside it, at any depth, each once."""
    return list(layer._flatten_layers(include_self=include_self))


def seed_generators_within(layer: Any) -> list[Any]:
    """The seed generators that `layer` and all layers inside it have as attributes, each once."""
    return list(dict.fromkeys(one for inner in layers_within(layer) for one in inner._seed_generators))


def direct_sublayers(layer: Any) -> list[Any]:
    """The layers that are attributes of `layer`, or that a model calls, without those inside them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


class HasAfterBuild(keras.layers.Layer):
    """A layer whose method `after_build` is called when it has been built."""

    def after_build(self) -> None:
        """Does nothing, unless a subclass overrides it."""

    def _post_build(self) -> None:
        super()._post_build()
        self.after_build()


def keep_call_arguments(layer: Any) -> None:
    """From now on Keras passes call arguments to `layer` unchanged, instead of converting them to its compute dtype."""
    layer._convert_input_args = False


def replace_dtype_policy(layer: Any, policy: DType) -> None:
    """Gives `layer` another dtype policy. If it has a `DTypePolicyMap`, the public setter would change that map."""
    layer._dtype_policy = keras.dtype_policies.get(policy)


def kernel_of(layer: Any) -> Any:
    """The kernel variable of a dense layer. With LoRA, `layer.kernel` is a sum instead of a variable."""
    return layer._kernel


def embeddings_of(layer: Any) -> Any:
    """The variable with the table of a `keras.layers.Embedding`. With LoRA, `layer.embeddings` is a sum."""
    return layer._embeddings


def kernel_or_table_of(layer: Any) -> Any:
    """The variable of a dense layer or of a `keras.layers.Embedding` to which LoRA adds a product."""
    return embeddings_of(layer) if isinstance(layer, keras.layers.Embedding) else kernel_of(layer)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Within this context, `variable.value` and `variable.dtype` are those of the variable, also in a layer's call."""
    with _AutocastScope(None):
        yield


def delete_variable(layer: Any, name: str) -> None:
    """Deletes a variable, the attribute `name` of a layer, without the garbage collection that Keras runs each time."""
    layer._untrack_variable(getattr(layer, name))
    super(keras.layers.Layer, layer).__delattr__(name)


def set_initializer(variable: Any, initializer: Callable[..., Tensor]) -> None:
    """Sets `initializer(shape, dtype=)` for a variable that was created inside a `keras.StatelessScope`."""
    variable._initializer = initializer


@contextmanager
def variables_initialized_at_end() -> Iterator[None]:
    """A `keras.StatelessScope` in which variables are created without values, which they get at its end.

    If the body raises, they get none. At the end of Keras' own scope they would be initialized also then, and if that
    fails, every later scope of the process would fail. Inside another scope they get their values at the end of that.
    """
    name = "uninitialized_variables"
    others, is_inner = _global_state.get_global_attribute(name), _backend.in_stateless_scope()
    if not is_inner:
        _global_state.set_global_attribute(name, [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
        if not is_inner:
            _initialize_all_variables()
    finally:
        if not is_inner:
            _global_state.set_global_attribute(name, others)


def let_models_pass_masks_on() -> None:
    """From now on, Keras does not warn that a functional model with a masked input destroys the mask.

    It warns of each such model, although the layers inside pass the mask on; of a layer inside that does not, it warns
    still.
    """
    if "_set_mask_metadata" in vars(_Functional):
        return

    @functools.wraps(keras.layers.Layer._set_mask_metadata)
    def set_masks(self: Any, inputs: Any, outputs: Any, masks: Any) -> None:
        if self._supports_masking:  # the class has a `compute_mask`
            keras.layers.Layer._set_mask_metadata(self, inputs, outputs, masks)

    kept = keras.layers.Layer.supports_masking.fset
    _Functional.supports_masking = property(lambda self: True, kept, doc="Whether masks go through the model.")
    _Functional._set_mask_metadata = set_masks


def weight_path(layer: Any, name: str | None) -> str:
    """The path that a weight with this name gets, if `layer.add_weight` makes it now."""
    with _backend.name_scope(layer.name, caller=layer):
        return f"{_current_path()}/{name}"


def layout_map_of(distribution: Any) -> Any:
    """The `LayoutMap` of a `keras.distribution.ModelParallel`; None for other distributions."""
    return getattr(distribution, "_layout_map", None)


def layout_of(variable: Any) -> Any:
    """The `TensorLayout` that the current distribution gives a variable on JAX; None without a distribution."""
    variable._initialize_layout()
    return variable._layout


def initialize_now(values: Iterable[tuple[Any, Tensor]]) -> None:
    """Gives variables of JAX that were created in `variables_initialized_at_end` their values.

    Args:
        values: pairs of a variable and an array, which already lies on the devices as the layout says.
    """
    for variable, value in values:
        variable._value, variable._initializer = value, None
    waiting = _global_state.get_global_attribute("uninitialized_variables")
    waiting[:] = [one for one in waiting if one._value is None]


def keras_hub_positions(layer: Any) -> int | None:
    """The number of positions that a `PositionEmbedding` of KerasHub has; None for any other layer."""
    is_one = type(layer).__name__ == "PositionEmbedding"  # to import KerasHub for this would take seconds
    return layer.sequence_length if is_one else None

"""The private parts of TensorFlow's graphs and of its eager context, and the private ops of tensorflow_text."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from keras_tx.optional import Lazy
from keras_tx.types import DType, Tensor

tf = Lazy("tensorflow")
_eager_context = Lazy("tensorflow.python.eager.context")
_control_flow = Lazy("tensorflow.python.ops.control_flow_util")
_framework = Lazy("tensorflow.python.framework.ops")
_fingerprinting = Lazy("tensorflow.python.saved_model.fingerprinting_utils")
_func_graph = Lazy("tensorflow.python.framework.func_graph")
_variables = Lazy("tensorflow.python.ops.resource_variable_ops")
_sentencepiece_ops = Lazy("tensorflow_text.python.ops.sentencepiece_tokenizer", extra="text")


def is_compiled_by_xla(function: Any) -> bool:
    """Whether a function in the library of a `tf.Graph` comes from a `tf.function(jit_compile=True)`."""
    return "_XlaMustCompile" in function.attr and bool(function.attr["_XlaMustCompile"].b)


def traces_for_xla() -> bool:
    """Whether a `tf.function(jit_compile=True)` is being traced, or called by the function that is being traced."""
    return bool(_control_flow.GraphOrParentsInXlaContext(_framework.get_default_graph()))


def leave_out_of_autograph(package: str) -> None:
    """AutoGraph no longer converts what stands in `package`, as it converts nothing of Keras.

    It searches functions, and all that they call, for Python control flow over tensors, which takes a second for a
    tokenizer in `Dataset.map`. The public `tf.autograph.experimental.do_not_convert` would be needed on every function.
    """
    with contextlib.suppress(ImportError, AttributeError):  # where TensorFlow has changed, it takes longer
        config: Any = importlib.import_module("tensorflow.python.autograph.core.config")
        if not any(rule.matches(package) for rule in config.CONVERSION_RULES):
            config.CONVERSION_RULES = (config.DoNotConvert(package), *config.CONVERSION_RULES)


def has_global_seed() -> bool:
    """Whether `tf.random.set_seed`, or `keras.utils.set_random_seed`, was called in this process."""
    return _eager_context.global_seed() is not None


@contextmanager
def unoptimized() -> Iterator[None]:
    """Within this context, TensorFlow runs graphs as they were traced, which is faster for a single call.

    A thread that runs its first graph meanwhile does so, too, and keeps the setting.

    The public `tf.config.optimizer.set_experimental_options` cannot take an option back: after it, each program that
    XLA has compiled would be compiled a second time.
    """
    context = _eager_context.context()
    options, of_thread = context._optimizer_experimental_options, context._thread_local_data
    before, call_options = dict(options), of_thread.function_call_options
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        options.clear()
        options.update(before)
        of_thread.function_call_options = call_options


# Operations that sizes of tensors and masks of attention are made of.
_SHARED = ("Const", "Shape", "StridedSlice", "Pack", "ExpandDims", "Range", "AddV2", "LessEqual", "LogicalAnd", "Any")
_LARGE = 2**16  # bytes
_made: ContextVar[dict[Any, Any] | None] = ContextVar("keras_tx_made", default=None)


@contextmanager
def shared_shapes() -> Iterator[None]:
    """Within this context, a graph that this thread traces has each constant, size of a tensor and mask only once.

    TensorFlow makes them anew for each use, and they are half of the nodes of a transformer.
    """
    graph = _func_graph.FuncGraph
    if not hasattr(graph._create_op_internal, "keras_tx"):
        graph._create_op_internal = _sharing(graph._create_op_internal)
    token = _made.set({})
    try:
        yield
    finally:
        _made.reset(token)


def _sharing(create: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a graph that adds an operation, or within `shared_shapes` returns an equal one that it has."""

    @functools.wraps(create)
    def shared(graph: Any, kind: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        made = _made.get() if kind in _SHARED else None
        if made is None:
            return create(graph, kind, inputs, *args, **kwargs)
        attributes = kwargs.get("attrs") or {}
        is_large = sum(value.ByteSize() for value in attributes.values()) > _LARGE  # a weight
        context = graph._get_control_flow_context()
        is_within = context is not None and not context.IsXLAContext()  # a loop or condition of TensorFlow 1
        if is_within or is_large:
            return create(graph, kind, inputs, *args, **kwargs)
        inputs = [graph.capture(x) for x in inputs]
        stacks = graph._device_function_stack, graph._colocation_stack
        key = (
            graph,
            kind,
            tuple(sorted((name, repr(value)) for name, value in graph._attr_scope_map.items())),
            tuple(x.name for x in inputs),
            frozenset((name, value.SerializeToString(deterministic=True)) for name, value in attributes.items()),
            frozenset(op.name for op in graph._current_control_dependencies()),
            tuple(str(one) for stack in stacks for one in stack.peek_objs()),
        )
        # A graph takes small tensors from outside of it as constants, each of which is an input of the graph only once.
        inputs_of_graph = made.setdefault((graph, "inputs"), set())
        inputs_of_graph.update(map(id, graph.inputs[len(inputs_of_graph) :]))
        if key not in made or (kind == "Const" and id(made[key].outputs[0]) in inputs_of_graph):
            made[key] = create(graph, kind, inputs, *args, **kwargs)
        return made[key]

    shared.keras_tx = True  # type: ignore[attr-defined]
    return shared


def untraced_variable(value: Any) -> Any:
    """A `tf.Variable` that is not trained, made while a `tf.function` is traced without being a part of its trace.

    After a trace that makes a `tf.Variable`, also within `tf.init_scope`, TensorFlow traces the function once more.
    """
    with tf.init_scope():
        return _variables.ResourceVariable(value, trainable=False)


_NUMBER = "_keras_tx_number"  # an attribute of constants; TensorFlow lets any node have one that begins with "_"


def numbered_constant(value: Any, number: int) -> Tensor:
    """A constant with the dtype and the shape of a NumPy array, but without its values.

    `constant_number` finds the number in a saved graph, for the one who puts the values there.
    """
    dtype = tf.as_dtype(value.dtype)
    proto = tf.make_tensor_proto(0, dtype=dtype)
    proto.tensor_shape.CopyFrom(tf.TensorShape(value.shape).as_proto())
    return _constant(proto, dtype, **{_NUMBER: tf.compat.v1.AttrValue(i=number)})


def constant_number(node: Any) -> int | None:
    """The number of a node of a saved graph that `numbered_constant` made; None for any other node."""
    return int(node.attr[_NUMBER].i) if _NUMBER in node.attr else None


def _constant(proto: Any, dtype: Any, **attributes: Any) -> Tensor:
    attributes["value"] = tf.compat.v1.AttrValue(tensor=proto)
    attributes["dtype"] = tf.compat.v1.AttrValue(type=dtype.as_datatype_enum)
    graph = tf.compat.v1.get_default_graph()
    return graph._create_op_internal("Const", [], [dtype], attrs=attributes).outputs[0]


def write_fingerprint(folder: Any) -> None:
    """Writes fingerprint.pb of a SavedModel anew, for a file that has changed since `tf.saved_model.save`."""
    _fingerprinting.write_fingerprint(str(folder))


# Ops of tensorflow_text that a stock TensorFlow Serving has, and that the public functions wrap in many others.


def sentencepiece_tokenize(model: bytes, name: str, texts: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """Texts (B,) tokenized by a SentencePiece `model`: all ids or pieces of `dtype`, and row splits (B + 1,).

    Models of one `name` are loaded once.
    """
    ops = _sentencepiece_ops.gen_sentencepiece_tokenizer
    processor = ops.sentencepiece_op(model=model, shared_name=name)
    values, splits = ops.sentencepiece_tokenize_op(processor, texts, 0, 1.0, False, False, False, dtype)
    return values, splits

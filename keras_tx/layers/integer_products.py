"""Exact products of int8 matrices: (R, D) and (D, F) -> float32 (R, F), by oneDNN. TensorFlow, in a graph."""

from typing import Any
from weakref import WeakKeyDictionary

from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

LEVELS = 127  # of symmetric int8: -127 to 127
INEXACT = (
    "This processor does not multiply int8 matrices exactly, for which it needs VNNI or AMX instructions. Export in "
    "float32 or bfloat16 for it. Received: wrong sums"
)
_SUMMED = 64
_checks: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # names by graph, which an operation would keep alive


def multiply(integers: Tensor, kernel: Tensor, limits: Tensor) -> Tensor:
    """The sums of products of integers, times the scale of their column.

    The first product of a graph also has it check, where it runs, that the processor multiplies integers exactly:
    without VNNI sums of two products saturate at 16 bits. TensorFlow computes this once, when it optimizes the graph.

    Args:
        integers: int8 (R, D), from -127 to 127.
        kernel: int8 (D, F), from -127 to 127. TensorFlow lays it out in memory for the processor when the product is
            first computed, and keeps that: a variable must not change.
        limits: float32 (F,): the number for which 127 in each column of `kernel` stands.

    Returns:
        Float32 (R, F).
    """
    graph = tf.compat.v1.get_default_graph()
    if graph not in _checks:
        _checks[graph] = _check_sums().name
    with tf.control_dependencies([graph.get_operation_by_name(_checks[graph])]):
        return _product(integers, kernel, limits)


def _check_sums() -> Any:
    """An operation that fails where the largest sums are wrong."""
    rows, kernel = (tf.fill(shape, tf.constant(LEVELS, tf.int8)) for shape in ((8, _SUMMED), (_SUMMED, 16)))
    sums = tf.cast(tf.round(_product(rows, kernel, tf.fill([16], float(LEVELS)))), tf.int32)
    return tf.debugging.Assert(tf.reduce_all(tf.equal(sums, _SUMMED * LEVELS**2)), [INEXACT, sums[0]])


def _product(integers: Tensor, kernel: Tensor, limits: Tensor) -> Tensor:
    """The operation that TensorFlow makes of products of quantized tensors. It has no function in Python."""
    limit, limits = tf.constant(float(LEVELS)), tf.convert_to_tensor(limits)  # in the rows an integer stands for itself
    inputs = [tf.bitcast(integers, tf.qint8), tf.bitcast(kernel, tf.qint8), tf.zeros(limits.shape)]  # it needs a bias
    inputs += [-limit, limit, -limits, limits]
    attributes = {
        **{"Tdevice_inputs": [tf.qint8, tf.qint8, tf.float32], "Thost_inputs": [tf.float32] * 4},
        **{"Tdevice_outputs": [tf.float32], "Thost_outputs": []},
        **{"T1": tf.qint8, "T2": tf.qint8, "Tbias": tf.float32, "U": tf.float32, "Tout": tf.float32},
        **{"transpose_a": False, "transpose_b": False, "is_weight_const": True, "is_bias_const": True},
        **{"fused_ops": [b"BiasAdd", b"Dequantize"], "leakyrelu_alpha": 0.2},
        **{"input_quant_mode": b"SCALED", "output_quant_mode": b"SCALED"},
    }
    attributes = {name: _attribute(value) for name, value in attributes.items()}
    graph = tf.compat.v1.get_default_graph()
    made = graph.create_op("_QuantizedMatMul", inputs, [tf.float32], name="int8_product", attrs=attributes)
    return made.outputs[0]


def _attribute(value: Any) -> Any:
    make = tf.compat.v1.AttrValue
    if isinstance(value, list):
        kind = {"s": value} if value and isinstance(value[0], bytes) else {"type": [x.as_datatype_enum for x in value]}
        return make(list=make.ListValue(**kind))
    if isinstance(value, tf.DType):
        return make(type=value.as_datatype_enum)
    return make(**{{bool: "b", bytes: "s", float: "f"}[type(value)]: value})

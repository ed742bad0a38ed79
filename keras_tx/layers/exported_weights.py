"""Kernels and biases of projections as an export has them: joined, in a lower precision, or constants. TensorFlow.

R rows, D inputs, F outputs, V tokens. An export can have weights of its own, so its kernels can be bfloat16 or int8
without a change of the model: the products alone then have that precision, and everything else (norms, softmax, sums,
activations) stays as it was. TensorFlow's fused product (oneDNN) lays out a kernel in memory for the processor. If the
kernel is a variable, each call does this again, unless the process has TF_ONEDNN_ASSUME_FROZEN_WEIGHTS=1; of a constant
it keeps the result. A product without a bias does not keep it, so each gets one.

In float32 the layout depends on whether the first call has few rows: later calls with a layout for the other kind lay
it out again each time, which takes longer than without the setting. So a product in encoders, prefill and decode steps
never has both kinds of calls. The same holds for few rows and hundreds of them: see `by_number_of_rows`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_tx.internals.tensorflow_graphs import numbered_constant, untraced_variable
from keras_tx.layers import activations, integer_products
from keras_tx.layers.integer_products import LEVELS
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")

PRECISIONS = ("float32", "bfloat16", "int8")
LARGEST = 2**31 - 2**24  # bytes of all constants of a graph: a serialized graph holds less than 2 GiB
# With fewer rows than this, oneDNN may take a layout for few rows, depending on the processor. With at most as many as
# the second number, it does so on every processor that was tried.
FEW_ROWS = 8
FEWEST_ROWS = 4
MOST_ARRANGED_ROWS = 64  # a float32 kernel that was arranged for 8 to so many rows is fast for all of these numbers
_SMALL = 1024  # bytes of a constant that always has its values
_TINY = np.finfo(np.float32).tiny
_current: ContextVar["ExportedWeights | None"] = ContextVar("keras_tx_exported_weights", default=None)


class TooLarge(Exception):
    """The constants of a graph are over the limit."""


@dataclass
class ExportedWeights:
    """The precision of products, and the weights that were made so far.

    Attributes:
        precision: one of `PRECISIONS`.
        are_constants: whether weights are constants of the graph; otherwise they are variables.
        limit: the most bytes of all constants.
        values: arrays that the graph has only as numbered constants without values; None: it has the values.
        made: {key of layers: what `once` made}.
        size: bytes of all constants that were made.
        are_fused: whether TensorFlow may fuse a product with its bias, and so keep its kernel as it arranged it.
    """

    precision: str
    are_constants: bool
    limit: int
    values: list[np.ndarray] | None = None
    made: dict[Any, Any] = field(default_factory=dict)
    size: int = 0
    are_fused: bool = True

    @property
    def are_of_layers(self) -> bool:
        """Whether products have the variables of the layers themselves."""
        return self.precision == "float32" and not self.are_constants

    def once(self, layers: Sequence[Any], make: Callable[[], Any]) -> Any:
        """What `make` returned for these layers: for constants in the graph that is being traced, else in any graph."""
        key = (tf.compat.v1.get_default_graph() if self.are_constants else None, *map(id, layers))
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def weight(self, value: np.ndarray) -> Any:
        """A variable, or a constant of the graph that is being traced.

        Raises:
            TooLarge: together with all others, it is over the limit.
        """
        if not self.are_constants:
            return untraced_variable(value)
        self.size += value.nbytes
        if self.size > self.limit:
            raise TooLarge
        if self.values is not None and value.nbytes >= _SMALL:
            self.values.append(value)
            return numbered_constant(value, len(self.values) - 1)
        return tf.constant(value)


@contextmanager
def exported_weights(
    precision: str = "float32", *, constants: bool = True, limit: int | None = None, with_values: bool = True
) -> Iterator[ExportedWeights]:
    """Within this context, a graph that is traced gets its own weights for the projections of this package.

    Args:
        precision: one of `PRECISIONS`.
        constants: whether they are constants of the graph; otherwise they are variables.
        limit: the most bytes of all constants; None: what a serialized graph may hold.
        with_values: whether constants have values. Otherwise large ones have none: see `ExportedWeights.values`.
    """
    values: list[np.ndarray] | None = None if with_values else []
    made = ExportedWeights(precision, constants, LARGEST if limit is None else limit, values)
    token = _current.set(made)
    try:
        yield made
    finally:
        _current.reset(token)


@contextmanager
def only_variables() -> Iterator[None]:
    """Within this context, the innermost `exported_weights` makes variables, and no constants."""
    weights = _current.get()
    if weights is None or not weights.are_constants:
        yield
        return
    weights.are_constants = False
    try:
        yield
    finally:
        weights.are_constants = True


def current(layers: Sequence[Any] = ()) -> ExportedWeights | None:
    """The innermost `exported_weights`, while a graph of TensorFlow is traced.

    None where `layers` compute as they do otherwise, such as those of a draft model in half precision.
    """
    weights = _current.get()
    # `tf.inside_function` is True also within `tf.init_scope`, where nothing is traced.
    if weights is None or keras.backend.backend() != "tensorflow" or tf.executing_eagerly():
        return None
    is_half = weights.are_of_layers and any(layer.compute_dtype != "float32" for layer in layers)
    return None if is_half else weights


def by_number_of_rows(count: Tensor, run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `run` returns, in a graph that has its products twice if kernels are variables: for few rows and for many.

    Those for many rows do not keep kernels as they arranged them, so that the kept ones are always those for few rows,
    whichever request comes first.

    Args:
        count: the number of rows of most products in `run`, a scalar.
        run: makes tensors of a graph with products.
    """
    weights = current()
    if weights is None or not weights.are_of_layers:
        return run()

    def run_apart() -> list[Tensor]:
        weights.are_fused = False
        try:
            return run()
        finally:
            weights.are_fused = True

    # Within the graph of the few rows, its operations would take 2 % of the time of a short text, though none runs.
    of_many = tf.function(run_apart, autograph=False, experimental_attributes={"_noinline": True})
    found: list[Tensor] = tf.cond(count <= MOST_ARRANGED_ROWS, run, of_many)
    return found


def dense(weights: ExportedWeights, layers: Sequence[Any], inputs: Tensor, num_axes: int = 1) -> list[Tensor]:
    """The outputs of dense `layers` with the same inputs, from one product if an export has weights of its own.

    Args:
        weights: the context.
        layers: dense layers with a `kernel` (*summed, *made), a `bias` (*made) or None, and an `activation` or None.
            With several layers, none has an activation.
        inputs: (..., *summed).
        num_axes: the number of axes in `summed`.

    Returns:
        (..., *made) of each layer.
    """
    if weights.are_of_layers:
        found = [_variables_of(weights, layer, num_axes) for layer in layers]
    else:
        found = [weights.once(layers, lambda: _weights_of(weights, layers, num_axes))]
    shapes = [shape for *_, made in found for shape in made]

    def products(rows: Tensor, is_few: bool) -> list[Tensor]:
        if weights.are_fused:
            product = _float32_product_of_few if is_few else _PRODUCTS[weights.precision]
        else:
            product = _float32_product_apart
        made = [product(rows, kernel, bias) for kernel, bias, _ in found]
        activation = layers[0].activation
        made = made if activation is None else [activations.apply(activation, x) for x in made]
        return [tf.cast(x, inputs.dtype) for x in made]

    parts = _by_rows(weights, inputs, num_axes, FEWEST_ROWS, products)
    if len(parts) < len(layers):
        parts = tf.split(parts[0], [math.prod(shape) for shape in shapes], axis=1)
    free = _free_axes(inputs, num_axes)
    return [tf.reshape(part, (*free, *shape)) for part, shape in zip(parts, shapes, strict=True)]


def logits(weights: ExportedWeights, layer: Any, inputs: Tensor) -> Tensor:
    """Hidden states (..., D) times the token embeddings (V, D) of an embedding `layer` -> (..., V)."""
    table, bias = weights.once([layer], lambda: _table_of(weights, layer))
    table = tf.convert_to_tensor(layer.embeddings) if weights.are_of_layers else table

    def products(rows: Tensor, is_few: bool) -> list[Tensor]:
        if weights.precision == "int8":
            made = _int8_product(rows, table, bias)
        else:
            made = tf.matmul(tf.cast(rows, table.dtype), table, transpose_b=True)
            if weights.are_fused:
                made = made + bias if is_few else tf.nn.bias_add(made, bias)
        return [tf.cast(made, inputs.dtype)]

    # Without oneDNN, 2 to 4 rows times a transposed kernel take three times as long as 8.
    return tf.reshape(_by_rows(weights, inputs, 1, 1, products)[0], (*_free_axes(inputs, 1), layer.input_dim))


def _free_axes(inputs: Tensor, num_axes: int) -> Sequence[Any]:
    """The sizes of all axes but the last `num_axes`, for a reshape, which infers a single unknown one."""
    free = [-1 if n is None else n for n in inputs.shape[: len(inputs.shape) - num_axes]]
    return tf.unstack(tf.shape(inputs)[: len(free)], len(free)) if free.count(-1) > 1 else free


def _by_rows(
    weights: ExportedWeights,
    inputs: Tensor,
    num_axes: int,
    few: int,
    products: Callable[[Tensor, bool], list[Tensor]],
) -> list[Tensor]:
    """`products` of the rows (R, D) of `inputs` (..., *summed), so that few rows do not decide how others are read.

    Args:
        weights: the context.
        inputs: (..., *summed).
        num_axes: the number of axes in `summed`.
        few: the largest number of rows that count as few in float32.
        products: from rows and whether they are few to the products.
    """
    size = inputs.shape[-num_axes:].num_elements()
    rows = tf.reshape(inputs, (-1, size))

    def of_enough() -> list[Tensor]:
        count = tf.shape(rows)[0]
        return [x[:count] for x in products(_with_rows_of_zeros(rows, count), False)]

    of_tokens = 1 if len(inputs.shape) == num_axes + 1 else inputs.shape[1]  # rows for each example of the batch
    if weights.are_fused and of_tokens is not None and of_tokens <= FEW_ROWS:
        if weights.are_constants:
            return of_enough()
        if weights.precision == "float32":  # the layout for few rows is faster where it is made anew in each call
            made: list[Tensor] = tf.cond(tf.shape(rows)[0] <= few, lambda: products(rows, True), of_enough)
            return made
    return products(rows, False)


def _with_rows_of_zeros(rows: Tensor, count: Tensor) -> Tensor:
    return tf.pad(rows, [[0, tf.maximum(FEW_ROWS - count, 0)], [0, 0]])


def _variables_of(weights: ExportedWeights, layer: Any, num_axes: int) -> tuple[Tensor, Tensor, list[Any]]:
    """The kernel (D, F) and the bias (F,) of a layer, and the shape `made`, in a list."""
    kernel = tf.convert_to_tensor(layer.kernel)
    made = tuple(kernel.shape[num_axes:])
    kernel = tf.reshape(kernel, (math.prod(kernel.shape[:num_axes]), math.prod(made)))
    if layer.bias is None:
        bias = weights.once([layer], lambda: weights.weight(np.zeros(math.prod(made), "float32")))
    else:
        bias = tf.reshape(tf.convert_to_tensor(layer.bias), (-1,))
    return kernel, bias, [made]


def _weights_of(weights: ExportedWeights, layers: Sequence[Any], num_axes: int) -> tuple[Any, Any, list[Any]]:
    """The kernel (D, F) and the bias (F,) of all layers together, and the shapes `made`."""
    kernels, biases, shapes = [], [], []
    with tf.init_scope():
        for layer in layers:
            kernel = np.asarray(keras.ops.convert_to_numpy(layer.kernel), np.float32)
            shapes.append(kernel.shape[num_axes:])
            made = math.prod(shapes[-1])
            kernels.append(kernel.reshape(math.prod(kernel.shape[:num_axes]), made))
            bias = np.zeros(made) if layer.bias is None else keras.ops.convert_to_numpy(layer.bias)
            biases.append(np.asarray(bias, np.float32).reshape(-1))
    kernel, bias = (np.concatenate(one, axis=-1) for one in (kernels, biases))
    bias = _kept(weights, bias)
    return _WEIGHTS[weights.precision](weights, kernel, bias), weights.weight(bias), shapes


def _table_of(weights: ExportedWeights, layer: Any) -> tuple[Any, Any]:
    """The token embeddings (V, D) of a layer, in int8 as a kernel, and a bias of zeros (V,).

    The embeddings are None if the layer's variable is used.
    """
    bias = _kept(weights, np.zeros(layer.input_dim, np.float32))
    if weights.are_of_layers:
        return None, weights.weight(bias)
    with tf.init_scope():
        table = np.asarray(keras.ops.convert_to_numpy(layer.embeddings), np.float32)
    if weights.precision == "int8":
        return _int8_kernel(weights, table.T, bias), weights.weight(bias)
    dtype = weights.precision
    return tuple(weights.weight(one.astype(tf.as_dtype(dtype).as_numpy_dtype)) for one in (table, bias))


def _kept(weights: ExportedWeights, bias: np.ndarray) -> np.ndarray:
    """A bias that TensorFlow does not remove, as it does with a constant of zeros."""
    if weights.are_constants and not bias.any():
        bias[0] = _TINY
    return bias


def _float32_kernel(weights: ExportedWeights, kernel: np.ndarray, bias: np.ndarray) -> Any:
    return weights.weight(kernel)


def _float32_product(rows: Tensor, kernel: Any, bias: Any) -> Tensor:
    return tf.nn.bias_add(tf.matmul(tf.cast(rows, "float32"), kernel), bias)


def _float32_product_of_few(rows: Tensor, kernel: Any, bias: Any) -> Tensor:
    # With oneDNN, TensorFlow fuses this sum as it does `bias_add`. Without, it does not, and a product that is not
    # fused is faster for a single row: 1.4 times here, and seven times with a transposed kernel.
    return tf.matmul(tf.cast(rows, "float32"), kernel) + bias


def _float32_product_apart(rows: Tensor, kernel: Any, bias: Any) -> Tensor:
    # TensorFlow does not fuse a product with a sum behind a reshape.
    product = tf.reshape(tf.matmul(tf.cast(rows, "float32"), kernel), (-1, 1, kernel.shape[1]))
    return tf.reshape(product + bias, (-1, kernel.shape[1]))


def _bfloat16_kernel(weights: ExportedWeights, kernel: np.ndarray, bias: np.ndarray) -> tuple[Any, Any]:
    dtype = tf.bfloat16.as_numpy_dtype
    return weights.weight(kernel.astype(dtype)), weights.weight(bias.astype(dtype))


def _bfloat16_product(rows: Tensor, kernels: tuple[Any, Any], bias: Any) -> Tensor:
    kernel, bias = kernels
    return tf.nn.bias_add(tf.matmul(_in_bfloat16(rows), kernel), bias)


def _in_bfloat16(rows: Tensor) -> Tensor:
    """Rows (R, D) in bfloat16: where they were cast from it, as the output of another product, that itself."""
    source = rows.op
    while source.type == "Reshape":
        source = source.inputs[0].op
    if source.type == "Cast" and source.inputs[0].dtype == tf.bfloat16:
        return tf.reshape(source.inputs[0], (-1, rows.shape[1]))
    return tf.cast(rows, "bfloat16")


def _int8_kernel(weights: ExportedWeights, kernel: np.ndarray, bias: np.ndarray) -> tuple[Any, Any]:
    """Integers (D, F), and for each output 1 / 127 of the number for which its largest integer stands (F,)."""
    limits = np.maximum(np.abs(kernel).max(axis=0), _TINY * 2**20)
    integers = np.round(kernel / limits * LEVELS).astype(np.int8)
    return weights.weight(integers), weights.weight((limits / LEVELS).astype(np.float32))


def _int8_product(rows: Tensor, kernels: tuple[Any, Any], bias: Any) -> Tensor:
    """Rounds each row to integers, and multiplies integers exactly.

    Per-channel scales of kernels: Krishnamoorthi 2018, arXiv:1806.08342; a scale for each row of inputs, computed while
    the model runs: Dettmers et al. 2022, arXiv:2208.07339.
    """
    kernel, limits = kernels
    rows = tf.cast(rows, "float32")
    limit = tf.maximum(tf.reduce_max(tf.abs(rows), axis=1, keepdims=True), _TINY * 2**10)
    integers = tf.cast(tf.round(rows * (LEVELS / limit)), "int8")
    return tf.nn.bias_add(integer_products.multiply(integers, kernel, limits) * limit, bias)


_WEIGHTS: dict[str, Callable[..., Any]] = {
    "float32": _float32_kernel,
    "bfloat16": _bfloat16_kernel,
    "int8": _int8_kernel,
}
_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "float32": _float32_product,
    "bfloat16": _bfloat16_product,
    "int8": _int8_product,
}

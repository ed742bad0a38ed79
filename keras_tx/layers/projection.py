"""Dense projections: (..., D) -> (..., F), or of and to several axes; one matrix product each.

Keras' own `EinsumDense` becomes on TensorFlow a product for each row of the batch, whose gradient is as large as batch
times kernel; and a kernel of three axes halves the speed of a decoding step under XLA.
"""

import math

import keras
from keras import ops

from keras_tx.layers import activations, xla
from keras_tx.layers.configs import take_own_policy
from keras_tx.optional import Lazy

tf = Lazy("tensorflow")

_PARTS = 8
_FEW_ROWS = 8
_MANY_NUMBERS = 2**16


def project(inputs, kernel, num_axes=1, bias=None, activation=None):
    """`inputs` (..., *summed) times `kernel` (*summed, *made) -> (..., *made), with `num_axes` axes summed.

    `bias` (*made) and `activation` follow the product at once: so TensorFlow makes one operation of the three.
    """
    made, size = tuple(kernel.shape[num_axes:]), math.prod(kernel.shape[:num_axes])
    rows = ops.reshape(inputs, (-1, size))
    products = _times(rows, ops.reshape(kernel, (size, math.prod(made))))
    if bias is not None:
        products = _plus(products, ops.reshape(bias, (-1,)))
    if activation is not None:
        products = activations.apply(activation, products)
    free = tuple(inputs.shape[: len(inputs.shape) - num_axes])
    # A single unknown size follows from the others; asking for it would be three operations more in each step.
    free = tuple(-1 if n is None else n for n in free) if free.count(None) == 1 else ops.shape(inputs)[: len(free)]
    return ops.reshape(products, (*free, *made))


def _times(rows, kernel):
    size, made = kernel.shape
    few = rows.shape[0] is not None and rows.shape[0] <= _FEW_ROWS and size % _PARTS == 0
    if few and size * made >= _MANY_NUMBERS and rows.dtype == "float32" and xla.is_traced():
        # Few rows are bound by reading the kernel, and XLA on a CPU reads several parts of it faster than the whole.
        parts = ops.swapaxes(ops.reshape(rows, (-1, _PARTS, size // _PARTS)), 0, 1)
        parts = ops.matmul(parts, ops.reshape(kernel, (_PARTS, size // _PARTS, made)))
        return ops.sum(parts, axis=0)
    return ops.matmul(rows, kernel)


def _plus(rows, bias):
    # Of a plain sum the gradient would look for the axes to sum at every step.
    return tf.nn.bias_add(rows, bias) if keras.backend.backend() == "tensorflow" else rows + bias


def _dense(layer, inputs, num_axes=1):
    kernel, bias = (None if x is None else ops.cast(x, inputs.dtype) for x in (layer.kernel, layer.bias))
    return project(inputs, kernel, num_axes, bias, layer.activation)


class _Quantizable(keras.layers.Layer):
    """Lets `quantize` of the Keras layer beneath, whose weights these are, take this class: Keras refuses subclasses.

    Once quantized the layer runs Keras' own call.
    """

    def build(self, input_shape=None):
        take_own_policy(self)
        super().build(input_shape)

    def quantize(self, mode=None, type_check=True, config=None):
        if mode != "int8":
            return super().quantize(mode, type_check=type_check, config=config)
        if config is not None and config.get_config() != type(config)().get_config():
            raise ValueError(
                "`config` must be the default one, as a saved model keeps no quantizers. Received: "
                f"config={config.get_config()}"
            )
        return super().quantize(mode, type_check=False, config=config)


class HeadProjection(_Quantizable, keras.layers.EinsumDense):
    """`EinsumDense` whose equation sums the last axes of its input, as attention's projections do."""

    def call(self, inputs, training=None):
        summed = set.intersection(*[set(part) for part in self.equation.split("->")[0].split(",")])
        return _dense(self, inputs, len(summed))


class Projection(_Quantizable, keras.layers.Dense):
    """`Dense` by `project`."""

    def call(self, inputs, training=None):
        return _dense(self, inputs)


class TiedEmbedding(_Quantizable, keras.layers.ReversibleEmbedding):
    """`ReversibleEmbedding` that under XLA multiplies by its table as it lies."""

    def call(self, inputs, reverse=False):
        if not (reverse and xla.is_traced()):
            return super().call(inputs, reverse=reverse)
        # Keras writes a transposition of the table, also for an einsum of two axes. With a single row, XLA on a CPU
        # fuses that and the product into a loop over single numbers. The axis X, of size 1, prevents it.
        rows = ops.reshape(inputs, (1, -1, self.output_dim))
        logits = ops.einsum("XRD,XVD->XRV", rows, ops.cast(self.embeddings, rows.dtype)[None])
        return ops.reshape(logits, (*ops.shape(inputs)[:-1], self.input_dim))

"""Dense projections (..., D) -> (..., F), also from and to several axes, each as one matrix product.

On TensorFlow, Keras' own `EinsumDense` computes one product for each example of the batch, whose gradient needs a copy
of the kernel for each example; and under XLA a kernel with three axes halves the speed of a decode step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, quantizers

from keras_tx.internals.keras_lora import without_lora
from keras_tx.internals.keras_models import embeddings_of
from keras_tx.layers import activations, exported_weights, xla
from keras_tx.layers.gradients import twice_differentiable
from keras_tx.layers.ids import take_rows
from keras_tx.layers.loops import product
from keras_tx.layers.lora import LowRankOfHeads
from keras_tx.layers.quantization import Quantizable, to_float32
from keras_tx.layers.splitting import Split
from keras_tx.optional import Lazy
from keras_tx.types import Tensor

tf = Lazy("tensorflow")
torch = Lazy("torch")

_PARTS = 8  # into which a kernel is split for a single row
_LARGE_KERNEL = 2**16  # elements


def project(
    inputs: Tensor,
    kernel: Tensor,
    num_axes: int = 1,
    bias: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    training: bool | None = None,
) -> Tensor:
    """`inputs` (..., *summed) times `kernel` (*summed, *made) -> (..., *made), contracted over `num_axes` axes.

    `bias` (*made) and `activation` directly follow the product, so that TensorFlow fuses the three operations.
    """
    if keras.backend.backend() == "torch":
        return _on_torch(inputs, kernel, num_axes, bias, activation)
    made, size = tuple(kernel.shape[num_axes:]), math.prod(kernel.shape[:num_axes])
    rows = ops.reshape(inputs, (-1, size))
    kernel = kernel if (num_axes, len(made)) == (1, 1) else ops.reshape(kernel, (size, math.prod(made)))
    products = _times(rows, kernel)
    if bias is not None:
        products = _plus(products, bias if len(bias.shape) == 1 else ops.reshape(bias, (-1,)))
    if activation is not None:
        products = activations.apply(activation, products, training)
    free = tuple(inputs.shape[: len(inputs.shape) - num_axes])
    if free.count(None) > 1:  # on TensorFlow
        return tf.reshape(products, tf.concat([tf.shape(inputs)[: len(free)], made], axis=0))
    # Reshape infers a single unknown size; to ask for it would take three more operations in each decode step.
    return ops.reshape(products, (*[-1 if n is None else n for n in free], *made))


def _on_torch(
    inputs: Any, kernel: Any, num_axes: int, bias: Any, activation: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """`project` by PyTorch's own functions: calling Keras' ten takes longer than a GPU takes to compute them."""
    made, free = kernel.shape[num_axes:], inputs.shape[: inputs.ndim - num_axes]
    size = math.prod(kernel.shape[:num_axes])
    rows, kernel = inputs.reshape(-1, size), kernel.reshape(size, math.prod(made))
    products = rows @ kernel if bias is None else torch.addmm(bias.reshape(-1), rows, kernel)
    return (products if activation is None else activation(products)).reshape(*free, *made)


def _times(rows: Tensor, kernel: Tensor) -> Tensor:
    size, made = kernel.shape
    is_single = rows.shape[0] == 1 and size % _PARTS == 0
    if is_single and size * made >= _LARGE_KERNEL and rows.dtype == "float32" and xla.is_traced():
        # A single row mostly waits for its kernel, and XLA on a CPU reads several parts of it faster.
        parts = ops.swapaxes(ops.reshape(rows, (-1, _PARTS, size // _PARTS)), 0, 1)
        parts = ops.matmul(parts, ops.reshape(kernel, (_PARTS, size // _PARTS, made)))
        return ops.sum(parts, axis=0)
    return product(rows, kernel)


def _plus(rows: Tensor, bias: Tensor) -> Tensor:
    # The gradient of a plain sum would have to find the axes to sum over in every step.
    return tf.nn.bias_add(rows, bias) if keras.backend.backend() == "tensorflow" else rows + bias


def _dense(layer: Any, inputs: Tensor, training: bool | None, num_axes: int = 1) -> Tensor:
    weights = exported_weights.current([layer])
    if weights is not None:
        return exported_weights.dense(weights, [layer], inputs, num_axes)[0]
    kernel, bias = (None if x is None else ops.cast(x, inputs.dtype) for x in (layer.kernel, layer.bias))
    return project(inputs, kernel, num_axes, bias, layer.activation, training)


def project_together(layers: Sequence[Any], inputs: Tensor) -> list[Tensor] | None:
    """The outputs of `HeadProjection`s (..., D) -> (..., *made) without activations, computed together in an export.

    None where no graph is exported: to join their variables in each call would cost more.
    """
    weights = exported_weights.current(layers)
    if weights is None or any(layer.quantization_mode for layer in layers):
        return None
    return exported_weights.dense(weights, layers, inputs)


class HeadProjection(LowRankOfHeads, Quantizable, keras.layers.EinsumDense):
    """`EinsumDense` that contracts the last axes of its input, as the projections of attention do."""

    def build(self, input_shape: Any = None) -> None:
        super().build(input_shape)
        summed = range(-self.num_inputs, 0)  # another size would only fail in a reshape
        self.input_spec = keras.layers.InputSpec(ndim=len(input_shape), axes={i: input_shape[i] for i in summed})

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        return _dense(self, inputs, training, self.num_inputs)

    @property
    def num_inputs(self) -> int:
        """The number of axes of the kernel that are inputs."""
        return len(set.intersection(*[set(part) for part in self.equation.split("->")[0].split(",")]))

    def _num_inputs(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape[: self.num_inputs])


class Projection(Quantizable, keras.layers.Dense):
    """`Dense` that computes with `project`."""

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        return _dense(self, inputs, training)


class VocabularyProjection(Projection):
    """A `Projection` to logits over a vocabulary, which model parallelism splits."""

    split = Split("vocabulary_size", 1, other=0)


# In .keras files, the paths of weights contain the name of the class: it stays that of earlier versions.
VocabularyProjection.__name__ = Projection.__name__


class TiedEmbedding(Quantizable, keras.layers.ReversibleEmbedding):
    """`ReversibleEmbedding` with the gradient of `take_rows`, and logits without a transposed copy of its table.

    The logits have the compute dtype, as those of a dense layer, also under mixed precision, where Keras' are float32.
    """

    split = Split("vocabulary_size", 0, other=1)

    def call(self, inputs: Tensor, reverse: bool = False) -> Tensor:
        if not reverse:
            return ops.cast(take_rows(self.embeddings, inputs), self.compute_dtype)
        inputs = ops.cast(inputs, self.compute_dtype)
        weights = exported_weights.current([self])
        if weights is not None:
            return exported_weights.logits(weights, self, inputs)
        rows, table = ops.reshape(inputs, (-1, self.output_dim)), ops.cast(self.embeddings, self.compute_dtype)
        if xla.is_traced():
            # Keras transposes the table, also for an einsum of two axes. With a single row, XLA on a CPU fuses that and
            # the product into a slow loop over single elements. The axis X, of size 1, prevents it.
            logits = ops.einsum("XRD,XVD->XRV", rows[None], table[None])
        else:
            logits = product(rows, table, transpose_b=True)
        return ops.reshape(logits, (*ops.shape(inputs)[:-1], self.input_dim))

    def quantized_call(self, inputs: Tensor, reverse: bool = False) -> Tensor:
        if reverse:
            inputs = ops.cast(inputs, self.compute_dtype)
            logits = ops.cast(self._quantized_logits(inputs), self.compute_dtype)
            if not self.lora_enabled:
                return logits
            first, second = (ops.cast(one, inputs.dtype) for one in self.lora_matrices())
            added = ops.matmul(ops.matmul(inputs, ops.transpose(second)), ops.transpose(first))
            return logits + (self.lora_alpha / self.lora_rank) * ops.cast(added, logits.dtype)
        if self.quantization_mode != "int4" or self.lora_enabled:
            return super().quantized_call(inputs)
        # Keras would unpack the whole table. This unpacks the rows of these ids.
        ids = ops.reshape(ops.cast(inputs, "int32"), (-1,))
        rows = quantizers.unpack_int4(ops.take(embeddings_of(self), ids, axis=0), self.output_dim, axis=-1)
        scale = ops.take(self.embeddings_scale, ids, axis=0)
        rows = ops.cast(rows, scale.dtype)
        if len(scale.shape) == 1:
            rows = rows / scale[:, None]
        else:
            blocks = ops.cast(self.g_idx, "int32")
            zero = ops.cast(ops.take(self.embeddings_zero, ids, axis=0), rows.dtype)
            rows = (rows - ops.take(zero, blocks, axis=1)) * ops.take(scale, blocks, axis=1)
        return ops.reshape(ops.cast(rows, self.compute_dtype), (*ops.shape(inputs), self.output_dim))

    def _quantized_logits(self, inputs: Tensor) -> Tensor:
        """The logits of the integers, without LoRA.

        Int8 rounds the inputs, too. That has no gradient, and as in Keras' dense layers that of the product stands for
        it.
        """
        if self.quantization_mode != "int8":
            with without_lora():
                return super().quantized_call(inputs, reverse=True)

        def product(constants: list[Tensor], x: Tensor) -> Any:
            table, scale = constants

            def gradient(upstream: Any) -> tuple[Any]:
                weights = ops.divide(ops.cast(table, self.compute_dtype), ops.expand_dims(scale, axis=-1))
                slope = ops.matmul(upstream, weights)
                return (ops.cast(slope, x.dtype),)

            integers, factor = self.inputs_quantizer(x)
            sums = ops.cast(ops.matmul(integers, ops.transpose(table)), self.compute_dtype)
            return ops.divide(sums, ops.multiply(factor, scale)), gradient

        return twice_differentiable(product, [ops.convert_to_tensor(x) for x in self._integers()[:2]])(inputs)

    def _as_matrix(self, kernel: Any) -> np.ndarray:
        return to_float32(kernel).T

    def _integers(self) -> tuple[Any, Any, Any]:
        return embeddings_of(self), self.embeddings_scale, getattr(self, "embeddings_zero", None)

    def _unpacked(self) -> np.ndarray:
        table = embeddings_of(self)
        return to_float32(
            quantizers.unpack_int4(table, self.output_dim, axis=-1) if self.quantization_mode == "int4" else table
        ).T

    def _scales(self, variable: Any) -> np.ndarray:
        return to_float32(variable).T  # (V,) stays so, and broadcasts

    def _stored(self, integers: Any, scale: Any, zero: Any) -> tuple[Any, Any, Any]:
        integers, scale = ops.transpose(integers), ops.reshape(ops.transpose(scale), self.embeddings_scale.shape)
        if self.quantization_mode == "int4":
            integers = quantizers.pack_int4(integers, axis=-1)[0]
        return integers, scale, None if zero is None else ops.transpose(zero)

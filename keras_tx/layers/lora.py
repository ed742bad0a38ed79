"""Low-rank adaptation (LoRA): a kernel W (D, F) becomes W + alpha / r * A B, with A (D, r) and B (r, F).

D inputs, F outputs, r rank, N heads, H head. Hu et al. 2021, arXiv:2106.09685, section 4.1.
"""

from typing import Any

import keras
from keras import initializers, ops

from keras_tx import checks
from keras_tx.internals.keras_lora import LoraHooks, without_lora
from keras_tx.internals.keras_models import kernel_of, kernel_or_table_of
from keras_tx.internals.keras_torch import clear_all_gradients
from keras_tx.types import Tensor


class LowRank(LoraHooks):
    """LoRA as Keras' layers have it, but also after weights are loaded.

    Loading sets A B to zero, since a file has it in the kernel. Keras makes both of them zero, so that the gradients of
    both are zero for ever. Here A is drawn anew.
    """

    def enable_lora(
        self,
        rank: int,
        lora_alpha: float | None = None,
        a_initializer: Any = "he_uniform",
        b_initializer: Any = "zeros",
    ) -> None:
        """Freezes the kernel or table, and adds the product of two small matrices, which learn in its place.

        Args:
            rank: r, the number of columns of A.
            lora_alpha: the product is multiplied by `lora_alpha / rank`. None: `rank`.
            a_initializer: initializer of A.
            b_initializer: initializer of B.

        Raises:
            ValueError: `rank` is not a positive integer, the layer is not built, has LoRA already, or has a constraint.
        """
        clear_all_gradients()
        self._lora_initializer = initializers.get(a_initializer)
        super().enable_lora(checks.positive_int("rank", rank), lora_alpha, self._lora_initializer, b_initializer)

    @property
    def trainable(self) -> bool:
        """Whether the layer is trainable. With LoRA, the kernel or table stays frozen also if it is."""
        return bool(super().trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        keras.layers.Layer.trainable.fset(self, value)
        if self.lora_enabled:
            kernel_or_table_of(self).trainable = False

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        if self.lora_enabled and self.built:
            first = self.lora_matrices()[0]
            first.assign(self._lora_initializer(first.shape, dtype=first.dtype))

    def lora_matrices(self) -> tuple[Any, Any]:
        """The variables A and B."""
        name = "lora_embeddings" if hasattr(self, "lora_embeddings_a") else "lora_kernel"
        return getattr(self, f"{name}_a"), getattr(self, f"{name}_b")

    def lora_update(self) -> Tensor:
        """What LoRA adds to the kernel or table, of its shape."""
        first, second = self.lora_matrices()
        return (self.lora_alpha / self.lora_rank) * self._lora_product(first, second)

    def _lora_product(self, first: Any, second: Any) -> Tensor:
        return ops.matmul(first, second)


class LowRankOfHeads(LowRank):
    """LoRA of a kernel (D, N, H) as of a matrix (D, N * H), as in the paper: A (D, r) and B (r, N, H).

    Keras has A (D, N, r) and B (r, H). All heads share B there, so that most changes of rank r of the whole matrix are
    out of reach. A layer with an activation, such as that of gates, has Keras' form.
    """

    @property
    def num_inputs(self) -> int:
        """The number of axes of the kernel that are inputs."""
        raise NotImplementedError

    def add_weight(self, *args: Any, shape: Any = None, name: str | None = None, **kwargs: Any) -> Any:
        if name == "lora_kernel_a" and self._is_whole_matrix():
            shape = (*shape[: self.num_inputs], shape[-1])
        elif name == "lora_kernel_b" and self._is_whole_matrix():
            shape = (shape[0], *self._shape_of_kernel()[self.num_inputs :])
        return super().add_weight(*args, shape=shape, name=name, **kwargs)

    def quantized_call(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (self.lora_enabled and self._is_whole_matrix()):
            return super().quantized_call(inputs, *args, **kwargs)
        with without_lora():
            outputs = super().quantized_call(inputs, *args, **kwargs)
        first, second = (ops.cast(one, inputs.dtype) for one in self.lora_matrices())
        added = ops.tensordot(ops.tensordot(inputs, first, self.num_inputs), second, 1)
        return outputs + (self.lora_alpha / self.lora_rank) * ops.cast(added, outputs.dtype)

    @property
    def kernel(self) -> Any:
        """The kernel (D, N, H) with LoRA; of a quantized layer the integers alone."""
        if not (self.lora_enabled and self._is_whole_matrix()):
            return super().kernel
        with without_lora():
            kernel = super().kernel
        if self.quantization_mode is not None:
            return kernel
        return ops.cast(ops.add(kernel, self.lora_update()), self.compute_dtype)

    def _lora_product(self, first: Any, second: Any) -> Tensor:
        return ops.tensordot(first, second, 1) if self._is_whole_matrix() else super()._lora_product(first, second)

    def _is_whole_matrix(self) -> bool:
        return self.activation is keras.activations.linear

    def _shape_of_kernel(self) -> Any:
        return self.original_kernel_shape if self.quantization_mode == "int4" else kernel_of(self).shape

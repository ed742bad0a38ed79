"""The private parts of Keras' LoRA: what a layer with LoRA saves, and calls that leave LoRA out."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

_is_left_out: ContextVar[bool] = ContextVar("_is_left_out", default=False)


class LoraHooks(keras.layers.Layer):
    """A subclass of `Dense`, `EinsumDense` or `Embedding` that says what Keras saves of it if it has LoRA.

    Keras would round the sum to the compute dtype, and add LoRA to integers in a way of its own.
    """

    _has_lora = False

    @property
    def lora_enabled(self) -> bool:
        """Whether LoRA is enabled; False for Keras' own code within `without_lora`."""
        return self._has_lora and not _is_left_out.get()

    @lora_enabled.setter
    def lora_enabled(self, value: bool) -> None:
        self._has_lora = value

    def merged_with_lora(self) -> tuple[Any, Any, Any]:
        """The kernel or table with LoRA. If it is quantized, scales, and in blocks zero points, come with it."""
        raise NotImplementedError

    def _get_kernel_with_merged_lora(self) -> Any:
        if self.lora_enabled:
            return self.merged_with_lora()
        return super()._get_kernel_with_merged_lora()

    def _get_embeddings_with_merged_lora(self) -> Any:
        if self.lora_enabled:
            return self.merged_with_lora()
        return super()._get_embeddings_with_merged_lora()


@contextmanager
def without_lora() -> Iterator[None]:
    """Within this context, Keras' code computes with the weights of `LoraHooks` alone, without LoRA."""
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)

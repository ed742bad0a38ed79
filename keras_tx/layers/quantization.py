"""Layers whose kernel (D, F) `quantize` turns into integers of 8 or 4 bits, as in Keras' own layers.

Int8 stores a scale for each of the F outputs, and rounds the inputs too. Int4 rounds the kernel only, and stores two
weights in a byte; each block of inputs has a scale and a zero point for each output.
"""

from typing import Any

import keras
import numpy as np
from keras import ops, quantizers

from keras_tx.internals.keras_models import delete_variable, kernel_or_table_of
from keras_tx.layers.configs import take_own_policy
from keras_tx.layers.lora import LowRank
from keras_tx.layers.splitting import Splittable
from keras_tx.types import Shape

MODES = ("int8", "int4")
_LOWEST, _HIGHEST = -8, 7  # of 4 bits
_EPSILON = 1e-7  # of Keras: the scale of zeros


class Quantizable(LowRank, Splittable):
    """Allows `quantize`, which Keras rejects for subclasses of its layers. A quantized layer runs Keras' own `call`.

    Its kernel is saved with the product of LoRA, rounded as `quantize` rounds.

    A subclass also inherits from `keras.layers.Dense`, `EinsumDense` or `ReversibleEmbedding`.
    """

    quantization_config: Any

    def build(self, input_shape: Shape | None = None) -> None:
        take_own_policy(self)
        if self.quantization_mode == "int4" and self.quantization_config is None:
            # A file has the block size in the policy. Without a config, embeddings of Keras would round their inputs.
            self.quantization_config = keras.quantizers.Int4QuantizationConfig(
                block_size=getattr(self.dtype_policy, "block_size", None)
            )
        super().build(input_shape)

    def quantize(self, mode: str | None = None, type_check: bool = True, config: Any = None) -> None:
        """Makes the kernel integers.

        Raises:
            ValueError: `mode` is not "int8" or "int4", or `config` has custom quantizers.
        """
        if mode not in MODES:
            raise ValueError(
                f"`mode` must be one of {MODES} for the layers of keras_tx. Received: mode={mode!r} for the layer "
                f"{self.path!r}"
            )
        block_size = getattr(config, "block_size", None)
        options = {"block_size": block_size} if mode == "int4" else {}
        if config is not None and config.get_config() != type(config)(**options).get_config():
            raise ValueError(
                "`config` must have the default quantizers: saved models do not store others. Received: "
                f"config={config.get_config()}"
            )
        if mode == "int8" or block_size in (None, -1):  # one block
            super().quantize(mode, type_check=False, config=config)
            return
        kernel = self._as_matrix(kernel_or_table_of(self))
        super().quantize(mode, type_check=False, config=config)
        stored = self._stored(*blockwise_int4(kernel, int(block_size)))
        for variable, value in zip(self._integers(), stored, strict=True):
            variable.assign(value)

    def merged_with_lora(self) -> tuple[Any, Any, Any]:
        if self.quantization_mode is None:
            kernel = kernel_or_table_of(self)
            return ops.cast(ops.add(kernel, self.lora_update()), kernel.dtype), None, None
        stored, scale, zero = self._integers()
        update = self._as_matrix(self.lora_update())
        if not update.any():
            return stored, scale, zero
        integers, scales = self._unpacked(), self._scales(scale)
        if zero is None:
            weights = integers / scales + update
            limits = (_LOWEST, _HIGHEST) if self.quantization_mode == "int4" else (-127, 127)
            integers, scale = quantizers.abs_max_quantize(weights, axis=0, value_range=limits, to_numpy=True)
            return self._stored(integers, scale, None)
        block_size = int(self.quantization_config.block_size)
        block = np.arange(len(integers)) // block_size
        weights = (integers - self._scales(zero)[block]) * scales[block] + update
        return self._stored(*blockwise_int4(weights, block_size))

    # What follows is about a kernel; that of a table is in `TiedEmbedding`.

    def _as_matrix(self, kernel: Any) -> np.ndarray:
        """A kernel in float32 as (D, F)."""
        numbers = to_float32(kernel)
        return numbers.reshape(self._num_inputs(numbers.shape), -1)

    def _num_inputs(self, shape: tuple[int, ...]) -> int:
        """D of a kernel of this shape."""
        return shape[0]

    def _integers(self) -> tuple[Any, Any, Any]:
        """The variables with integers, scales, and zero points, which is None without blocks."""
        return kernel_or_table_of(self), self.kernel_scale, getattr(self, "kernel_zero", None)

    def _unpacked(self) -> np.ndarray:
        """The integers as float32 (D, F)."""
        kernel = kernel_or_table_of(self)
        if self.quantization_mode == "int4":
            return to_float32(quantizers.unpack_int4(kernel, self.kernel_scale.shape[-1], axis=-1))
        return self._as_matrix(kernel)

    def _scales(self, variable: Any) -> np.ndarray:
        """Scales or zero points as float32 (blocks, F), or (1, F)."""
        scales = to_float32(variable)
        return scales if getattr(self, "kernel_zero", None) is not None else scales.reshape(1, -1)

    def _stored(self, integers: Any, scale: Any, zero: Any) -> tuple[Any, Any, Any]:
        """Integers (D, F), scales and zero points (blocks, F) as the variables have them."""
        scale = ops.reshape(scale, self.kernel_scale.shape)
        if self.quantization_mode == "int4":
            return quantizers.pack_int4(ops.convert_to_tensor(integers), axis=-1)[0], scale, zero
        return ops.reshape(integers, kernel_or_table_of(self).shape), scale, zero

    def __delattr__(self, name: str) -> None:
        # For each variable Keras would collect the garbage of the whole program, which takes longer than `quantize`.
        if isinstance(getattr(self, name), keras.Variable):
            delete_variable(self, name)
        else:
            super().__delattr__(name)


def to_float32(x: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32")))


def blockwise_int4(kernel: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A kernel (D, F) -> integers of 4 bits (D, F), scales and zero points (blocks, F).

    A weight is `(integer - zero) * scale`. It is `keras.quantizers.abs_max_quantize_grouped_with_zero_point`, except
    that the range of a block always includes 0. Keras cuts off the weights of a block in which all have one sign.
    """
    size, made = kernel.shape
    blocks = -(-size // block_size)
    padded = np.pad(kernel, [(0, blocks * block_size - size), (0, 0)]).reshape(blocks, block_size, made)
    low, high = np.minimum(padded.min(axis=1), 0), np.maximum(padded.max(axis=1), 0)  # (blocks, F)
    scale = (high - low + np.float32(_EPSILON)) / np.float32(_HIGHEST - _LOWEST)
    zero = np.clip(np.round(-low / scale) + _LOWEST, _LOWEST, _HIGHEST)
    integers = np.clip(np.round(padded / scale[:, None]) + zero[:, None], _LOWEST, _HIGHEST)
    return integers.reshape(-1, made)[:size].astype("int8"), scale, zero.astype("int8")

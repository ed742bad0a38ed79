"""Layers whose kernel (D, F) `quantize` turns into integers of 8 or 4 bits, as in Keras' own layers.

Int8 stores a scale for each of the F outputs, and rounds the inputs too. Int4 rounds the kernel only, and stores two
weights in a byte; each block of inputs has a scale and a zero point for each output.
"""

from typing import Any

import keras
import numpy as np
from keras import ops, quantizers

from keras_tx.internals.keras_models import delete_variable, kernel_of
from keras_tx.layers.configs import take_own_policy
from keras_tx.layers.splitting import Splittable
from keras_tx.types import Shape

MODES = ("int8", "int4")
_LOWEST, _HIGHEST = -8, 7  # of 4 bits
_EPSILON = 1e-7  # of Keras: the scale of zeros


class Quantizable(Splittable):
    """Allows `quantize`, which Keras rejects for subclasses of its layers. A quantized layer runs Keras' own `call`.

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
        kernel = self._as_matrix()
        super().quantize(mode, type_check=False, config=config)
        self._assign(*blockwise_int4(kernel, int(block_size)))

    def _as_matrix(self) -> np.ndarray:
        """The kernel in float32 as (D, F)."""
        kernel = np.asarray(ops.convert_to_numpy(ops.cast(kernel_of(self), "float32")))
        return kernel.reshape(self._num_inputs(kernel.shape), -1)

    def _num_inputs(self, shape: tuple[int, ...]) -> int:
        """D of a kernel of this shape."""
        return shape[0]

    def _assign(self, kernel: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> None:
        kernel_of(self).assign(quantizers.pack_int4(ops.convert_to_tensor(kernel), axis=-1)[0])
        self.kernel_scale.assign(scale)
        self.kernel_zero.assign(zero)

    def __delattr__(self, name: str) -> None:
        # For each variable Keras would collect the garbage of the whole program, which takes longer than `quantize`.
        if isinstance(getattr(self, name), keras.Variable):
            delete_variable(self, name)
        else:
            super().__delattr__(name)


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

"""Layers that find the padding mask (B, T) of their inputs (B, T, D), also where Keras loses it.

B batch, T tokens, D hidden.
"""

import inspect
from typing import Any

import keras
from keras import ops

from keras_tx.internals.keras_models import (
    get_keras_mask,
    keep_call_arguments,
    let_models_pass_masks_on,
    set_keras_mask,
)
from keras_tx.internals.keras_torch import clear_all_gradients
from keras_tx.layers import masks
from keras_tx.layers.cache import check_cache
from keras_tx.layers.configs import Composite
from keras_tx.layers.ids import from_whole_numbers
from keras_tx.layers.mask_search import find_mask
from keras_tx.layers.precision import as_floats
from keras_tx.layers.shapes import check_dense, check_shape
from keras_tx.types import Tensor


class MaskedLayer(Composite):
    """A layer whose call argument `mask` (B, T) is by default the Keras mask of its first argument.

    Keras does this only for a layer without other tensor arguments, and its operators (`x * 8`, `x + y`, `ops.tanh(x)`)
    lose the mask. In a functional model this layer finds it in both cases, and warns if padding can change real tokens:
    see `mask_search`. In eager code it can only read the mask that Keras attached to the tensor. An argument `memory`
    gets its `memory_mask` in the same way.
    """

    _cache_depth = 0  # see `check_cache`
    _checks_dense = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.input_spec = keras.layers.InputSpec(ndim=3)
        keep_call_arguments(self)  # `convert_inputs` makes them tensors
        let_models_pass_masks_on()
        clear_all_gradients()

    def __call__(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
        if inputs is None:
            raise ValueError("`inputs` must be a tensor (B, T, D). Received: inputs=None")
        check_dense(self, (inputs, *args), kwargs)
        names = list(inspect.signature(self.call).parameters)[1 : 1 + len(args)] if args else []
        arguments = {"inputs": inputs, **dict(zip(names, args, strict=True)), **kwargs}
        num_layers = len(self.layers) if self._cache_depth == 2 else None
        check_cache(arguments.get("cache"), arguments, self._cache_depth, num_layers)
        if arguments.get("cache") is None:  # with a cache, `mask` is for all slots, not for the inputs
            _fill_mask(self, arguments, "mask", inputs)
        if arguments.get("memory") is not None:
            _fill_mask(self, arguments, "memory_mask", arguments["memory"])
        arguments = convert_inputs(self, {name: value for name, value in arguments.items() if value is not None})
        outputs = super().__call__(arguments.pop("inputs"), **arguments)
        if arguments.get("cache") is not None:
            set_keras_mask(outputs[0], None)  # Keras attaches that of the slots if lengths are unknown
        return outputs

    def compute_mask(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor | None:
        if mask is None or None in (mask.shape[-1], inputs.shape[-2]) or mask.shape[-1] == inputs.shape[-2]:
            return mask
        return None  # it is for the slots of a cache


_VECTORS = {"inputs", "memory", "query", "key", "value"}


def _fill_mask(layer: Any, arguments: dict[str, Any], name: str, tensor: Tensor) -> None:
    """Sets the argument `name` to the mask of `tensor`, unless the caller passed one, and checks it."""
    mask = arguments.get(name)
    if mask is None:
        mask = find_mask(tensor, layer, name) if isinstance(tensor, keras.KerasTensor) else get_keras_mask(tensor)
    if mask is not None:
        mask = masks.checked(name, mask)
        check_shape(name, mask, tensor.shape[:-1], exact=True)
        arguments[name] = mask


def convert_inputs(layer: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The call arguments of `layer` as tensors of its compute dtype; an `attention_bias` keeps its own dtype.

    Keras would round the bias to bfloat16, although it is added to float32 logits.

    Raises:
        ValueError: for a mask of numbers other than 1 and 0, and for `document_ids` that are not whole numbers.
    """

    def convert(x: Any, are_vectors: bool) -> Any:
        if x is None or isinstance(x, keras.KerasTensor):
            return x
        mask = get_keras_mask(x)
        x = layer.dtype_policy.convert_input(x, layer.autocast, layer.input_dtype)
        x = as_floats(x, layer) if are_vectors else x
        if mask is not None:
            set_keras_mask(x, mask)
        return x

    arguments = {name: masks.checked(name, x) if name.endswith("mask") else x for name, x in arguments.items()}
    if arguments.get("document_ids") is not None:
        arguments["document_ids"] = from_whole_numbers("document_ids", arguments["document_ids"])
    return {
        name: _to_tensor(value)
        if name == "attention_bias"
        else keras.tree.map_structure(lambda x, name=name: convert(x, name in _VECTORS), value)
        for name, value in arguments.items()
    }


def _to_tensor(x: Any) -> Any:
    return x if x is None or isinstance(x, keras.KerasTensor) else ops.convert_to_tensor(x)

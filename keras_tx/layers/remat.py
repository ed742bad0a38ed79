"""Gradient checkpointing: the activations of a layer are not kept for the gradient, but computed again.

Chen et al. 2016, arXiv:1604.06174.
"""

from typing import Any

import keras

from keras_tx import checks
from keras_tx.layers.seeds import RepeatedSeeds
from keras_tx.types import Tensor


def rematerialized(
    layer: Any, inputs: Tensor, *, memory: Tensor = None, attention_bias: Tensor = None, **options: Any
) -> Any:
    """`layer(inputs, memory=..., attention_bias=..., **options)` with gradient checkpointing.

    Gradients flow to the weights and to the three tensors that the signature names. Dropout uses the same masks in both
    computations, because its seeds are drawn here, before the first one.

    Raises:
        ValueError: for a layer with an activity regularizer, whose loss would be added twice.
    """
    checks.unregularized("remat", layer)
    seeds = RepeatedSeeds(layer)
    named = {"memory": memory, "attention_bias": attention_bias}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}

    def call(inputs: Tensor, *tensors: Tensor) -> Any:
        with seeds.run():
            return layer(inputs, **dict(zip(given, tensors, strict=True)), **options)

    outputs = keras.remat(call)(inputs, *given.values())
    seeds.finish()
    return outputs

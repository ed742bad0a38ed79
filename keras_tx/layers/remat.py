"""Gradient checkpointing: the activations of a layer are computed again for its gradient instead of kept.

Chen et al. 2016, arXiv:1604.06174.
"""

import keras

from keras_tx import checks
from keras_tx.keras_internals import layers_within
from keras_tx.layers.dropout import Dropout, given_seeds


def rematerialized(layer, inputs, *, memory=None, attention_bias=None, **options):
    """`layer(inputs, memory=..., attention_bias=..., **options)`, in training without its activations in memory.

    Gradients go to the weights and to the tensors named here. Dropout drops the same numbers both times: its seeds are
    drawn here.

    Raises:
        ValueError: for a layer with an activity regularizer, whose loss would count twice.
    """
    checks.unregularized("remat", layer)
    dropouts = [one for one in layers_within(layer) if isinstance(one, Dropout) and one.rate]
    seeds = [one.seed_generator.next() for one in dropouts]
    named = {"memory": memory, "attention_bias": attention_bias}
    given = {name: tensor for name, tensor in named.items() if tensor is not None}

    def call(inputs, *tensors):
        with given_seeds(dict(zip(dropouts, seeds, strict=True))):
            return layer(inputs, **dict(zip(given, tensors, strict=True)), **options)

    return keras.remat(call)(inputs, *given.values())

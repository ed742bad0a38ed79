"""The initial weights of a new model: distributed as those of transformers' models are."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_tx.pretrained import table
from keras_tx.pretrained.family import Family


def initial_weights(family: Family) -> Iterator[tuple[Any, Any]]:
    """Yields all matrices and tables of a model, each with its initializer.

    Vectors keep the initializers of their layers: biases are zeros, the scales of norms are ones, and ViT's class token
    is random. So do the integers of a quantized model, which is created when its file is loaded.
    """
    for row in family.rows():
        for variable in row.variables:
            is_matrix = len(variable.shape) > 1 and row.how != table.VECTOR  # a bias may have an axis for heads
            if is_matrix and keras.backend.is_float_dtype(variable.dtype):
                yield variable, family.initial_distribution(stddev=family.initial_stddev(row.theirs))

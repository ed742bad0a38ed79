"""The initial weights of a new model: distributed as those of transformers' models are."""

import keras

from keras_tx.internals.keras_models import set_initializer
from keras_tx.pretrained import table
from keras_tx.pretrained.family import Family


def set_initial_weights(family: Family) -> None:
    """Sets the initializers of all matrices and tables. To be called inside `variables_initialized_at_end`.

    Vectors keep the initializers of their layers: biases are zeros, and the scales of norms are ones. So do the
    integers of a quantized model, which is created when its file is loaded.
    """
    for row in family.rows():
        for variable in row.variables:
            is_matrix = len(variable.shape) > 1 and row.how != table.VECTOR  # a bias may have an axis for heads
            if is_matrix and keras.backend.is_float_dtype(variable.dtype):
                initializer = family.initial_distribution(stddev=family.initial_stddev(row.theirs))
                set_initializer(variable, initializer)

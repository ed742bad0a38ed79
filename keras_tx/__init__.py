"""Transformer layers for Keras 3, with tokenizers, models, training, generation, checkpoints and serving."""

from keras_tx import data, distribution, generation, layers, models, plots, pretrained, serving, text, training
from keras_tx.internals.tensorflow_graphs import leave_out_of_autograph
from keras_tx.optional import once_imported
from keras_tx.version import __version__

__all__ = [
    "__version__",
    "data",
    "distribution",
    "generation",
    "layers",
    "models",
    "plots",
    "pretrained",
    "serving",
    "text",
    "training",
]

once_imported("tensorflow", lambda: leave_out_of_autograph("keras_tx"))

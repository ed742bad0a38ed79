"""Loads Hugging Face checkpoints as Keras models, and saves them back."""

from keras_tx.pretrained.load import from_pretrained
from keras_tx.pretrained.model import PretrainedModel
from keras_tx.pretrained.save import save_pretrained

__all__ = ["PretrainedModel", "from_pretrained", "save_pretrained"]

"""What all models share: integer ids in, and a config that is made of the layers' own.

The inputs may be a list in the order of `model.inputs`, a dict by their names (further keys do no harm), or, where
there is one input, that alone.
"""

import keras

from keras_tx import checks
from keras_tx.layers import Decoder, Encoder, TokenEmbedding
from keras_tx.layers.configs import serialized_policy
from keras_tx.layers.ids import check_ids

_SIZES = {
    TokenEmbedding: ("vocabulary_size", "hidden_dim"),
    Encoder: ("num_layers", "num_heads", "intermediate_dim"),
    Decoder: ("num_layers", "num_heads", "intermediate_dim", "cross_attention"),
}


def options(name, value, layer, **defaults):
    """`defaults` and over them the dict `value` of further arguments of `layer`, checked."""
    return {**defaults, **checks.options_of(name, value, layer, given=_SIZES[layer])}


class TokenModel(keras.Model):
    """A functional model over ids: refuses ids outside the vocabulary where Keras would cast or clip them."""

    def call(self, inputs, training=None, mask=None, **kwargs):
        self._check_call(inputs, mask)
        if not isinstance(inputs, (dict, list, tuple)):
            inputs = [inputs]  # Keras does so for a tensor, and warns of an array
        return super().call(inputs, training=training, mask=mask, **kwargs)

    def _check_call(self, inputs, mask):
        if any(given is not None for given in keras.tree.flatten(mask)):
            raise ValueError("`mask` cannot be given: tokens that are `padding_id` are padding. Received: mask")
        inputs = inputs if isinstance(inputs, (dict, list, tuple)) else [inputs]
        for name, embedding in self.id_inputs.items():
            ids = inputs[name] if isinstance(inputs, dict) else inputs[[one.name for one in self.inputs].index(name)]
            check_ids(name, ids, embedding.vocabulary_size)  # Keras would cast floats and large integers

    def _listed(self, inputs):
        """`inputs` in the order of `self.inputs`."""
        if isinstance(inputs, dict):
            return [inputs[tensor.name] for tensor in self.inputs]
        return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]

    def get_config(self):
        dtype = serialized_policy(self, self.embedding.dtype_policy)
        config = {"name": self.name, "trainable": self.trainable, "dtype": dtype}
        for name in checks.parameters_of(type(self)):
            if name not in ("dtype", *self.configured):
                value = getattr(self, name)
                config[name] = keras.activations.serialize(value) if callable(value) else value
        for name, layer in self.configured.items():
            layer_config = layer.get_config()
            config[name] = {option: layer_config[option] for option in getattr(self, name)}
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)

"""Base class of all models: integer ids as inputs, and a config that consists of the layers' configs.

The inputs may be a list in the order of `model.inputs`, a dict by their names (other keys are ignored), or, for a model
with one input, that input alone.
"""

from collections.abc import Mapping
from typing import Any

import keras

from keras_tx import checks
from keras_tx.layers import Decoder, Encoder, LearnedPositionalEncoding, TokenEmbedding, trainable
from keras_tx.layers.configs import serialized_policy, set_untracked
from keras_tx.layers.ids import check_ids
from keras_tx.layers.unpadding import padding_unread
from keras_tx.models.base import Twins, with_twins
from keras_tx.models.checked_data import CheckedModel
from keras_tx.types import Tensor

_LAYERS = (
    "embedding",
    "target_embedding",
    "encoder",
    "decoder",
    "head",
    "head_bias",
    "_head",
    "id_inputs",
    "configured",
)
_GIVEN_BY_THE_MODEL = {
    TokenEmbedding: ("vocabulary_size", "hidden_dim"),
    Encoder: ("num_layers", "intermediate_dim", "num_heads"),
    Decoder: ("num_layers", "intermediate_dim", "num_heads", "cross_attention"),
}


def options(name: str, value: Any, layer: type, **defaults: Any) -> dict[str, Any]:
    """Checks the dict `value` of further arguments of `layer`, and adds the `defaults` that it lacks."""
    return {**defaults, **checks.options_of(name, value, layer, given=_GIVEN_BY_THE_MODEL[layer])}


class TokenModel(CheckedModel):
    """A functional model over ids. It raises errors for ids outside the vocabulary, which Keras would cast or clip.

    In compiled graphs ids have no values: there the errors are those of `CheckedModel`.

    A subclass sets these attributes in its constructor:

        embedding: the `TokenEmbedding` whose dtype policy is that of the model.
        id_inputs: {name of an input of ids: the `TokenEmbedding` for it}.
        configured: {name of an argument `..._options`: the layer that it configures}.
        ..._options: the arguments themselves, not tracked by Keras, because layers in them are not the model's own.
    """

    embedding: TokenEmbedding
    id_inputs: Mapping[str, TokenEmbedding]
    configured: Mapping[str, Any]

    @classmethod
    def _check_names(cls, rest: Mapping[str, Any]) -> None:
        """Raises for arguments that neither the signature nor Keras knows; Keras would ignore them."""
        checks.known_arguments(cls, rest, ("name", "trainable"))

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        self._check_call(inputs, mask)
        if not isinstance(inputs, (dict, list, tuple)):
            inputs = [inputs]  # Keras does this for a tensor, but warns about an array
        with padding_unread(self._padding_is_unread(training)):
            return super().call(inputs, training=training, mask=mask, **kwargs)

    def _padding_is_unread(self, training: bool | None) -> bool:
        """Whether the outputs of the model do not depend on those of its encoder at padding tokens."""
        return True

    def _check_call(self, inputs: Any, mask: Any) -> None:
        if any(given is not None for given in keras.tree.flatten(mask)):
            raise ValueError("`mask` cannot be given: tokens that are `padding_id` are padding. Received: mask")
        inputs = inputs if isinstance(inputs, (dict, list, tuple)) else [inputs]
        for name, embedding in self.id_inputs.items():
            ids = inputs[name] if isinstance(inputs, dict) else inputs[[one.name for one in self.inputs].index(name)]
            check_ids(name, ids, embedding.vocabulary_size)  # Keras would cast floats and large integers

    def _id_sizes(self) -> dict[str, int]:
        sizes = {name: embedding.vocabulary_size for name, embedding in self.id_inputs.items()}
        sizes["segment_ids"] = self.embedding.num_segments
        if isinstance(self.embedding.positions, LearnedPositionalEncoding):
            sizes["positions"] = self.embedding.positions.max_length
        return {name: size for name, size in sizes.items() if name in self._input_names()}

    def _policy_of_layers(self) -> Any:
        return self.embedding.dtype_policy

    def _listed(self, inputs: Any) -> list[Tensor]:
        """`inputs` in the order of `self.inputs`."""
        if isinstance(inputs, dict):
            return [inputs[tensor.name] for tensor in self.inputs]
        return list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]

    def _take_over(self, source: Any, twins: Twins) -> None:
        for name in _LAYERS:
            if hasattr(source, name):
                setattr(self, name, with_twins(getattr(source, name), twins))
        for name in checks.parameters_of(type(self)):
            if name in self.configured:
                layer = self.configured[name]
                set_untracked(self, name, {option: getattr(layer, option) for option in getattr(source, name)})
            elif name != "dtype":
                setattr(self, name, getattr(source, name))

    def get_config(self) -> dict[str, Any]:
        dtype = serialized_policy(self, self.embedding.dtype_policy)
        config = {"name": self.name, "trainable": self.trainable, "dtype": dtype, **trainable.config_of(self)}
        for name in checks.parameters_of(type(self)):
            if name not in ("dtype", *self.configured):
                value = getattr(self, name)
                config[name] = keras.activations.serialize(value) if callable(value) else value
        for name, layer in self.configured.items():
            layer_config = layer.get_config()
            config[name] = {option: layer_config[option] for option in getattr(self, name)}
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        return cls(**config)

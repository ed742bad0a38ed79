"""Quantized layers below other layers and models: loaded = saved, also where the parents have other names."""

import keras
import numpy as np
import pytest

from keras_tx.internals.keras_models import layers_within
from keras_tx.layers import Encoder, FeedForward, TokenEmbedding
from tests.tools import assert_close, to_numpy

IDS = np.random.default_rng(3).integers(1, 41, (3, 7))
pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method"),
    pytest.mark.filterwarnings("ignore:.*The use of `x.T` on tensors"),  # by Keras, on PyTorch
]


@keras.saving.register_keras_serializable(package="tests")
class Parent(keras.layers.Layer):
    """A user's layer, below which another one is built."""

    def __init__(self, child, **kwargs):
        super().__init__(**kwargs)
        self.child = child

    def call(self, inputs):
        return self.child(inputs)

    def get_config(self):
        return {**super().get_config(), "child": keras.saving.serialize_keras_object(self.child)}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "child": keras.saving.deserialize_keras_object(config["child"])})


def below_parents():
    """A model of layers that are built below others, which have another name in each copy or are not there yet."""
    inner = keras.Sequential([FeedForward(7, name="a+b"), Parent(FeedForward(5))])
    layers = [TokenEmbedding(41, 6, padding_id=None), Encoder(1, 5, 3), keras.Sequential([inner])]
    return keras.Sequential([keras.Input((None,), dtype="int32"), *layers, keras.layers.Dense(3)])


def modes(model):
    return [one.quantization_mode for one in layers_within(model) if one.quantization_mode is not None]


@pytest.mark.parametrize("mode", ["int4", pytest.param("int8", marks=pytest.mark.tensorflow)])
def test_layers_below_any_parents_are_loaded_as_they_are_saved(mode, tmp_path):
    model = below_parents()
    model.quantize(mode)
    after = to_numpy(model(IDS))
    model.save(tmp_path / "first.keras")
    first = keras.saving.load_model(tmp_path / "first.keras")
    first.save(tmp_path / "second.keras")
    second = keras.saving.load_model(tmp_path / "second.keras")
    clone = keras.models.clone_model(model)
    other = keras.Sequential([keras.Input((None,), dtype="int32"), keras.Sequential.from_config(model.get_config())])
    for one in (clone, other):
        one(IDS)
        one.set_weights(model.get_weights())
    for one in (first, second, clone, other):
        assert modes(one) == modes(model) and len(modes(one)) > 10
        assert_close(one(IDS), after, atol=0)


def test_paths_below_a_parent_in_configs_of_the_first_version_are_understood():
    policies = {f"sequential_2/one/{path}": keras.DTypePolicy("bfloat16") for path in ("tokens", "projection")}
    policies = keras.dtype_policies.DTypePolicyMap("float32", policies)
    layer = TokenEmbedding(41, 20, embedding_dim=12, name="one", dtype=policies)
    layer(IDS)
    assert layer.tokens.compute_dtype == layer.projection.compute_dtype == "bfloat16"

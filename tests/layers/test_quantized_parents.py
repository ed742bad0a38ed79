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


def policy_map(default, **policies):
    return keras.dtype_policies.DTypePolicyMap(default, policies)


def test_paths_below_a_parent_in_configs_of_the_first_version_are_understood():
    int4 = keras.dtype_policies.QuantizedDTypePolicy("int4", "float32")
    policies = policy_map("float32", **{f"sequential_2/one/{path}": int4 for path in ("tokens", "projection")})
    layer = TokenEmbedding(41, 20, embedding_dim=12, name="one", dtype=policies)
    layer(IDS)
    assert layer.tokens.quantization_mode == layer.projection.quantization_mode == "int4"
    # Two parents with such a layer: nothing says which of them this one is.
    policies = policy_map("float32", **{f"{parent}/one/tokens": int4 for parent in "ab"})
    layer = TokenEmbedding(41, 20, name="one", dtype=policies)
    layer(IDS)
    assert layer.tokens.quantization_mode is None


@pytest.mark.parametrize(
    "key, make, sublayer",
    [
        ("a/ff/output", lambda **k: FeedForward(6, name="ff", **k), lambda layer: layer.output_dense),
        (
            "reader/enc/layer_0/feed_forward/output",
            lambda **k: Encoder(1, 6, 2, name="enc", **k),
            lambda layer: layer.layers[0].feed_forward.output_dense,
        ),
        ("other/one/tokens", lambda **k: TokenEmbedding(41, 4, name="one", **k), lambda layer: layer.tokens),
    ],
)
def test_a_key_for_a_layer_of_another_model_changes_no_layer_whose_path_ends_like_it(key, make, sublayer):
    layer = make(dtype=policy_map("mixed_bfloat16", **{key: keras.DTypePolicy("float32")}))
    layer(IDS if key.endswith("tokens") else np.ones((1, 3, 4)))
    assert key.endswith(f"/{sublayer(layer).path}")
    assert sublayer(layer).dtype_policy.name == "mixed_bfloat16"


def test_a_quantized_layer_is_loaded_as_such_below_a_parent_for_whose_path_the_user_has_a_key():
    policies = policy_map("float32", **{"top/ff/out.*": keras.DTypePolicy("mixed_bfloat16")})
    alone = FeedForward(6, name="ff", dtype=policies)
    alone(np.ones((1, 3, 4)))
    assert alone.output_dense.dtype_policy.name == "float32"
    alone.output_dense.quantize("int4")
    below = FeedForward.from_config(alone.get_config())
    Parent(below, name="top")(np.ones((1, 3, 4)))
    assert below.output_dense.path == "top/ff/output"
    assert below.output_dense.quantization_mode == "int4"
    assert below.intermediate_dense.quantization_mode is None


def test_a_quantized_layer_is_loaded_as_such_where_the_user_has_a_key_for_its_very_path():
    policies = policy_map("float32", **{"ff/output": keras.DTypePolicy("mixed_bfloat16")})
    layer = FeedForward(6, name="ff", dtype=policies)
    layer(np.ones((1, 3, 4)))
    assert layer.output_dense.dtype_policy.name == "mixed_bfloat16"
    layer.output_dense.quantize("int4")
    loaded = FeedForward.from_config(layer.get_config())
    loaded(np.ones((1, 3, 4)))
    assert loaded.output_dense.dtype_policy.name == layer.output_dense.dtype_policy.name
    assert loaded.output_dense.quantization_mode == "int4"

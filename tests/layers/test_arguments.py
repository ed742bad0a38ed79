"""Arguments of constructors: another rotary layer, and numbers of NumPy."""

import inspect
import json

import keras
import numpy as np
import pytest

from keras_tx import layers, models
from keras_tx.layers import (
    AlibiBias,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositionalEncoding,
    TokenEmbedding,
)
from keras_tx.layers.rotary import rotate
from keras_tx.layers.rotary_scaling import frequencies
from keras_tx.models import CausalLM
from tests.tools import assert_close, normal, randomize, to_numpy

B, T, N, H = 2, 5, 6, 3


@keras.saving.register_keras_serializable(package="tests")
class LearnedAngles(keras.layers.Layer):
    """What `rotary` asks for, and no more: `call(inputs, positions)` and a config."""

    def build(self, inputs_shape):
        self.radians = self.add_weight(shape=(inputs_shape[-1] // 2,), initializer="ones", name="radians")

    def call(self, inputs, positions=None):
        positions = np.arange(inputs.shape[1]) if positions is None else positions
        return rotate(inputs, positions, keras.ops.convert_to_tensor(self.radians))


def test_any_layer_with_the_documented_methods_may_rotate():
    x = normal(B, T, 8)
    layer, plain = MultiHeadAttention(2, 4, rotary=LearnedAngles()), MultiHeadAttention(2, 4, rotary=True)
    for one in (layer, plain):
        one.build(x.shape, x.shape)
    assert len(layer.weights) == len(plain.weights) + 1  # there before the first call, as a saved model needs them
    plain.set_weights([weight for weight in layer.weights if weight is not layer.rotary.radians])
    layer.rotary.radians.assign(frequencies(4))
    again = MultiHeadAttention.from_config(json.loads(json.dumps(layer.get_config())))
    again.build(x.shape, x.shape)
    again.set_weights(layer.get_weights())
    mask = np.arange(T) < np.array([[5], [3]])
    for one in (layer, again):
        assert_close(one(x, x, query_mask=mask, value_mask=mask), plain(x, x, query_mask=mask, value_mask=mask))


def in_an_encoder(**options):
    x = keras.Input((T, 8))
    return keras.Model(x, Encoder(3, 17, 2, attention_options={"rotary": LearnedAngles(), **options})(x))


def in_a_language_model():
    options = {"attention_options": {"rotary": LearnedAngles()}}
    sizes = {"num_layers": 3, "hidden_dim": 8, "num_heads": 2, "intermediate_dim": 17}
    return CausalLM(23, **sizes, decoder_options=options)


@pytest.mark.parametrize("make", [in_an_encoder, in_a_language_model])
def test_each_layer_of_a_stack_has_its_own_rotary_weights_also_in_files_and_clones(make, tmp_path):
    model, x = make(), normal(B, T, 8) if make is in_an_encoder else np.arange(B * T).reshape(B, T) + 1
    randomize(model)
    radians = [weight for weight in model.weights if weight.name == "radians"]
    assert len(radians) == 3 and len(np.unique(np.stack([to_numpy(one) for one in radians]))) == 6
    model.save(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    for one in (keras.saving.load_model(tmp_path / "model.keras"), clone):
        assert [weight.shape for weight in one.weights] == [weight.shape for weight in model.weights]
        assert_close(one(x), model(x), atol=0)


def test_a_layer_alone_saves_the_weights_of_its_rotary(tmp_path):
    x = keras.Input((T, 8))
    layer = EncoderLayer(17, 2, attention_options={"rotary": LearnedAngles()})
    model = randomize(keras.Model(x, layer(x)))
    # The option is what it was: its weights, with a path of their own in files, are those of attention alone.
    assert not layer.attention_options["rotary"].weights and layer.self_attention.rotary.weights
    model.save(tmp_path / "model.keras")
    again, x = keras.saving.load_model(tmp_path / "model.keras"), normal(B, T, 8)
    assert_close(again(x), model(x), atol=0)


def test_a_stack_refuses_a_rotary_whose_weights_its_copies_would_lose():
    rotary = LearnedAngles(name="angles")
    rotary.build((None, T, 2, 4))
    text = "A layer given as `rotary` must not be built: .* Received: rotary=angles with 1 weights"
    with pytest.raises(ValueError, match=text):
        Encoder(3, 17, 2, attention_options={"rotary": rotary})


@pytest.mark.parametrize("rotary", ["half", 1, keras.layers.Dense(3)])
def test_what_is_no_layer_of_positions_is_refused(rotary):
    with pytest.raises(ValueError, match="`rotary` must be True, None or a layer.* Received: rotary=('half'|1|<Dense)"):
        MultiHeadAttention(N, H, rotary=rotary)


INT, FLOAT = np.int64, np.float32
NUMBERS = [
    (
        MultiHeadAttention,
        {"num_heads": INT(2), "key_dim": INT(4), "value_dim": INT(3), "num_key_value_heads": INT(1), "seed": INT(5)}
        | {"output_shape": (INT(3), INT(2)), "attention_axes": INT(1), "sliding_window": INT(3)}
        | {"dropout": FLOAT(0.5), "scale": FLOAT(0.25), "qk_norm_epsilon": FLOAT(0.125)},
    ),
    (MultiHeadAttention, {"num_heads": INT(2), "key_dim": INT(4), "attention_axes": [INT(-2)], "output_shape": INT(3)}),
    (
        TokenEmbedding,
        {"vocabulary_size": INT(9), "hidden_dim": INT(4), "padding_id": INT(1), "embedding_dim": INT(3)}
        | {"num_segments": INT(0), "layer_norm_epsilon": FLOAT(0.5), "dropout": FLOAT(0.5)},
    ),
    (TokenEmbedding, {"vocabulary_size": INT(9), "hidden_dim": INT(4), "num_segments": INT(2)}),
    (SinusoidalPositionalEncoding, {"max_wavelength": INT(100)}),
    (LearnedPositionalEncoding, {"max_length": INT(7), "offset": INT(0)}),
    (LearnedPositionalEncoding, {"max_length": INT(7), "offset": INT(2)}),
    (
        RotaryEmbedding,
        {"base": FLOAT(100), "fraction": FLOAT(0.5)}
        | {"scaling": {"rope_type": "dynamic", "factor": FLOAT(2), "original_max_position_embeddings": INT(64)}},
    ),
    (RelativePositionBias, {"num_heads": INT(2), "num_buckets": INT(8), "max_distance": INT(16)}),
    (AlibiBias, {"num_heads": INT(3)}),
]


@pytest.mark.parametrize(("kind", "arguments"), NUMBERS)
def test_numbers_of_numpy_are_numbers_and_every_argument_is_an_attribute(kind, arguments):
    layer = kind(**arguments)
    plain = json.loads(json.dumps(arguments, default=lambda number: number.item()))
    configs = [json.loads(json.dumps({**one.get_config(), "name": None})) for one in (layer, kind(**plain))]
    assert configs[0] == configs[1]
    names = set(inspect.signature(kind).parameters) - {"kwargs", "output_shape"}
    assert all(hasattr(layer, name) for name in names)


def test_batches_of_different_sizes_do_not_broadcast():
    with pytest.raises(
        ValueError, match="`query` and `value` must have the same batch size; .* Received: batch sizes 3 and 1"
    ):
        MultiHeadAttention(2, 3)(np.ones((3, 5, 4)), np.ones((1, 7, 4)))
    with pytest.raises(ValueError, match="likewise `inputs` and `memory`. Received: batch sizes 3 and 1"):
        DecoderLayer(8, 2, cross_attention=True)(np.ones((3, 5, 4)), np.ones((1, 7, 4)))


REQUIRED = {
    "vocabulary_size": 23,
    "hidden_dim": 6,
    "num_layers": 1,
    "intermediate_dim": 7,
    "num_heads": 3,
    "key_dim": 2,
    "patch_size": 2,
    "source_vocabulary_size": 11,
}
FLAGS = [
    pytest.param(cls, name, parameter, id=f"{cls.__name__}-{name}")
    for cls in [getattr(module, name) for module in (layers, models) for name in module.__all__]
    for name, parameter in inspect.signature(cls).parameters.items()
    if parameter.annotation in (bool, bool | None)
]


def with_flag(cls, name, value):
    names = inspect.signature(cls).parameters
    return cls(**{one: size for one, size in REQUIRED.items() if one in names}, **{name: value})


def test_all_flags_are_found():
    assert len(FLAGS) > 30 and {"gated", "qk_norm", "remat", "packed"} < {param.values[1] for param in FLAGS}


@pytest.mark.parametrize(("cls", "name", "parameter"), FLAGS)
def test_a_flag_is_a_boolean_also_one_of_numpy(cls, name, parameter):
    rule = "True or False" if parameter.annotation is bool else "True, False or None"
    for wrong in ("no", 2, 0.0):
        with pytest.raises(TypeError, match=f"^`{name}` must be {rule}. Received: {name}={wrong!r}"):
            with_flag(cls, name, wrong)
    for value in (np.bool_(parameter.default), int(parameter.default or 0)):  # configs of earlier versions may have 1
        config = with_flag(cls, name, value).get_config()
        assert config[name] is bool(parameter.default)
        json.dumps(config)


@pytest.mark.parametrize("x", [np.float32(1), np.ones(3, "float32")])
def test_a_feed_forward_network_names_inputs_of_too_few_axes(x):
    with pytest.raises(ValueError, match=f"layer 'network' is incompatible .* min_ndim=2, found ndim={x.ndim}"):
        layers.FeedForward(4, name="network")(x)

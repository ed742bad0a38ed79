"""Norms of the user's own, in every place that has a norm, and initializers of biases."""

import json

import keras
import numpy as np
import pytest

from keras_tx.layers import Decoder, DecoderLayer, Encoder, EncoderLayer, TokenEmbedding
from keras_tx.models import CausalLM
from tests.tools import assert_close, normal, randomize, to_numpy

B, T, N, D, F, V = 2, 5, 3, 12, 17, 23
EPSILON = 0.3


@keras.saving.register_keras_serializable(package="test_own_norms")
class DeviationNorm(keras.layers.Layer):
    """`(x - mean) / (standard deviation + epsilon)`: epsilon is outside of the root."""

    def __init__(self, epsilon=EPSILON, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def build(self, inputs_shape):
        self.scale = self.add_weight(shape=inputs_shape[-1:], initializer="ones", name="scale")
        self.shift = self.add_weight(shape=inputs_shape[-1:], initializer="zeros", name="shift")

    def call(self, x):
        mean, deviation = keras.ops.mean(x, -1, keepdims=True), keras.ops.std(x, -1, keepdims=True)
        return (x - mean) / (deviation + self.epsilon) * self.scale + self.shift

    def get_config(self):
        return {**super().get_config(), "epsilon": self.epsilon}


def by_hand(x, layer):
    x = to_numpy(x).astype("float64")
    normed = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + EPSILON)
    return (normed * to_numpy(layer.scale) + to_numpy(layer.shift)).astype("float32")


def made(cls, *sizes, **options):
    layer = cls(*sizes, **options)
    layer(normal(B, T, D))
    return randomize(layer)


def paths(layer):
    return [weight.path.split("/", 1)[1] for weight in layer.weights if "scale" in weight.path]


GIVEN = {"layer": DeviationNorm(), "class": DeviationNorm, "callable": lambda: DeviationNorm(EPSILON)}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("normalize_first", [False, True])
def test_each_place_has_a_norm_of_its_own(given, normalize_first):
    x = normal(B, T, D)
    layer = made(EncoderLayer, F, N, normalization=GIVEN[given], normalize_first=normalize_first)
    first, second = layer.self_attention_norm, layer.feed_forward_norm
    assert np.abs(to_numpy(first.scale) - to_numpy(second.scale)).max() > 0.01
    if normalize_first:
        normed = by_hand(x, first)
        between = x + to_numpy(layer.self_attention(normed, normed))
        expected = between + to_numpy(layer.feed_forward(by_hand(between, second)))
    else:
        between = by_hand(x + to_numpy(layer.self_attention(x, x)), first)
        expected = by_hand(between + to_numpy(layer.feed_forward(between)), second)
    assert_close(layer(x), expected, atol=5e-6)
    assert paths(layer) == ["self_attention_norm/scale", "feed_forward_norm/scale"]


@pytest.mark.parametrize("cls", [Encoder, Decoder])
def test_a_stack_has_them_in_all_layers_and_at_the_end(cls):
    stack = made(cls, 2, F, N, normalization=DeviationNorm(), normalize_first=True)
    places = ["self_attention_norm/scale", "feed_forward_norm/scale"]
    assert paths(stack) == [f"layer_{i}/{place}" for i in range(2) for place in places] + ["final_norm/scale"]
    x = normal(B, T, D)
    assert_close(stack(x), by_hand(stack.layers[1](stack.layers[0](x)), stack.final_norm), atol=3e-6)


def test_a_decoder_has_one_for_cross_attention_and_an_embedding_one_for_its_sum():
    layer = DecoderLayer(F, N, cross_attention=True, normalization=DeviationNorm)
    layer(normal(B, T, D), normal(B, 7, D))
    assert [path.split("_norm")[0] for path in paths(layer)] == ["self_attention", "cross_attention", "feed_forward"]
    embedding = TokenEmbedding(V, D, normalization=DeviationNorm())
    ids = np.array([[3, 5, 7]])
    embedding(ids)
    randomize(embedding)
    expected = by_hand(to_numpy(embedding.tokens.embeddings)[ids], embedding.norm)
    assert_close(embedding(ids), expected, atol=3e-6)


MAKERS = {
    "encoder layer": lambda **options: EncoderLayer(F, N, **options),
    "decoder": lambda **options: Decoder(2, F, N, normalize_first=True, **options),
    "embedding": lambda **options: TokenEmbedding(V, D, **options),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_config_makes_the_same_norms(name):
    inputs = np.array([[3, 5, 7]]) if name == "embedding" else normal(B, T, D)
    layer = MAKERS[name](normalization=lambda: DeviationNorm(0.7))
    config = layer.get_config()
    layer(inputs)
    randomize(layer)
    assert layer.get_config() == config  # the same before and after it was built
    again = type(layer).from_config(json.loads(json.dumps(config)))
    again(inputs)
    again.set_weights(layer.get_weights())
    assert again.normalization.epsilon == 0.7
    assert_close(again(inputs), layer(inputs), atol=0)
    other = MAKERS[name](normalization=DeviationNorm(0.2))
    other(inputs)
    other.set_weights(layer.get_weights())
    assert np.abs(to_numpy(other(inputs)) - to_numpy(layer(inputs))).max() > 1e-2


def test_the_layer_that_was_given_stays_as_it_was():
    given = DeviationNorm(name="given")
    layer = made(EncoderLayer, F, N, normalization=given, dtype="mixed_bfloat16")
    assert not given.built and given.name == "given"
    assert layer.feed_forward_norm.dtype_policy.name == "mixed_bfloat16"
    assert len(layer.weights) == len(made(EncoderLayer, F, N).weights)


@pytest.mark.usefixtures("eager")
def test_a_model_with_them_is_saved_and_generates_the_tokens_of_its_own_logits(tmp_path):
    options = {"normalization": DeviationNorm()}
    model = CausalLM(
        V, num_layers=1, hidden_dim=D, num_heads=N, embedding_options=options, decoder_options=options, dropout=0.0
    )
    randomize(model)
    prompt = np.array([[3, 5, 7]])
    generated = model.generate(prompt, max_new_tokens=3, jit_compile=False)
    for length in range(3, 6):
        assert to_numpy(model(generated[:, :length]))[0, -1].argmax() == generated[0, length]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert_close(again(prompt), model(prompt), atol=0)


class Fixed(keras.layers.Layer):
    """Its constructor takes no `name`."""

    def __init__(self):
        super().__init__()


def built():
    layer = DeviationNorm()
    layer.build((None, D))
    return layer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "batch_norm"}, r"must be one of \['layer_norm', .* Received: normalization='batch_norm'"),
        ({"normalization": None}, r"a layer, or a callable that makes a layer. Received: normalization=None"),
        ({"normalization": lambda: 3}, "Received: normalization=<function .*, which makes 3"),
        ({"normalization": lambda: "rms_norm"}, "Received: normalization=<function .*, which makes 'rms_norm'"),
        ({"normalization": built()}, "must not be built: .* Received: normalization=deviation_norm.* with 2 weights"),
        ({"normalization": Fixed()}, "must have a config that .* Received: normalization=fixed.* of type Fixed"),
        (
            {"normalization": DeviationNorm(), "layer_norm_epsilon": 0.1},
            "`layer_norm_epsilon` must be left out .* Received: layer_norm_epsilon=0.1, normalization=deviation_norm",
        ),
    ],
)
@pytest.mark.parametrize("make", [EncoderLayer, lambda *sizes, **options: Decoder(2, *sizes, **options)])
def test_what_is_no_norm_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(F, N, **options)


# Initializers of biases


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: EncoderLayer(F, N, **options),
        lambda **options: DecoderLayer(F, N, **options),
        lambda **options: Encoder(2, F, N, **options),
        lambda **options: Decoder(2, F, N, **options),
    ],
)
def test_biases_of_dense_projections_start_as_the_initializer_says(make):
    for options, value in (({}, 0.0), ({"bias_initializer": keras.initializers.Constant(0.7)}, 0.7)):
        layer = make(**options)
        again = type(layer).from_config(json.loads(json.dumps(layer.get_config())))
        for one in (layer, again):
            one(normal(B, T, D))
            biases = [to_numpy(weight) for weight in one.weights if weight.path.endswith("/bias")]
            assert len(biases) % 6 == 0
            assert all((bias == np.float32(value)).all() for bias in biases)
            assert all((to_numpy(weight) == 0).all() for weight in one.weights if weight.path.endswith("/beta"))


def test_attention_may_have_an_initializer_of_its_own():
    layer = EncoderLayer(F, N, bias_initializer="ones", attention_options={"bias_initializer": "zeros"})
    layer(normal(B, T, D))
    assert (to_numpy(layer.self_attention.query_dense.bias) == 0).all()
    assert (to_numpy(layer.feed_forward.output_dense.bias) == 1).all()

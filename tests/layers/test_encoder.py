"""Feed-forward, encoder layer and stack against their equations, and each argument shown to do what it says."""

import json

import keras
import numpy as np
import pytest

from keras_tx.layers import Encoder, EncoderLayer, FeedForward
from tests.tools import OTHER_WAY, assert_close, normal, randomize, to_numpy

B, T, N, D, F = 2, 5, 3, 12, 17


def layer_norm(x, norm):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon) * to_numpy(norm.gamma) + to_numpy(norm.beta)


def rms_norm(x, norm):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon) * to_numpy(norm.scale)


def dense(x, layer):
    return x @ to_numpy(layer.kernel).astype("float64") + to_numpy(layer.bias)


def made(cls, *args, **kwargs):
    layer = cls(*args, **kwargs)
    layer(normal(B, T, D))
    return randomize(layer)


def test_feed_forward_is_its_equation():
    x = normal(B, T, D).astype("float64")
    layer = made(FeedForward, F)
    expected = dense(np.maximum(dense(x, layer.intermediate_dense), 0), layer.output_dense)
    assert_close(layer(x), expected, atol=5e-6)
    gated = made(FeedForward, F, activation="silu", gated=True)
    gate = dense(x, gated.gate_dense)
    expected = dense(gate / (1 + np.exp(-gate)) * dense(x, gated.intermediate_dense), gated.output_dense)
    assert_close(gated(x), expected, atol=5e-6)


def test_feed_forward_without_bias_has_no_bias_and_dropout_only_trains():
    layer = made(FeedForward, F, use_bias=False, dropout=0.9)
    assert [w.name for w in layer.weights if "seed" not in w.path] == ["kernel", "kernel"]
    x = normal(B, T, D)
    assert np.abs(to_numpy(layer(x, training=True)) - to_numpy(layer(x))).max() > 1e-2
    assert_close(layer(x), layer(x), atol=0)


@pytest.mark.parametrize("normalize_first", [False, True])
@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
def test_an_encoder_layer_is_attention_and_feed_forward_with_residuals_and_norms(normalize_first, normalization):
    layer = made(
        EncoderLayer, F, N, normalize_first=normalize_first, normalization=normalization, layer_norm_epsilon=0.01
    )
    norm = {"layer_norm": layer_norm, "rms_norm": rms_norm}[normalization]
    attend = lambda x: to_numpy(layer.self_attention(x.astype("float32"), x.astype("float32"))).astype("float64")
    feed = lambda x: to_numpy(layer.feed_forward(x.astype("float32"))).astype("float64")
    x = normal(B, T, D).astype("float64")
    if normalize_first:
        middle = x + attend(norm(x, layer.self_attention_norm))
        expected = middle + feed(norm(middle, layer.feed_forward_norm))
    else:
        middle = norm(x + attend(x), layer.self_attention_norm)
        expected = norm(middle + feed(middle), layer.feed_forward_norm)
    assert_close(layer(x), expected, atol=1e-5)


def test_a_stack_is_its_layers_one_after_another_and_a_norm_at_the_end_of_pre_norm():
    x = normal(B, T, D)
    for normalize_first in (False, True):
        stack = made(Encoder, 2, F, N, normalize_first=normalize_first)
        output, scores = stack(x, return_attention_scores=True)
        first, first_scores = stack.layers[0](x, return_attention_scores=True)
        second, second_scores = stack.layers[1](first, return_attention_scores=True)
        assert_close(output, stack.final_norm(second) if normalize_first else second, atol=0)
        assert_close(scores, np.stack([to_numpy(first_scores), to_numpy(second_scores)], 1), atol=0)
        assert to_numpy(scores).shape == (B, 2, N, T, T)
        assert_close(to_numpy(scores).sum(-1), np.ones((B, 2, N, T)))


def test_asking_for_scores_changes_no_output():
    for layer in (made(EncoderLayer, F, N), made(Encoder, 2, F, N)):
        x = normal(B, T, D)
        assert_close(layer(x, return_attention_scores=True)[0], layer(x), atol=OTHER_WAY)


def test_attention_mask_and_bias_reach_every_layer():
    stack, x = made(Encoder, 2, F, N), normal(B, T, D)
    diagonal = np.eye(T, dtype="bool")[None]
    _, scores = stack(x, attention_mask=diagonal, return_attention_scores=True)
    assert_close(scores, np.broadcast_to(np.eye(T), (B, 2, N, T, T)))
    bias = np.where(diagonal, 0.0, -1e4).astype("float32")
    assert_close(stack(x, attention_bias=bias), stack(x, attention_mask=diagonal))


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_by_itself(name):
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, name: 0.5}
    layer, x = made(EncoderLayer, F, N, **rates), normal(B, T, D)
    assert layer.self_attention.dropout == rates["attention_dropout"]
    assert layer.feed_forward.dropout == rates["activation_dropout"]
    assert np.abs(to_numpy(layer(x, training=True)) - to_numpy(layer(x))).max() > 1e-3
    silent = made(EncoderLayer, F, N, **{**rates, name: 0.0})
    assert_close(silent(x, training=True), silent(x), atol=0)


def test_attention_dropout_is_dropout_unless_given():
    assert EncoderLayer(F, N, dropout=0.3).attention_dropout == 0.3
    assert EncoderLayer(F, N, dropout=0.3, attention_dropout=0.0).attention_dropout == 0.0


def test_attention_options_reach_the_attention():
    options = {"key_dim": 5, "num_key_value_heads": 1, "sliding_window": 2, "qk_norm": True, "scale": 0.5}
    layer = made(Encoder, 2, F, N, attention_options=options)
    for inner in layer.layers:
        assert {name: getattr(inner.self_attention, name) for name in options} == options
    assert layer.get_config()["attention_options"] == options
    _, scores = layer(normal(B, T, D), return_attention_scores=True)
    assert not to_numpy(scores)[..., 0, 2:].any()


def test_activation_bias_and_initializer_reach_the_projections():
    layer = made(EncoderLayer, F, N, activation="tanh", use_bias=False)
    assert layer.feed_forward.activation is keras.activations.tanh
    assert not [w.path for w in layer.weights if w.path.endswith("bias")]
    ones = EncoderLayer(F, N, kernel_initializer="ones")
    ones(normal(B, T, D))
    assert to_numpy(ones.self_attention.query_dense.kernel).min() == 1
    assert to_numpy(ones.feed_forward.output_dense.kernel).min() == 1


def test_layers_of_one_stack_start_with_different_weights():
    stack = Encoder(2, F, N)
    stack(normal(B, T, D))
    first, second = (to_numpy(layer.feed_forward.output_dense.kernel) for layer in stack.layers)
    assert np.abs(first - second).max() > 1e-2


def test_attention_options_may_be_objects_and_are_saved():
    layer = EncoderLayer(F, N, attention_options={"kernel_initializer": keras.initializers.HeNormal(seed=3)})
    config = json.loads(json.dumps(layer.get_config()))
    again = EncoderLayer.from_config(config)
    layer(normal(B, T, D)), again(normal(B, T, D))
    assert_close(again.self_attention.query_dense.kernel, layer.self_attention.query_dense.kernel, atol=0)


def test_functions_may_be_initializers():
    layer = EncoderLayer(F, N, kernel_initializer=lambda shape, dtype: keras.ops.full(shape, 0.5, dtype))
    layer(normal(B, T, D))
    assert to_numpy(layer.feed_forward.output_dense.kernel).max() == 0.5


@pytest.mark.parametrize("shape", [(2, 3, 4, D), (2, D), (2, 3, D + 1)])
def test_inputs_of_another_rank_or_width_are_refused(shape):
    for layer in (made(EncoderLayer, F, N), made(Encoder, 2, F, N)):
        with pytest.raises(ValueError, match=r"incompatible with the layer: expected"):
            layer(np.ones(shape, "float32"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncoderLayer(F, N)(None), r"`inputs` must be a tensor \(B, T, D\). Received: inputs=None"),
        (lambda: EncoderLayer(F, N)(keras.Input((None, None))), r"a last axis of known size. Received: .*None\)"),
        (lambda: FeedForward(0), "`intermediate_dim` must be a positive integer. Received: intermediate_dim=0"),
        (lambda: FeedForward(F, dropout=1), r"`dropout` must be a number in \[0, 1\). Received: dropout=1"),
        (lambda: EncoderLayer(-1, N), "`intermediate_dim` must be a positive integer. Received: intermediate_dim=-1"),
        (lambda: EncoderLayer(N, F), "may have been swapped: .* Received: intermediate_dim=3, num_heads=17"),
        (lambda: Encoder(2, N, F), "may have been swapped: .* Received: intermediate_dim=3, num_heads=17"),
        (lambda: EncoderLayer(F, 0), "`num_heads` must be a positive integer. Received: num_heads=0"),
        (lambda: EncoderLayer(F, N, dropout=2), "`dropout` must be a number .* dropout=2"),
        (lambda: EncoderLayer(F, N, attention_dropout=-1), "`attention_dropout` must be .* attention_dropout=-1"),
        (lambda: EncoderLayer(F, N, activation_dropout="1"), "`activation_dropout` must be .*activation_dropout='1'"),
        (lambda: EncoderLayer(F, N, normalization="x"), "`normalization` must be one of .*normalization='x'"),
        (lambda: EncoderLayer(F, N, layer_norm_epsilon=-1.0), "`layer_norm_epsilon` must be .*epsilon=-1.0"),
        (lambda: EncoderLayer(F, N, attention_options={"x": 1}), r"`attention_options` must be a dict .*'x': 1"),
        (lambda: EncoderLayer(F, N, attention_options={"num_heads": 1}), "`attention_options` must .*'num_heads': 1"),
        (lambda: EncoderLayer(F, N, attention_options=3), "`attention_options` must .*attention_options=3"),
        (lambda: Encoder(0, F, N), "`num_layers` must be a positive integer. Received: num_layers=0"),
        (lambda: Encoder(1, F, 5)(normal(B, T, D)), "divisible by `num_heads`.* Received: hidden_dim=12, num_heads=5"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Layers that are alike are traced once for XLA, and outputs are those of each layer on its own."""

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx.internals.keras_models import replace_dtype_policy, set_keras_mask
from keras_tx.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    FeedForward,
    RelativePositionBias,
    RotaryEmbedding,
    xla,
)
from keras_tx.layers.shared_trace import are_alike
from tests.tools import assert_close, randomize, to_numpy

pytestmark = pytest.mark.tensorflow
B, T, S, D, N, F = 2, 5, 7, 12, 3, 17
LAYERS = 3
REAL = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], "bool")


@keras.saving.register_keras_serializable("tests")
class MaskedMean(keras.layers.Layer):
    """A norm that looks at the mask which Keras attaches to its inputs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, inputs, mask=None):
        if mask is None:
            return inputs
        return inputs - ops.sum(inputs * ops.cast(mask, inputs.dtype)[..., None], axis=1, keepdims=True)


class Scaled(keras.layers.Layer):
    """A layer without `get_config`, whose constructor has an argument that Keras cannot write."""

    def __init__(self, factor):
        super().__init__()
        self._factor = factor[0]

    def call(self, inputs):
        return inputs * self._factor


def with_int8(stack):
    stack.layers[1].feed_forward.output_dense.quantize("int8")


def all_int8(stack):
    for layer in stack.layers:
        layer.feed_forward.output_dense.quantize("int8")
        layer.self_attention.query_dense.quantize("int8")


def float32_within(stack):
    """Products in float32, with weights that bfloat16 would round."""
    for layer in stack.layers:
        replace_dtype_policy(layer.feed_forward.output_dense, "float32")


def scaled(factor):
    def activation(x):
        return factor * x

    return activation


def with_another_activation(stack):
    for layer in stack.layers:
        layer.feed_forward.intermediate_dense.activation = ACTIVATIONS[layer.name == "layer_2"]


ACTIVATIONS = scaled(2.0), scaled(-3.0)


def with_lora(stack):
    layer = stack.layers[2].self_attention.query_dense
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.random.default_rng(3).normal(size=layer.lora_kernel_b.shape))


def with_a_window(stack):
    stack.layers[2].self_attention.sliding_window = 2


def frozen(stack):
    stack.layers[0].trainable = False


def nothing(stack):
    pass


WINDOWS = [{"sliding_window": 2, "rotary": True}, {"rotary": True}, {"sliding_window": 2, "rotary": True}]
CASES = {  # (class, arguments, what is done after building, how many layers are traced)
    "plain": (Decoder, {}, nothing, 1),
    "encoder": (Encoder, {"normalize_first": True, "gated": True}, nothing, 1),
    "memory": (Decoder, {"cross_attention": True}, nothing, 1),
    "rotary": (Encoder, {"attention_options": {"rotary": True, "num_key_value_heads": 1}}, nothing, 1),
    "windows": (Decoder, {"attention_options": WINDOWS}, nothing, 2),
    "first without norm": (Encoder, {"normalize_first": True, "normalize_inputs": False}, nothing, 2),
    "bias": (Decoder, {"position_bias": "relative"}, nothing, 1),
    "bfloat16": (Encoder, {"dtype": "mixed_bfloat16"}, nothing, 1),
    "of a user": (Encoder, {"normalization": MaskedMean()}, nothing, LAYERS),
    "int8": (Encoder, {}, with_int8, 2),
    "int8 everywhere": (Encoder, {}, all_int8, 1),
    "float32 within": (Encoder, {"dtype": "mixed_bfloat16"}, float32_within, 1),
    "another activation": (Decoder, {}, with_another_activation, 2),
    "lora": (Decoder, {}, with_lora, 2),
    "changed": (Decoder, {}, with_a_window, 2),
    "frozen": (Decoder, {}, frozen, 2),
}


@pytest.fixture
def traced(monkeypatch):
    """The names of the layers that are called, in order."""
    names = []
    for kind in (EncoderLayer, DecoderLayer):

        def noted(self, *args, call=kind.call, **kwargs):
            names.append(self.name)
            return call(self, *args, **kwargs)

        noted.__signature__ = inspect.signature(kind.call)
        monkeypatch.setattr(kind, "call", noted)
    return names


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_each_layer_on_its_own(name, traced):
    import tensorflow as tf

    kind, options, change, count = CASES[name]
    random = np.random.default_rng(1)
    x = random.normal(size=(B, T, D)).astype("float32")
    given = {"memory": random.normal(size=(B, S, D)).astype("float32")} if options.get("cross_attention") else {}
    stack = kind(LAYERS, F, N, **options)
    stack(x, **given)
    randomize(stack, scale=0.4)
    change(stack)

    def outputs():
        inputs = tf.constant(x)
        set_keras_mask(inputs, tf.constant(REAL))
        return stack(inputs, training=False, return_hidden_states=True, **given)

    atol = 0.02 if name == "bfloat16" else 1e-5
    if name in ("bfloat16", "float32 within") and "bf16" not in Path("/proc/cpuinfo").read_text():
        atol = 0.1  # without products of bfloat16 numbers TensorFlow cuts digits off where it should round
    # Graphs may round otherwise than eager operations; the others take less time to run than to trace.
    each = tf.function(outputs) if name.startswith(("bfloat16", "float32 within", "int8")) else outputs
    expected = each()
    traced.clear()
    function = tf.function(outputs)
    with xla.tracing(True):
        got = function()
    assert len(traced) == len(set(traced)) == count
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, atol=atol)
    stack.layers[1].feed_forward.output_dense.bias.assign_add(np.eye(D)[0])
    after = each()[0]
    assert np.abs(to_numpy(after) - to_numpy(expected[0])).max() > max(0.05, 2 * atol)
    assert_close(function()[0], after, atol=atol)  # the weights are no constants


def test_a_layer_with_a_call_of_its_own_computes_that(traced):
    import tensorflow as tf

    stack, x = Encoder(LAYERS, F, N), np.random.default_rng(1).normal(size=(B, T, D)).astype("float32")
    stack(x)
    randomize(stack, scale=0.4)
    usual = to_numpy(stack(x, training=False))
    stack.layers[2].call = lambda inputs, *args, **kwargs: 3.0 * inputs
    expected = stack(x, training=False)
    assert np.abs(to_numpy(expected) - usual).max() > 0.1
    traced.clear()
    with xla.tracing(True):
        got = tf.function(lambda: stack(x, training=False))()
    assert_close(got, expected, atol=1e-5)
    assert set(traced) <= {"layer_0", "layer_1"} and len(traced) <= 2  # with and without a mask on the inputs


@pytest.mark.parametrize("training", [None, True])
def test_in_training_and_without_xla_each_layer_is_traced(training, traced):
    import tensorflow as tf

    stack = Encoder(LAYERS, F, N)
    x = tf.ones((B, T, D))
    stack(x)
    for by_xla, mode in ((True, training), (False, False)):
        traced.clear()
        with xla.tracing(by_xla):
            tf.function(lambda mode=mode: stack(x, training=mode)).get_concrete_function()
        assert len(traced) == LAYERS


def test_layers_of_which_keras_cannot_tell_the_arguments_are_never_alike():
    layers = [Scaled(np.array([2.0])) for _ in range(2)]
    for layer in layers:
        layer(np.ones((2, 3)))
    assert not are_alike(*layers) and are_alike(layers[0], layers[0])


@pytest.mark.parametrize(
    ("options", "others", "alike"),
    [
        ({}, {}, True),
        ({}, {"name": "another"}, True),
        ({}, {"activation": "gelu"}, False),
        ({}, {"dropout": 0.1}, False),
        ({}, {"dtype": "mixed_bfloat16"}, False),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, False),
        ({}, {"use_bias": False}, False),
        (
            {"attention_options": {"rotary": True}},
            {"attention_options": {"rotary": RotaryEmbedding(base=7.0)}},
            False,
        ),
        ({"attention_options": {"rotary": True}}, {"attention_options": {"rotary": True}, "name": "another"}, True),
        ({"layer_norm_epsilon": 1e-5}, {"layer_norm_epsilon": 1e-6}, False),
    ],
)
def test_what_is_alike(options, others, alike):
    first, second = (EncoderLayer(F, N, **given) for given in (options, others))
    for layer in (first, second):
        layer.build((None, None, D))
    assert are_alike(first, second) is alike


def test_layers_whose_config_fails_are_never_alike(monkeypatch):
    layers = [EncoderLayer(F, N) for _ in range(2)]
    for layer in layers:
        layer.build((None, None, D))
    assert are_alike(*layers)
    monkeypatch.setattr(FeedForward, "get_config", lambda self: self.no_such_attribute)
    assert not are_alike(*layers)


def test_other_kinds_and_other_shapes_are_not_alike():
    layers = [EncoderLayer(F, N), DecoderLayer(F, N), EncoderLayer(F + 1, N), RelativePositionBias(N)]
    for layer in layers:
        layer.build((None, None, D))
    wider = EncoderLayer(F, N)
    wider.build((None, None, 2 * D))
    assert not any(are_alike(layers[0], other) for other in [*layers[1:], wider])

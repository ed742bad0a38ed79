"""Gradient checkpointing: the same outputs and gradients, dropout included."""

import contextlib

import keras
import numpy as np
import pytest

from keras_tx.internals import keras_models
from keras_tx.layers import Decoder, Encoder, EncoderLayer, MultiHeadAttention
from keras_tx.layers.dropout import Dropout
from keras_tx.layers.seeds import RepeatedSeeds
from tests.tools import assert_close, gradients, normal, randomize, to_numpy

STACKS = {
    "encoder": (Encoder, {"position_bias": "relative"}, ()),
    "decoder": (Decoder, {"cross_attention": True, "normalize_first": True}, ((2, 5, 6),)),
}


def made(kind, **options):
    """A stack of known weights and seeds with `remat`, and its inputs."""
    cls, own, memory = STACKS[kind]
    keras.utils.set_random_seed(5)
    stack = cls(2, 7, 3, **{"remat": True, **own, **options})
    stack.build((2, 11, 6), *memory)
    return randomize(stack), [normal(2, 11, 6), *[normal(*shape, seed=1) for shape in memory]]


def slopes(kind, attention_mask=None, **options):
    """Outputs and gradients in training."""
    stack, tensors = made(kind, **options)
    masks = {"mask": np.arange(11)[None] < [[11], [7]], "attention_mask": attention_mask}
    return gradients(lambda *x: stack(*x, **masks, training=True), tensors)


def learned(kind, **options):
    """The weights after a step of training."""
    stack, tensors = made(kind, **options)
    inputs = [keras.Input(x.shape[1:]) for x in tensors]
    model = keras.Model(inputs, stack(*inputs))
    # What it is compared with needs no graph, which takes seconds to trace.
    eagerly = keras.backend.backend() == "tensorflow" and not stack.remat
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False, run_eagerly=eagerly)
    model.fit(tensors, normal(2, 11, 6, seed=9), epochs=1, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("of", [slopes, learned])
def test_it_changes_neither_gradients_nor_what_is_learned(of, kind):
    for got, expected in zip(of(kind), of(kind, remat=False), strict=True):
        assert_close(got, expected, atol=2e-6)


@pytest.mark.parametrize("kind", STACKS)
def test_each_layer_is_computed_again_in_training_alone(monkeypatch, kind):
    remat, asked = keras.remat, []
    monkeypatch.setattr(keras, "remat", lambda function: asked.append(1) or remat(function))
    stack, tensors = made(kind)
    stack(*tensors)
    assert not asked
    stack(*tensors, training=True)
    assert len(asked) == len(stack.layers)


@pytest.mark.parametrize("kind", STACKS)
@pytest.mark.parametrize("remat", [False, True])
def test_the_config_keeps_it(kind, remat):
    stack, _ = made(kind, remat=remat)
    assert type(stack).from_config(stack.get_config()).remat is remat


def test_an_activity_regularizer_is_refused():
    stack, tensors = made("encoder", attention_options={"activity_regularizer": "l2"})
    stack(*tensors)
    with pytest.raises(ValueError, match="`remat` cannot be used with `activity_regularizer`. Received: .*'query'"):
        stack(*tensors, training=True)


@pytest.mark.parametrize(("of", "kind"), [(slopes, "encoder"), (slopes, "decoder"), (learned, "decoder")])
def test_dropout_drops_the_same_when_it_is_computed_again(monkeypatch, of, kind):
    rates = {"dropout": 0.4, "attention_dropout": 0.2, "activation_dropout": 0.3}
    got = of(kind, **rates)
    monkeypatch.setattr(keras, "remat", lambda function: function)  # the same seeds, and nothing computed again
    for one, expected in zip(got, of(kind, **rates), strict=True):
        # JAX 0.11 fuses the computation that is done again in another way than the first.
        atol = 5e-5 if keras.backend.backend() == "jax" else 2e-6
        assert_close(one, expected, atol=atol)
    if of is slopes:
        assert np.abs(got[0] - slopes(kind)[0]).max() > 1e-2


def test_a_dropout_called_twice_drops_others_the_second_time_and_the_same_again():
    plain, layer = (Dropout(0.5, seed=3) for _ in range(2))
    ones = np.ones((5, 101), "float32")
    expected = [to_numpy(plain(ones, training=True)) for _ in range(3)]
    seeds, drawn = RepeatedSeeds(layer), []
    for _ in range(2):
        with seeds.run():
            drawn.append([to_numpy(layer(ones, training=True)) for _ in range(2)])
    seeds.finish()
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert 0.4 < (drawn[0][0] != drawn[0][1]).mean() < 0.6
    np.testing.assert_array_equal([*drawn[0], to_numpy(layer(ones, training=True))], expected)


class WithDropout(EncoderLayer):
    """A layer of a user's own, with Keras' dropout in it, which is called twice."""

    def build(self, shape):
        super().build(shape)
        self.own_dropout = keras.layers.Dropout(0.3, seed=4)

    def call(self, inputs, mask=None, training=None, **options):
        outputs = super().call(inputs, mask=mask, training=training, **options)
        return self.own_dropout(outputs, training=training) + self.own_dropout(inputs, training=training)


class OwnStack(Encoder):
    layer_class = WithDropout


def trained(cls, scope, **options):
    """Outputs and gradients in training with dropout, twice, of a stack made in a scope."""
    with scope:
        keras.utils.set_random_seed(5)
        stack = cls(2, 7, 3, dropout=0.4, attention_dropout=0.2, activation_dropout=0.3, **options)
        stack.build((2, 11, 6))
        randomize(stack)
        found = [gradients(lambda x: stack(x, training=True), [normal(2, 11, 6)]) for _ in range(2)]
    return [*found[0], *found[1]]


@pytest.mark.parametrize(
    ("cls", "mode", "options"),
    [
        (Encoder, "full", {}),
        (Encoder, "full", {"remat": True}),
        (Encoder, None, {"remat": True}),
        (OwnStack, None, {"remat": True}),  # in a scope, Keras computes its own dropout again by itself, with new seeds
    ],
)
def test_dropout_is_that_without_gradient_checkpointing(cls, mode, options):
    scope = contextlib.nullcontext() if mode is None else keras.RematScope(mode=mode)
    expected = trained(cls, contextlib.nullcontext())
    for got, one in zip(trained(cls, scope, **options), expected, strict=True):
        assert_close(got, one, atol=5e-5 if keras.backend.backend() == "jax" else 1e-5)
    assert np.abs(expected[0] - expected[len(expected) // 2]).max() > 1e-2  # each call drops others


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="there `gradients` computes the output by itself")
def test_in_a_scope_gradients_are_those_of_the_output_that_was_computed():
    """For each element the output is a multiple of the input, and the gradient that multiple."""
    with keras.RematScope(mode="full"):
        layer = Dropout(0.4)
    x = 1 + np.abs(normal(2, 11, 6))
    outputs, gradient = gradients(lambda x: layer(x, training=True), [x])
    assert 0.2 < (outputs == 0).mean() < 0.6
    assert_close(gradient, normal(*outputs.shape, seed=99) * outputs / x, atol=1e-5)


class WithoutTraining(EncoderLayer):
    """Takes `training` from the layer that calls it."""

    def call(self, inputs, mask=None):
        return super().call(inputs, mask=mask)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="there `gradients` computes the output by itself")
def test_in_a_scope_a_layer_without_the_argument_training_drops_the_same_again():
    class Outer(keras.layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x, training=None):
            return self.inner(x)

    found = []
    for scope in (contextlib.nullcontext(), keras.RematScope(mode="full")):
        keras.utils.set_random_seed(5)
        with scope:
            inner = WithoutTraining(7, 3, dropout=0.4)
            inner.build((2, 11, 6))
        outer = Outer(randomize(inner))
        keras.utils.set_random_seed(6)
        found.append(gradients(lambda x, outer=outer: outer(x, training=True), [normal(2, 11, 6)]))
    for got, expected in zip(*found, strict=True):
        assert_close(got, expected, atol=1e-5)


def test_at_inference_no_seed_is_drawn():
    with keras.RematScope(mode="full"):
        layer = EncoderLayer(7, 3, dropout=0.4)
        layer.build((2, 11, 6))
    before = [to_numpy(variable) for variable in layer.non_trainable_variables]
    assigned = []
    for generator in keras_models.seed_generators_within(layer):
        generator.next = lambda ordered=True: assigned.append(1)
    layer(normal(2, 11, 6))
    layer(normal(2, 11, 6), training=False)
    assert not assigned
    for variable, value in zip(layer.non_trainable_variables, before, strict=True):
        np.testing.assert_array_equal(to_numpy(variable), value)


def of_attention(x, y, bias, layer):
    return layer(x, y, attention_bias=bias, key=2 * y) + layer(y, y) + layer(query=x, value=x)


SCOPED = {
    "attention": (lambda: MultiHeadAttention(3, 2), of_attention),
    "encoder": (lambda: Encoder(2, 7, 3, position_bias="relative"), lambda x, y, bias, layer: layer(x + y)),
    "decoder": (
        lambda: Decoder(2, 7, 3, cross_attention=True),
        lambda x, y, bias, layer: layer(x, memory=y, attention_bias=bias),
    ),
}


def scoped(kind, mode):
    """Outputs and the gradients of all arguments, also by name, of a layer made in a `keras.RematScope`."""
    make, call = SCOPED[kind]
    tensors = [normal(2, 5, 6), normal(2, 5, 6, seed=1), normal(1, 3, 5, 5)]
    scope = contextlib.nullcontext() if mode is None else keras.RematScope(**mode)
    with scope:
        keras.utils.set_random_seed(5)
        layer = make()
        call(*tensors, layer)
        randomize(layer)
        return gradients(lambda *x: call(*x, layer), tensors)


@pytest.mark.parametrize("kind", SCOPED)
@pytest.mark.parametrize("mode", [{"mode": "full"}, {"mode": "larger_than", "output_size_threshold": 7}], ids=str)
def test_a_scope_of_keras_changes_no_gradient(kind, mode):
    for got, expected in zip(scoped(kind, mode), scoped(kind, None), strict=True):
        assert_close(got, expected, atol=5e-6)


def test_a_position_bias_learns_in_a_scope_of_keras():
    after = []
    for scope in (contextlib.nullcontext(), keras.RematScope(mode="full")):
        with scope:
            stack, (x,) = made("encoder", remat=False)
        inputs = keras.Input(x.shape[1:])
        model = keras.Model(inputs, stack(inputs))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        before = to_numpy(stack.position_bias.embeddings)
        model.fit(x, normal(2, 11, 6, seed=9), verbose=0)
        after.append(to_numpy(stack.position_bias.embeddings))
    assert np.abs(after[0] - before).max() > 1e-4
    assert_close(*after, atol=2e-6)

"""Gradient checkpointing: the same outputs and gradients, dropout included."""

import contextlib

import keras
import numpy as np
import pytest

from keras_tx.layers import Decoder, Encoder, MultiHeadAttention
from keras_tx.layers.dropout import Dropout, given_seeds
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
        assert_close(one, expected, atol=1e-5 if keras.backend.backend() == "jax" else 2e-6)
    if of is slopes:
        assert np.abs(got[0] - slopes(kind)[0]).max() > 1e-2


def test_a_dropout_called_twice_drops_others_the_second_time():
    layer = Dropout(0.5, seed=3)
    ones, seed = np.ones((5, 101), "float32"), layer.seed_generator.next()
    drawn = []
    for _ in range(2):
        with given_seeds({layer: seed}):
            drawn.append([to_numpy(layer(ones, training=True)) for _ in range(2)])
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert 0.4 < (drawn[0][0] != drawn[0][1]).mean() < 0.6


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

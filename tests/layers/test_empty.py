"""Batches of no rows and sequences of no tokens: all layers and ways of attention give an empty result or zeros."""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import layers
from keras_tx.layers.attention.blockwise import attend_blockwise
from keras_tx.layers.attention.dense import attend, attend_cached
from keras_tx.layers.cache import KeyValue
from keras_tx.layers.masks import Visible
from keras_tx.models.pooling import POOLINGS, TokenPooling
from tests import catalogue
from tests.tools import gradients, normal, to_numpy

BACKEND = keras.backend.backend()
EMPTY = [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0), (2, 0, 0)]  # batch, queries, keys
RULES = list(itertools.product((False, True), (None, 3), (False, True), (False, True)))


def heads(batch, queries, keys):
    return normal(batch, queries, 6, 5), normal(batch, keys, 2, 5, seed=1), normal(batch, keys, 2, 3, seed=2)


def visible_keys(batch, queries, keys, causal, window, padded, documents):
    ones = lambda length: np.ones((batch, length), "int32")
    return Visible(
        queries=ones(queries) > 0 if padded else None,
        keys=(ones(keys) > 0,) if padded else (),
        documents=ones(queries) if documents and queries == keys else None,
        causal=causal,
        window=window,
    )


def assert_zeros(output, shape):
    assert to_numpy(output).shape == shape and not to_numpy(output).any()


@pytest.mark.parametrize("shape", EMPTY)
def test_every_way_of_attention(shape):
    batch, queries, keys = shape
    bias = normal(1, 6, queries, keys)
    for *rules, with_bias in [(*rules, b) for rules in RULES[:: 1 if BACKEND != "jax" else 5] for b in (None, bias)]:
        visible = visible_keys(*shape, *rules)
        tensors = [*heads(*shape)] if with_bias is None else [*heads(*shape), bias]
        by_blocks = lambda *x, visible=visible: attend_blockwise(*x[:3], visible, bias=dict(enumerate(x)).get(3))
        output, *slopes = gradients(by_blocks, tensors)
        assert_zeros(output, (batch, queries, 6, 3))
        for slope, tensor in zip(slopes, tensors, strict=True):
            assert_zeros(slope, tensor.shape)
        for hard in (False, True):
            options = {"mask": visible.whole(queries, keys), "bias": with_bias, "hard": hard}
            output, scores = attend(*tensors[:3], **options)
            assert_zeros(output, (batch, queries, 6, 3))
            assert to_numpy(scores).shape == (batch, 6, queries, keys)


@pytest.mark.parametrize("shape", [(0, 1, 7), (2, 1, 0)])
@pytest.mark.tensorflow
def test_attention_to_an_empty_cache(shape):
    query, key, value = heads(*shape)
    cache = KeyValue(*[ops.swapaxes(x, 1, 2) for x in (key, value)])
    assert_zeros(attend_cached(query, cache, visible_keys(*shape, True, 3, True, False)), (*shape[:2], 6, 3))


@pytest.mark.slow
@pytest.mark.tensorflow
def test_every_way_of_attention_in_a_graph_of_unknown_lengths():
    import tensorflow as tf

    def every_way(query, key, value, real):
        outputs, lengths = [], (ops.shape(query)[1], ops.shape(key)[1])
        rules = Visible(), Visible(keys=(real,), causal=True), Visible(keys=(real,), window=3)
        for visible, bias in zip(rules, (None, ops.zeros((1, 1, *lengths)), None), strict=True):
            outputs.append(attend_blockwise(query, key, value, visible, bias=bias, block_size=4))
            mask = visible.whole(*lengths)
            outputs += [attend(query, key, value, mask=mask, bias=bias, hard=hard)[0] for hard in (False, True)]
        slopes = tf.gradients(tf.add_n([tf.reduce_sum(one) for one in outputs[::3]]), [query, key, value])
        return outputs, slopes

    specs = [tf.TensorSpec((None, None, *x.shape[2:])) for x in heads(1, 1, 1)]
    graph = tf.function(every_way, input_signature=[*specs, tf.TensorSpec((None, None), "bool")])
    for batch, queries, keys in EMPTY:
        tensors = heads(batch, queries, keys)
        outputs, slopes = graph(*tensors, np.ones((batch, keys), "bool"))
        for output in outputs:
            assert_zeros(output, (batch, queries, 6, 3))
        for slope, tensor in zip(slopes, tensors, strict=True):
            assert_zeros(slope, tensor.shape)
    tensors, real = heads(2, 5, 7), np.random.default_rng(0).random((2, 7)) < 0.6
    for output, expected in zip(graph(*tensors, real)[0], every_way_one_by_one(tensors, real), strict=True):
        np.testing.assert_allclose(output, expected, atol=2e-6)


def every_way_one_by_one(tensors, real):
    """The softmax and hard attention of that graph, by `attend` with masks of NumPy."""
    row, column = np.arange(5)[:, None], np.arange(7)[None]
    real = real[:, None, None]
    for mask in (np.ones((1, 1, 5, 7), "bool"), real & (column <= row), real & (np.abs(row - column) < 3)):
        softmax, best = (to_numpy(attend(*tensors, mask=mask, hard=hard)[0]) for hard in (False, True))
        yield from (softmax, softmax, best)


# Layers

ROWS = [row for row in catalogue.ROWS if row.any_length]
VARIANTS = {
    **{catalogue.name(row): (row.make, row.inputs) for row in ROWS},
    **{
        f"attention {name}": (lambda options=options: layers.MultiHeadAttention(3, 4, **options), ROWS[0].inputs)
        for name, options in {
            "blockwise": {"blockwise": True, "rotary": True},
            "in windows": {"blockwise": True, "sliding_window": 2},
            "hard": {"hard_attention": True},
            "without kernels": {"flash_attention": False},
        }.items()
    },
    **{
        f"pooling {pooling}": (lambda pooling=pooling: TokenPooling(pooling), catalogue._vectors)
        for pooling in POOLINGS
    },
}
SHAPES = [(0, 5), (2, 0), (0, 0)]


@functools.cache
def layer_and_sizes(name):
    """A built layer, and the shape of its output with B in place of the batch and T of the length."""
    make, inputs = VARIANTS[name]
    layer = make()
    output = to_numpy(layer(**inputs(29, 9)))
    return layer, tuple({29: "B", 9: "T"}.get(size, size) for size in output.shape)


def check_output(name, output, batch, length):
    _, sizes = layer_and_sizes(name)
    assert to_numpy(output).shape == tuple({"B": batch, "T": length}.get(size, size) for size in sizes), name
    assert np.isfinite(to_numpy(output)).all(), name


@pytest.mark.parametrize("name", list(VARIANTS)[:: 5 if BACKEND == "jax" else 1])  # JAX compiles each shape anew
def test_every_layer(name):
    layer, _ = layer_and_sizes(name)
    for batch, length in SHAPES if BACKEND != "jax" else SHAPES[1:2]:
        inputs = VARIANTS[name][1](batch, length)
        check_output(name, layer(**inputs), batch, length)
        if "memory" in inputs or "value" in inputs:  # tokens that look at nothing
            other = "memory" if "memory" in inputs else "value"
            inputs = {**VARIANTS[name][1](2, 5), other: inputs[other][:0] if batch == 0 else inputs[other][:, :0]}
            inputs = {key: x[: len(inputs[other])] for key, x in inputs.items()}
            check_output(name, layer(**inputs), len(inputs[other]), 5)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.slow
@pytest.mark.tensorflow
def test_every_layer_in_a_graph(jit_compile):
    """In one graph of unknown lengths, and compiled by XLA for lengths of zero."""
    import tensorflow as tf

    names = list(VARIANTS)
    made = {name: layer_and_sizes(name)[0] for name in names}
    every = tf.function(
        lambda inputs: {name: made[name](**given) for name, given in inputs.items()}, jit_compile=jit_compile
    )
    inputs_of = lambda batch, length: {name: VARIANTS[name][1](batch, length) for name in names}
    if not jit_compile:
        spec = lambda x: tf.TensorSpec((None, None, *x.shape[2:]), x.dtype)
        every = every.get_concrete_function(tf.nest.map_structure(spec, inputs_of(2, 4)))
    for batch, length in SHAPES if not jit_compile else SHAPES[1:2]:
        inputs = tf.nest.map_structure(tf.constant, inputs_of(batch, length))
        for name, output in every(inputs).items():
            check_output(name, output, batch, length)

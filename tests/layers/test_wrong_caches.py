"""A `cache` that is none is refused with an error that says so, and so is one in a functional model."""

import re

import keras
import numpy as np
import pytest

from keras_tx.layers import Decoder, DecoderLayer, MultiHeadAttention
from keras_tx.layers.cache import KeyValue
from tests.tools import normal

X = normal(2, 1, 6)
LAYERS = {
    "attention": (lambda: MultiHeadAttention(3, 2), (X, X), lambda one: one),
    "layer": (lambda: DecoderLayer(7, 3), (X,), lambda one: (one,)),
    "stack": (lambda: Decoder(1, 7, 3), (X,), lambda one: ((one,),)),
}


@pytest.fixture(params=LAYERS)
def case(request):
    make, inputs, around = LAYERS[request.param]
    return make(), inputs, around


def test_a_plain_tuple_is_no_cache(case):
    layer, inputs, around = case
    plain = normal(2, 3, 5, 2), normal(2, 3, 5, 2)
    received = r"Received: cache of types \(*\w+, \w+\)"
    with pytest.raises(ValueError, match=rf"`cache` must be what `new_cache` .* {received}"):
        layer(*inputs, cache=around(plain), start=0)


@pytest.mark.parametrize(
    "wrap", [lambda cache: (cache,), lambda cache: 3, lambda cache: {"cache": cache}, lambda _: ()]
)
def test_nor_is_the_cache_of_another_layer(case, wrap):
    layer, inputs, around = case
    cache = around(KeyValue(*[normal(2, 3, 5, 2)] * 2))
    with pytest.raises(ValueError, match=r"`cache` must be what `new_cache` .* Received: cache of types (\(|int|dict)"):
        layer(*inputs, cache=wrap(cache), start=0)


@pytest.mark.parametrize("symbolic", ["inputs", "cache", "both"])
def test_a_functional_model_has_no_cache(case, symbolic):
    layer, inputs, around = case
    layer(*inputs)
    buffers = [normal(2, 3, 5, 2)] * 2 if symbolic == "inputs" else [keras.Input((3, 5, 2))] * 2
    inputs = inputs if symbolic == "cache" else [keras.Input((1, 6))] * len(inputs)
    with pytest.raises(ValueError, match="`cache` must be given in eager calls .* Received: cache, and a keras.Keras"):
        layer(*inputs, cache=around(KeyValue(*buffers)), start=0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_stack_needs_one_part_for_each_layer(count):
    layer = Decoder(2, 7, 3)
    layer(X)
    cache = (*layer.new_cache(2, 5), *layer.new_cache(2, 5))[:count]
    message = rf"`cache` must have one part for each layer .* Received: a cache of {count} parts for 2 layers"
    with pytest.raises(ValueError, match=message):
        layer(X, cache=cache, start=0)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("shape", [(1, 3, 5, 2), (3, 3, 5, 2), (2, 1, 5, 2), (2, 3, 5, 3)])
def test_a_cache_of_other_rows_or_heads_is_refused(case, shape, start):
    layer, inputs, around = case
    message = "`cache` must come from `new_cache` of this layer, with the batch size of the inputs. Received: a cache "
    with pytest.raises(ValueError, match=rf"{message}of shape {re.escape(str(shape))} .* for keys or values of shape"):
        layer(*inputs, cache=around(KeyValue(*[normal(*shape)] * 2)), start=start)


@pytest.mark.parametrize("start", [1.0, np.float32(1), [1], np.array([1])])
def test_the_first_slot_is_an_integer(case, start):
    layer, inputs, around = case
    with pytest.raises(ValueError, match="`start` must be an integer, or a scalar tensor with .* Received: start"):
        layer(*inputs, cache=around(KeyValue(*[normal(2, 3, 5, 2)] * 2)), start=start)

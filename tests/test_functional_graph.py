"""The graph of a functional model: sources, consumers, and all nodes in order, through nested models."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_tx.functional_graph import FunctionalGraph, consumers_of, is_optional_input, source_of


@pytest.fixture
def nested():
    """x -> inner(inner(x)) + x, inner being y -> tanh(dense(y)) in a Sequential in a model."""
    dense = layers.Dense(3, name="dense")
    inner_in = keras.Input((3,))
    sequential = keras.Sequential([dense, layers.Activation("tanh")])
    inner = keras.Model(inner_in, sequential(inner_in), name="inner")
    x = keras.Input((3,), name="x")
    once = inner(x)
    return keras.Model(x, inner(once) + x), inner, dense, once


def run(graph, *inputs):
    values = dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        args, kwargs = node.filled(values)
        node.store(values, node.operation(*args, **kwargs))
    return [ops.convert_to_numpy(values[number]) for number in graph.outputs]


def test_a_graph_computes_what_its_model_computes(nested):
    model, _, dense, _ = nested
    graph, x = FunctionalGraph(model), ops.convert_to_tensor(np.arange(6, dtype="float32").reshape(2, 3))
    assert [node.operation for node in graph.nodes].count(dense) == 2
    np.testing.assert_allclose(run(graph, x)[0], ops.convert_to_numpy(model(x)), rtol=1e-6)
    numbers = [number for node in graph.nodes for number in node.outputs]
    assert len(set(numbers) | set(graph.inputs)) == len(numbers) + 1  # each value has a number of its own


def test_a_graph_knows_the_arguments_of_a_call():
    class Sum(layers.Layer):
        def call(self, a, parts=(), scale=1.0):
            return (a + sum(parts)) * scale

    a, b, c = (keras.Input((2,), name=name) for name in "abc")
    graph = FunctionalGraph(keras.Model([a, b, c], Sum()(a, parts=[b, c], scale=2.0)))
    (node,) = graph.nodes
    assert node.numbers_of("a", 0) == [0] and node.numbers_of("parts", 1) == [1, 2] and node.numbers_of("mask", 5) == []
    assert node.filled({0: "A", 1: "B"}) == (("A",), {"parts": ["B", None], "scale": 2.0})
    assert run(graph, *(ops.ones((1, 2)) for _ in "abc"))[0].tolist() == [[6.0, 6.0]]


def test_sources(nested):
    model, inner, _, once = nested
    assert source_of(once).operation is inner and source_of(once).inputs[0] is model.inputs[0]
    assert isinstance(source_of(once, inside_models=True).operation, layers.Activation)
    assert isinstance(source_of(model.inputs[0]).operation, layers.InputLayer)
    assert source_of(keras.KerasTensor((2,))) is None and source_of(np.ones(2)) is None


def test_consumers_are_those_of_one_model_and_inside_nested_ones(nested):
    model, _, dense, once = nested
    x = model.inputs[0]
    keras.Model(x, layers.Dense(7)(x))  # another model of the same input
    first, second = consumers_of(x, model)
    assert first.operation is dense and [id(one) for one in second.inputs][-1] == id(x)
    assert [call.operation for call in consumers_of(once, model)] == [dense]


def test_an_optional_input_is_known():
    x, y = keras.Input((2,)), keras.Input((2,), optional=True)
    assert is_optional_input(y) and not is_optional_input(x) and not is_optional_input(layers.Dense(1)(x))

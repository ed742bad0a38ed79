"""Rows of the table, both ways, against NumPy and PyTorch's own layers; and the config's reader."""

import keras
import numpy as np
import pytest

from keras_tx.layers import MultiHeadAttention
from keras_tx.layers.projection import Projection
from keras_tx.layers.residual import make_norm
from keras_tx.pretrained import table
from keras_tx.pretrained.config import ACTIVATIONS, Config
from keras_tx.pretrained.families.seq2seq import Seq2SeqFamily
from keras_tx.pretrained.family import Family, PaddingMask, Positions, attention_sizes
from keras_tx.pretrained.table import AS_IS, CONV2D, KERNEL, LINEAR, VECTOR, Row
from tests.tools import normal, to_numpy


def variable(*shape):
    return keras.Variable(normal(*shape))


@pytest.mark.parametrize(
    ("how", "inputs", "ours", "theirs"),
    [
        (AS_IS, 1, [(5, 7)], (5, 7)),
        (AS_IS, 1, [(5,)], (5,)),
        (AS_IS, 1, [()], ()),
        (AS_IS, 1, [(2, 3), (2, 5)], (2, 8)),
        (VECTOR, 1, [(3, 5)], (15,)),
        (VECTOR, 1, [(3, 5), (2, 5), (2, 5)], (35,)),
        (LINEAR, 1, [(7, 5)], (5, 7)),
        (LINEAR, 1, [(7, 3, 5)], (15, 7)),
        (LINEAR, 2, [(3, 5, 7)], (7, 15)),
        (LINEAR, 1, [(7, 3, 5), (7, 2, 5), (7, 2, 5)], (35, 7)),
        (KERNEL, 1, [(7, 3, 5), (7, 2, 5)], (7, 25)),
        (KERNEL, 2, [(3, 5, 7)], (15, 7)),
        (CONV2D, 1, [(2, 3, 5, 7)], (7, 5, 2, 3)),
    ],
)
def test_a_row_writes_back_what_it_reads(how, inputs, ours, theirs):
    row = Row("name", [variable(*shape) for shape in ours], how, inputs)
    assert row.shape == theirs and len(row.variables) == len(ours)
    tensor = normal(*theirs, seed=1)
    read = row.read(tensor)
    assert [(one, value.shape) for one, value in read] == list(zip(row.variables, ours, strict=True))
    written = row.write([value for _, value in read])
    assert written.shape == theirs
    np.testing.assert_array_equal(written, tensor)


def test_what_is_read_computes_what_pytorch_computes():
    import torch

    x = normal(2, 5, 7)
    theirs = torch.nn.Linear(7, 11)
    ours = Projection(11)
    ours.build((None, None, 7))
    state = {f"it.{name}": value.detach().numpy() for name, value in theirs.state_dict().items()}
    for row in table.linear("it", ours):
        for one, value in row.read(state[row.theirs]):
            one.assign(value)
    expected = theirs(torch.tensor(x)).detach().numpy()
    np.testing.assert_allclose(to_numpy(ours(x)), expected, rtol=0, atol=1e-5)

    image = normal(2, 3, 8, 6)
    theirs = torch.nn.Conv2d(3, 5, kernel_size=(4, 2), stride=(4, 2))
    ours = keras.layers.Conv2D(5, (4, 2), strides=(4, 2), data_format="channels_last")
    ours.build((None, 8, 6, 3))
    [(kernel, value)] = Row("it.weight", ours.kernel, CONV2D).read(theirs.weight.detach().numpy())
    kernel.assign(value)
    ours.bias.assign(theirs.bias.detach().numpy())
    expected = theirs(torch.tensor(image)).detach().numpy()
    actual = to_numpy(ours(image.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_the_projections_of_attention_read_their_fused_tensor():
    """q, k and v in one tensor are the same as one after the other, with fewer key heads than query heads."""
    attention = MultiHeadAttention(6, 5, num_key_value_heads=3)
    attention.build((None, None, 7), (None, None, 7))
    layers = [attention.query_dense, attention.key_dense, attention.value_dense]
    weight, bias = table.linear("qkv", *layers)
    assert weight.shape == (60, 7) and bias.shape == (60,)
    tensor = normal(60, 7)
    x = normal(2, 4, 7)
    for one, value in [*weight.read(tensor), *bias.read(normal(60))]:
        one.assign(value)
    expected = x @ tensor.T + normal(60)
    for layer, heads, begin in zip(layers, (6, 3, 3), (0, 30, 45), strict=True):
        part = expected[..., begin : begin + 5 * heads].reshape(2, 4, heads, 5)
        np.testing.assert_allclose(to_numpy(layer(x)), part, rtol=0, atol=1e-5)
    weight, bias = table.linear("out", attention.output_dense)
    assert (weight.shape, bias.shape) == ((7, 30), (7,))
    assert [row.shape for row in table.linear("out", attention.output_dense, how=KERNEL)] == [(30, 7), (7,)]


def test_norms_and_layers_without_bias_have_one_row():
    layers = {name: make_norm(name, 1e-5) for name in ("layer_norm", "layer_norm_no_bias", "rms_norm")}
    layers["dense"] = Projection(3, use_bias=False)
    for layer in layers.values():
        layer.build((None, 5))
    holder = type("Holder", (), layers)
    rows = {row.theirs: row.shape for row in table.by_path("x", {name: name for name in layers}, holder)}
    one = {f"x.{name}.weight": (5,) for name in ("layer_norm", "layer_norm_no_bias", "rms_norm")}
    assert rows == {**one, "x.layer_norm.bias": (5,), "x.dense.weight": (3, 5)}


def test_keys_of_the_config_are_read_in_order_and_null_is_none():
    config = Config({"a": None, "b": 3, "c": 0.5, "rate": 0})
    assert config.take("a", "b") == 3 and config.take("a", default=None) is None
    assert config.number("a", default=0) == 0 and config.number("a", "b") == 3
    assert config.rate("c", default=1.0) == 0.5 and config.rate("rate", default=1.0) == 0
    with pytest.raises(
        ValueError, match=r"config.json must have `a`. Received: a=None, keys \['a', 'b', 'c', 'rate'\]"
    ):
        config.take("a", "d")
    with pytest.raises(
        ValueError, match=r"`c` in config.json must be a positive integer, at most \d+. Received: c=0.5"
    ):
        config.number("c")
    config.refuse("b", 2, 3)
    config.refuse("a")
    with pytest.raises(ValueError, match="`b` in config.json must be 2 or 5; nothing else is supported. Received: b=3"):
        config.refuse("b", 2, 5)
    with pytest.raises(ValueError, match="`b` in config.json must be null; nothing else is supported. Received: b=3"):
        config.refuse("b")
    with pytest.raises(ValueError, match="`heads` .*; `hidden` in config.json must be divisible|divisible by `heads`"):
        attention_sizes(Config({"hidden": 10, "heads": 3}), "hidden", "heads")


def test_activations_are_those_of_transformers():
    import torch
    from transformers.activations import ACT2FN as functions

    x = np.linspace(-6, 6, 101, dtype="float32")
    for name in ACTIVATIONS:
        expected = functions[name](torch.tensor(x)).numpy()
        actual = to_numpy(Config({"act": name}).activation("act")(keras.ops.convert_to_tensor(x)))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6, err_msg=name)


def test_padding_and_positions_without_and_with_what_is_given():
    ids = np.array([[0, 5, 1, 7, 1], [1, 1, 9, 2, 3]], "int32")
    assert to_numpy(PaddingMask()(ids)).all()
    np.testing.assert_array_equal(to_numpy(PaddingMask()(ids, ids)), ids != 0)
    np.testing.assert_array_equal(to_numpy(Positions()(ids)), [[0, 1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(to_numpy(Positions()(ids, 2 * ids)), 2 * ids)
    np.testing.assert_array_equal(to_numpy(Positions(1)(ids)), [[2, 3, 1, 4, 1], [1, 1, 2, 3, 4]])


@pytest.mark.parametrize("layer", [PaddingMask(), Positions(), Positions(1)])
def test_the_layers_of_inputs_have_a_config_and_a_symbolic_shape(layer):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config() == layer.get_config()
    ids = keras.Input((7,), dtype="int32")
    assert layer(ids).shape == (None, 7) and layer(ids).dtype == ("bool" if "mask" in layer.name else "int32")


def test_a_family_must_say_what_it_is():
    family = Family(Config({}), "base")
    with pytest.raises(NotImplementedError):
        family.outputs({}, False)
    with pytest.raises(NotImplementedError):
        family.rows()
    assert family.generation_model() is None and family.generation_options({}) == {}


def test_strategies_of_a_generation_config():
    from keras_tx import generation

    family = Family(Config({}), "base")
    assert family.strategy({}) == family.strategy({"num_beams": 1}) == generation.Greedy()
    beams = {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True}
    assert family.strategy(beams) == generation.Beam(3, length_penalty=0.6, early_stopping=True)
    sampled = {"do_sample": True, "temperature": 0.7, "min_p": 0.1}
    assert family.strategy({**sampled, "top_k": 5}) == generation.Sample(0.7, top_k=5, min_p=0.1)
    assert family.strategy(sampled) == generation.Sample(0.7, top_k=50, min_p=0.1)  # what transformers does unasked
    assert family.strategy({"do_sample": True, "top_k": 0, "top_p": 0.9}) == generation.Sample(top_p=0.9)
    with pytest.raises(
        ValueError, match="`num_beams` of the generation config is not supported with `do_sample`. .*=4"
    ):
        family.strategy({"do_sample": True, "num_beams": 4})


@pytest.mark.parametrize(
    "kind, method, arguments",
    [(Family, "outputs", ({}, False)), (Family, "rows", ()), (Seq2SeqFamily, "_embed", ("encoder", None))],
)
def test_a_family_without_a_method_is_told(kind, method, arguments):
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} must define `{method}`."):
        getattr(object.__new__(kind), method)(*arguments)

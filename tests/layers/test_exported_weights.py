"""Projections with the weights of an export, against their own calls and against NumPy."""

import keras
import numpy as np
import pytest

from keras_tx.layers import FeedForward, TokenEmbedding, projection
from keras_tx.layers import exported_weights as exported
from tests.tools import assert_close, normal, skip_without_int8_products, to_numpy

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow
FREE, IN, HEADS, SIZE = (3, 5), 14, 3, 7


def made(kind, activation=None, use_bias=True, biases="normal"):
    """A built layer with weights from a normal distribution."""
    if kind == "dense":
        layer, shape = projection.Projection(11, activation=activation, use_bias=use_bias), (None, None, IN)
    elif kind == "to heads":
        layer = projection.HeadProjection("abc,cde->abde", (None, HEADS, SIZE), bias_axes="de" if use_bias else None)
        shape = (None, None, IN)
    else:
        layer = projection.HeadProjection("abcd,cde->abe", (None, 11), bias_axes="e" if use_bias else None)
        shape = (None, None, HEADS, SIZE)
    layer.build(shape)
    random = np.random.default_rng(1)
    layer.set_weights([random.normal(size=weight.shape) for weight in layer.weights])
    if use_bias:
        layer.bias.assign(layer.bias * (biases == "normal"))
    return layer, shape


def traced(layer, shape, precision="float32", **options):
    """The layer as a function traced with exported weights, and what was made for it."""
    function = tf.function(lambda x: layer(x), input_signature=[tf.TensorSpec(shape, tf.float32)], autograph=False)
    with exported.exported_weights(precision, **options) as weights:
        function.get_concrete_function()
    return function, weights


def variables_of(function):
    """The variables that the graph of a function reads."""
    concrete = function.get_concrete_function()
    return [one for one in concrete.graph.variables if any(one.handle is x for x in concrete.captured_inputs)]


@pytest.mark.parametrize("kind", ["dense", "to heads", "from heads"])
@pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"biases": "zeros"}], ids=str)
@pytest.mark.parametrize("constants", [True, False])
def test_products_are_those_of_the_layer(kind, options, constants):
    layer, shape = made(kind, **options)
    function, weights = traced(layer, shape, constants=constants)
    assert bool(function.get_concrete_function().captured_inputs) == (not constants)
    assert (weights.size >= 4 * np.prod(layer.kernel.shape)) == constants
    for free in (FREE, (1, 1), (0, 5), (2, 0)):
        x = np.random.default_rng(2).normal(size=(*free, *shape[2:])).astype("float32")
        assert_close(function(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "to heads"])
@pytest.mark.parametrize(("precision", "atol"), [("bfloat16", 0.2), ("int8", 0.2)])
def test_of_a_layer_with_lora_a_lower_precision_has_the_sum_alone(kind, precision, atol):
    skip_without_int8_products(precision)
    layer, shape = made(kind)
    layer.enable_lora(2)
    random = np.random.default_rng(3)
    for added in (layer.lora_kernel_a, layer.lora_kernel_b):
        added.assign(random.normal(size=added.shape))
    function, weights = traced(layer, shape, precision, constants=False)
    captured = variables_of(function)
    own = {id(weight.value) for weight in layer.weights}
    assert len(captured) in (2, 3) and not own & {id(variable) for variable in captured}
    kernels = [one.dtype.name for one in captured if one.shape.num_elements() == np.prod(layer.kernel.shape)]
    assert kernels == [precision]
    x = random.normal(size=(*FREE, IN)).astype("float32")
    assert_close(function(x), layer(x), atol=atol, rtol=0.05)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("rows", [1, 7, 8, 13])
def test_an_activation_follows_and_few_rows_are_right(activation, rows):
    layer, _ = made("dense", activation=activation)
    x = np.random.default_rng(2).normal(size=(rows, IN)).astype("float32")
    for shape in ((None, IN), (None, 1, IN)):
        one = x if len(shape) == 2 else x[:, None]
        assert_close(traced(layer, shape)[0](one), layer(one), atol=1e-5, rtol=1e-5)


def in_int8(x, kernel, bias):
    """What `_int8_product` computes, in float64 with integers of 64 bits."""
    scale = np.abs(kernel).max(axis=0) / 127
    integers = np.round(kernel / scale).astype("int64")
    row_scale = np.abs(x).max(axis=1, keepdims=True) / 127
    return np.floor(x / row_scale + 0.5).astype("int64") @ integers * row_scale * scale + bias


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize("few", [False, True])
def test_int8_rounds_each_row_and_each_output_by_its_own_scale(few, constants):
    skip_without_int8_products()
    layer, _ = made("dense", biases="zeros")
    layer.kernel.assign(layer.kernel * 10.0 ** np.arange(-5, 6))  # outputs of very different sizes
    function, weights = traced(layer, (None, IN), "int8", constants=constants)
    x = np.random.default_rng(2).normal(size=(3 if few else 17, IN)).astype("float32")
    x *= 10.0 ** np.arange(len(x))[:, None] / 1e3
    kernel, bias = (to_numpy(one).astype("float64") for one in (layer.kernel, layer.bias))
    expected, exact = in_int8(x.astype("float64"), kernel, bias), to_numpy(layer(x))
    got = to_numpy(function(x))
    size = np.abs(x).max(axis=1, keepdims=True) * np.abs(kernel).max(axis=0)
    # A value halfway between two integers may be rounded to either: then a single product differs by one step.
    assert np.max(np.abs(got - expected) / size) < 1 / 127
    assert np.median(np.abs(got - expected) / size) < 1e-5
    assert 1e-4 < np.max(np.abs(got - exact) / size) < IN / 127
    assert weights.size == constants * (IN * 11 + 2 * 4 * 11)  # integers, scales and biases


def test_int8_of_rows_of_zeros_and_of_a_kernel_of_zeros_is_the_bias():
    skip_without_int8_products()
    layer, _ = made("dense")
    function, _ = traced(layer, (None, IN), "int8")
    assert_close(function(np.zeros((2, IN), "float32")), np.tile(layer.bias, (2, 1)), atol=0, rtol=0)
    layer.kernel.assign(0 * layer.kernel)
    function, _ = traced(layer, (None, IN), "int8")
    assert_close(function(np.ones((2, IN), "float32")), np.tile(layer.bias, (2, 1)), atol=0, rtol=0)


@pytest.mark.parametrize("constants", [True, False])
def test_bfloat16_rounds_the_inputs_and_the_weights(constants):
    layer, shape = made("dense")
    x = np.random.default_rng(2).normal(size=(*FREE, IN)).astype("float32")
    function, weights = traced(layer, shape, "bfloat16", constants=constants)
    rounded = [to_numpy(tf.cast(tf.cast(one, "bfloat16"), "float32")) for one in (x, layer.kernel, layer.bias)]
    product = rounded[0] @ rounded[1]
    expected = product + rounded[2]
    got = function(x)
    assert got.dtype == "float32"
    # Without instructions for bfloat16, TensorFlow cuts the product off, and rounds again behind the bias.
    assert np.all(np.abs(to_numpy(got) - expected) <= 2**-7 * (np.abs(product) + np.abs(expected)))
    assert np.abs(to_numpy(layer(x)) - expected).max() > 1e-3
    assert weights.size == constants * (2 * (IN * 11 + 11) + 4 * 11)


@pytest.mark.parametrize("gated", [False, True])
def test_what_a_product_in_bfloat16_gave_is_not_cast_there_and_back(gated, monkeypatch):
    """The bits are those that they have with both casts, since float32 holds every bfloat16."""
    layer, x = FeedForward(11, activation="relu", gated=gated), normal(3, 5, IN)
    layer.build((None, None, IN))

    def casts(function):
        """How many of the two products take what was cast from bfloat16 to float32 and back."""
        count = 0
        for product in (op for op in function.get_concrete_function().graph.get_operations() if op.type == "MatMul"):
            cast = product.inputs[0].op
            source = cast.inputs[0].op
            while source.type == "Reshape":
                source = source.inputs[0].op
            count += cast.type == source.type == "Cast"
        return count

    shape = (None, None, IN)
    found, _ = traced(layer, shape, "bfloat16")
    monkeypatch.setattr(exported, "_in_bfloat16", lambda rows: tf.cast(rows, "bfloat16"))
    usual, _ = traced(layer, shape, "bfloat16")
    assert (casts(found), casts(usual)) == ((0, 0) if gated else (0, 1))
    assert_close(found(x), usual(x), atol=0, rtol=0)


def test_a_graph_has_the_weights_of_a_layer_once_and_nothing_changes_outside():
    layer, shape = made("dense")
    spec = [tf.TensorSpec(shape, tf.float32)]
    twice = tf.function(lambda x: layer(x) + layer(2 * x), input_signature=spec)
    with exported.exported_weights() as weights:
        graph = twice.get_concrete_function().graph
        assert exported.current() is None  # outside of a graph
        layer(np.ones((2, 3, IN), "float32"))
    assert weights.size == 4 * (IN * 11 + 11)
    assert sum(op.type == "Const" and op.outputs[0].shape == (IN, 11) for op in graph.get_operations()) == 1
    after = tf.function(lambda x: layer(x), input_signature=spec).get_concrete_function()
    assert len(after.captured_inputs) == 2
    assert exported.current() is None


def test_all_graphs_share_the_variables_of_a_layer_and_each_is_traced_once():
    layer, shape = made("dense")
    x = np.random.default_rng(2).normal(size=(*FREE, IN)).astype("float32")
    traces = []

    def function(factor):
        def scaled(x):
            traces.append(factor)
            return layer(factor * x)

        return tf.function(scaled, input_signature=[tf.TensorSpec(shape)], autograph=False)

    functions = [function(factor) for factor in (1.0, 2.0)]
    with exported.exported_weights("bfloat16", constants=False) as weights:
        captured = [function.get_concrete_function().captured_inputs for function in functions]
    assert [id(one) for one in captured[0]] == [id(one) for one in captured[1]]
    assert len(captured[0]) == 2 and weights.size == 0
    assert_close(functions[1](x), layer(2 * x), atol=0.2, rtol=0)
    assert traces == [1.0, 2.0]


def test_a_part_of_a_graph_can_have_variables_only():
    layer, shape = made("dense")
    x = np.random.default_rng(2).normal(size=(*FREE, IN)).astype("float32")
    for precision, atol in (("float32", 1e-5), ("bfloat16", 0.2)):

        def both(x):
            with exported.only_variables():
                return layer(x), layer(2 * x)

        function = tf.function(both, input_signature=[tf.TensorSpec(shape)], autograph=False)
        with exported.exported_weights(precision) as weights:
            function.get_concrete_function()
            assert weights.are_constants and weights.size == 0
        assert (
            tf.as_dtype(precision) in [one.dtype for one in variables_of(function)] and len(variables_of(function)) == 2
        )
        for found, expected in zip(function(x), both(x), strict=True):
            assert_close(found, expected, atol=atol, rtol=0)


def test_constants_over_the_limit_are_refused():
    layer, shape = made("dense")
    size = 4 * (IN * 11 + 11)
    assert traced(layer, shape, limit=size)[1].size == size
    with pytest.raises(exported.TooLarge):
        traced(layer, shape, limit=size - 1)


def test_large_constants_can_be_left_without_values():
    layer = projection.Projection(32)
    layer.build((None, 16))
    _, weights = traced(layer, (None, 16), with_values=False)
    assert [one.shape for one in weights.values] == [(16, 32)]  # the bias is small
    np.testing.assert_array_equal(weights.values[0], layer.kernel)


def test_later_changes_of_the_weights_need_a_new_trace():
    layer, shape = made("dense")
    x = np.ones((*FREE, IN), "float32")
    before = to_numpy(layer(x))
    function, _ = traced(layer, shape)
    layer.kernel.assign(2 * layer.kernel)
    assert_close(function(x), before, atol=1e-5, rtol=1e-5)
    assert keras.ops.max(keras.ops.abs(layer(x) - before)) > 0.1


@pytest.mark.parametrize("shape", [(None, IN), (None, 1, IN)], ids=str)
def test_a_product_has_at_least_eight_rows(shape, monkeypatch):
    """With fewer in the first call, oneDNN would lay out the kernel for few rows, and later calls lay it out again."""
    product = exported._PRODUCTS["float32"]

    def checked(rows, kernel, bias):
        with tf.control_dependencies([tf.debugging.assert_greater_equal(tf.shape(rows)[0], 8)]):
            return product(tf.identity(rows), kernel, bias)

    monkeypatch.setitem(exported._PRODUCTS, "float32", checked)
    layer, _ = made("dense")
    function, _ = traced(layer, shape)
    for count in (1, 7, 8, 13):
        x = np.random.default_rng(2).normal(size=(count, IN)).astype("float32")
        x = x.reshape([count if size is None else size for size in shape])
        assert_close(function(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shape", [(None, IN), (None, 1, IN)], ids=str)
def test_variables_have_a_product_of_their_own_for_few_rows(shape, use_bias, monkeypatch):
    """In float32, one product may lay out its kernel for few rows, and the other never gets few."""
    seen = []

    def noting(product):
        def noted(rows, kernel, bias):
            number = len(seen)
            seen.append(set())

            def note(count):
                seen[number].add(int(count))
                return np.int32(0)

            with tf.control_dependencies([tf.numpy_function(note, [tf.shape(rows)[0]], tf.int32)]):
                return product(tf.identity(rows), kernel, bias)

        return noted

    monkeypatch.setitem(exported._PRODUCTS, "float32", noting(exported._PRODUCTS["float32"]))
    monkeypatch.setattr(exported, "_float32_product_of_few", noting(exported._float32_product_of_few))
    layer, _ = made("dense", use_bias=use_bias)
    function, weights = traced(layer, shape, constants=False)
    assert weights.size == 0
    for count in (1, 4, 5, 7, 8, 13):
        x = np.random.default_rng(2).normal(size=(count, IN)).astype("float32")
        x = x.reshape([count if size is None else size for size in shape])
        assert_close(function(x), layer(x), atol=1e-5, rtol=1e-5)
    x = np.random.default_rng(2).normal(size=(1, 2, IN)).astype("float32")  # two tokens, as drafts have
    before, seen[:] = [counts for counts in seen if counts], []
    function, _ = traced(layer, (None, 2, IN), constants=False)
    for count in (1, 2, 3, 11):
        assert_close(function(np.tile(x, (count, 1, 1))), layer(np.tile(x, (count, 1, 1))), atol=1e-5, rtol=1e-5)
    assert [counts for counts in seen if counts] == [{2, 4}, {8, 22}]
    assert before == [{1, 4}, {8, 13}]  # TensorFlow may trace a branch twice, and runs one of the graphs


def test_few_rows_have_a_sum_that_tensorflow_fuses_by_onednn_alone():
    """Its own fused product is slow for a single row, by far the slowest with a transposed kernel."""
    layer, _ = made("dense")
    table = TokenEmbedding(23, IN, position_encoding=None)
    table.build((None, None))
    table.set_weights([np.random.default_rng(1).normal(size=(23, IN))])
    for whole, most in ((layer, 4), (lambda x: table(x, reverse=True), 1)):
        function, _ = traced(whole, (None, 1, IN), constants=False)
        (branches,) = [op for op in function.get_concrete_function().graph.get_operations() if op.type.endswith("If")]
        graph = branches.graph
        few, enough = (
            {op.type for op in graph._get_function(branches.get_attr(name).name).graph.get_operations()}
            for name in ("then_branch", "else_branch")
        )
        assert {"MatMul", "AddV2"} <= few and "BiasAdd" not in few and "BiasAdd" in enough
        compared = [op for op in graph.get_operations() if op.type == "LessEqual"]
        assert [int(tf.get_static_value(op.inputs[1])) for op in compared] == [most]
        for count in (1, 2, 4, 5, 9):
            x = np.random.default_rng(2).normal(size=(count, 1, IN)).astype("float32")
            assert_close(function(x), whole(x), atol=1e-5, rtol=1e-5)


def test_several_layers_are_computed_together_with_their_variables():
    layers, shape = zip(*[made("to heads", use_bias=use_bias) for use_bias in (True, False, True)], strict=True)
    spec = [tf.TensorSpec(shape[0])]
    function = tf.function(lambda x: projection.project_together(layers, x), input_signature=spec, autograph=False)
    with exported.exported_weights(constants=False):
        captured = function.get_concrete_function().captured_inputs
    assert len(captured) == 6  # the second has a bias of zeros
    for free in (FREE, (1, 1), (11, 1), (0, 5)):
        x = np.random.default_rng(2).normal(size=(*free, IN)).astype("float32")
        for found, layer in zip(function(x), layers, strict=True):
            assert_close(found, layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("constants", [True, False])
@pytest.mark.parametrize(("precision", "atol"), [("float32", 1e-5), ("bfloat16", 0.06), ("int8", 0.15)])
@pytest.mark.parametrize("use_padding", [True, False])
def test_logits_of_tied_embeddings(precision, atol, constants, use_padding):
    """In bfloat16, the table and the hidden states are rounded to bfloat16, and sums at their end."""
    skip_without_int8_products(precision)
    padding = {"padding_id": 3, "zero_padding": True} if use_padding else {}
    layer = TokenEmbedding(23, IN, **padding, position_encoding=None)
    layer.build((None, None))
    layer.set_weights([np.random.default_rng(1).normal(size=(23, IN))])
    function, weights = traced(lambda x: layer(x, reverse=True), (None, None, IN), precision, constants=constants)
    size = {"float32": 4, "bfloat16": 2, "int8": 1}[precision]
    # The table and the bias; in int8 also a scale for each token.
    numbers = {"float32": 4 * 23, "bfloat16": 2 * 23, "int8": 2 * 4 * 23}[precision]
    assert weights.size == constants * (size * 23 * IN + numbers)
    if not constants:
        captured = sorted(one.dtype.name for one in variables_of(function))
        assert captured == (["float32", "float32", "int8"] if precision == "int8" else 2 * [precision])
    for free in (FREE, (1, 1), (13, 1), (0, 5)):
        x = np.random.default_rng(2).normal(size=(*free, IN)).astype("float32")
        rounded = [to_numpy(tf.cast(tf.cast(one, "bfloat16"), "float32")) for one in (x, layer.tokens.embeddings)]
        values = rounded if precision == "bfloat16" else (x, to_numpy(layer.tokens.embeddings))
        expected = values[0].astype("float64") @ values[1].T.astype("float64")
        expected[..., [3] if use_padding else []] = 0
        found = to_numpy(function(x))
        assert found.shape == (*free, 23) and found.dtype == "float32"
        assert_close(found, expected, atol=atol, rtol=2**-7 if precision == "bfloat16" else 0)
        if precision == "int8" and found.size:
            assert np.abs(found - expected).max() > 1e-3  # it is not the product in float32


def test_layers_in_half_precision_keep_their_own_products():
    layer, shape = made("dense")
    half = projection.Projection(11, dtype="mixed_bfloat16")
    half.build(shape)
    half.set_weights(layer.get_weights())
    tied = TokenEmbedding(23, IN, position_encoding=None, dtype="bfloat16")
    tied.build((None, None))
    x = np.random.default_rng(2).normal(size=(*FREE, IN)).astype("float32")
    for call in (half, lambda x: tied(x, reverse=True)):
        function, _ = traced(call, shape, constants=False)
        assert function(x).dtype == "bfloat16"
        assert_close(keras.ops.cast(function(x), "float32"), keras.ops.cast(call(x), "float32"), atol=0.05, rtol=0.02)
